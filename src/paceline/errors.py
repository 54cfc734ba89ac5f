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
    """A name, an option or an argument is unknown, or does not work with the others.

    Mend the call or the command: the same call fails again.
    """


class UnknownNameError(UsageError):
    """No method, compressor or collective has this name. The message lists the known names."""


class ClusterError(UsageError):
    """A cluster file, or another description of a cluster, is wrong. The message names key and value."""


class ModelMismatchError(PacelineError):
    """Ranks called `distribute` with different models or options. Every rank raises it."""


class GradientError(PacelineError):
    """A gradient cannot be averaged: it is sparse or not finite, came twice, or was changed after its average."""


class CollectiveMismatchError(PacelineError):
    """In the simulated runtime: the ranks of a communicator issued different collectives."""


class DeadlockError(PacelineError):
    """Every simulated worker waits for another one. The message says for what each waits."""


class PeerLostError(PacelineError):
    """Another rank of the job failed or died, so this one cannot go on."""

    restart_helps = True


class WorkerFailedError(PacelineError):
    """A worker's script raised an error, which ended the job for all workers.

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
