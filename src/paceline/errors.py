"""Every error that paceline raises on purpose, named by whose fault it is.

A message says what is wrong, what was expected, and what to do.

Example:
    ::

        try:
            optimizer = paceline.distribute(model, optimizer, method=args.method)
        except paceline.PacelineError as error:
            sys.exit(str(error))
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of all errors that paceline raises.

    Attributes:
        exit_status: Status of a command that ends with this error.
        restart_helps: Whether the same process, started again, may come further.
    """

    exit_status = 1
    restart_helps = False


class UsageError(PacelineError, ValueError):
    """The caller asked for something that does not exist or cannot work."""


class UnknownNameError(UsageError):
    """A registry has no row of that name: a script may add one, once it runs."""


class ClusterError(UsageError):
    """A cluster description that cannot be."""


class ModelMismatchError(PacelineError):
    """The ranks of one job do not hold the same model or the same options."""


class GradientError(PacelineError):
    """A gradient came at a moment, or in a form, that cannot be averaged."""


class CollectiveMismatchError(PacelineError):
    """The ranks of a communicator issued different collectives."""


class DeadlockError(PacelineError):
    """Every worker waits, and nothing is left that could wake one of them."""


class PeerLostError(PacelineError):
    """Another rank of the job ended badly, so this one cannot go on."""

    restart_helps = True


class WorkerFailedError(PacelineError):
    """A worker's script raised; the job ended for all of them.

    Attributes:
        rank: The worker; None where it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        """Say which worker failed, and how.

        Args:
            message: The error's text.
            rank: The worker; None where it is not known.
        """
        super().__init__(message)
        self.rank = rank


def unknown(kind: str, got: str, allowed: Iterable[str]) -> str:
    """Make an error's text for an unknown name, with the nearest one that is known.

    Args:
        kind: What the name is of: ``"method"``.
        got: The unknown name.
        allowed: The known names.

    Returns:
        One or two sentences.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(got, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {got!r}.{hint} Known: {', '.join(names) or 'none'}."
