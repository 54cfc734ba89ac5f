"""What a worker has of its own, and a checkpoint keeps per worker.

`paceline.core` has a list of these; `paceline.core.checkpoint` saves and restores them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from paceline.errors import UsageError


class OwnState(Protocol):
    """One state that differs between workers: a method's, a compressor's residuals.

    What is saved is data: tensors, numpy arrays, numbers, texts, lists, tuples and dicts
    of them.
    """

    @property
    def name(self) -> str:
        """Whose state it is, for example ``"method.bsp"``. Equal on all workers, without a
        slash, and once in a training. A state is loaded by who has the same name."""
        ...

    def save(self) -> dict[str, Any]:
        """This worker's state, between two steps. Not collective. The tensors may be the
        live ones: they are written before training goes on."""
        ...

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what `save` or `redistribute` gave, bit for bit. Tensors are on the
        processor, and nobody else holds them. Not collective."""
        ...

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """What this worker loads where it cannot have its own: the job that saved had
        another number of workers than this one's *workers*, or lost some of them.

        *parts* gives what `save` gave, in order of ranks, on every worker alike; each is
        read when it is asked for. Changes nothing. Raises `UsageError` where no answer
        would be right.
        """
        ...


def refused(name: str, parts: Iterable[dict[str, Any]], workers: int) -> dict[str, Any]:
    """For states that mean nothing to another number of workers: raises `UsageError` where
    any part holds something. Returns an empty state where none does."""
    held = [bool(part) for part in parts]
    if not any(held):
        return {}
    raise UsageError(
        f"the checkpoint holds {name} of {len(held)} worker{'s' * (len(held) > 1)}, which a "
        f"job of {workers} cannot take over: load it with as many workers as the job that "
        "saved it had, if all of them lived then; or save after finish(), when nothing of "
        "it is left"
    )
