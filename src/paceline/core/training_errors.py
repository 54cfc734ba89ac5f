"""Why a training cannot go on, where it cannot."""

from __future__ import annotations

from paceline.errors import GradientError


class Faults:
    """*broken*: the error that has left the ranks out of step, so that `finish` only says
    so; or nothing. The first one counts."""

    def __init__(self) -> None:
        self.broken = ""

    def refused(self, message: str) -> GradientError:
        """An error to be raised, after which the ranks may be out of step."""
        error = GradientError(message)
        self.broken = _described(error)
        return error

    def failed(self, error: BaseException) -> None:
        """This error is about to reach the script."""
        self.broken = self.broken or _described(error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
