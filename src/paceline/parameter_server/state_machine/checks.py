"""What workers must have in common, and what a step's gradients must."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise, zip_longest

from paceline.errors import UsageError
from paceline.interfaces import HeldPush
from paceline.interfaces.server_messages import Join

SAME = (
    *("options", "method", "clip_norm", "servers"),
    *("compression", "replies"),
    *("optimizer", "tensors", "dtypes", "units"),
)
"""The fields of `Join` in which all workers agree."""
LONGEST = 200
"""More letters of a value are told by a digest."""


def in_words(join: Join) -> dict[str, str]:
    """What is trained, by the names of fields."""
    return {name: _short(repr(getattr(join, name))) for name in SAME}


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"of digest {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """The name of a field in which they differ; empty where there is none."""
    return next((name for name in SAME if ours.get(name) != theirs.get(name)), "")


def require_same(first: Join, join: Join, worker: int, restored: bool) -> None:
    """Raise `UsageError` unless *worker* trains what the first one does; *restored*: what a
    snapshot holds."""
    for what in SAME:
        ours, theirs = getattr(first, what), getattr(join, what)
        if ours != theirs:
            if isinstance(ours, list):
                pairs = zip_longest(ours, theirs, fillvalue="nothing")
                ours, theirs = next(p for p in pairs if p[0] != p[1])
            if restored:
                raise UsageError(
                    f"the snapshot is of another training: {what} is {ours!r} there and "
                    f"{theirs!r} for worker {worker}; give the script and the options that "
                    "it was made with, or remove the file"
                )
            raise UsageError(
                f"workers train different things: {what} is {ours!r} for who joined "
                f"first and {theirs!r} for worker {worker}; build the same model, with "
                "the same options, on every worker"
            )


def different_hyperparameters(pushes: Sequence[HeldPush]) -> str:
    """How the hyperparameters of one step's pushes differ; empty where they do not."""
    for first, push in pairwise(pushes):
        if push.hyperparameters != first.hyperparameters:
            return (
                f"step {first.step}: worker {first.worker} has hyperparameters "
                f"{first.hyperparameters!r} and worker {push.worker} "
                f"{push.hyperparameters!r}; one step's must be equal"
            )
    return ""


def different_units(pushes: Sequence[HeldPush]) -> str:
    """How the units of one round's pushes differ; empty where they do not."""
    for first, push in pairwise(pushes):
        if push.units != first.units:
            return (
                f"step {first.step}, bucket {first.bucket}: worker {first.worker} has sent "
                f"units {first.units} and worker {push.worker} {push.units}; one step's "
                "must be equal"
            )
    return ""


def total_weight(weights: Sequence[float]) -> float:
    """The sum of weights; 1 where only rounding keeps it from 1."""
    whole = sum(sorted(weights))
    return 1.0 if abs(whole - 1) < 1e-9 else whole
