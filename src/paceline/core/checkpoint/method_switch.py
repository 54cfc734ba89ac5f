"""Checkpoints of trainings that change their method: each says which it had."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.core.active_training import Changes
from paceline.core.optimizer import present_of
from paceline.interfaces import Runtime


def specs_of(runtime: Runtime) -> list[str]:
    """By which spec each training goes now, of those that change their method; nothing of others."""
    changing = (
        None if begun.released else present_of(begun.optimizer).changes
        for begun in runtime.job.trainings
    )
    return ["" if one is None else one.spec for one in changing]


@contextmanager
def trained_by(runtime: Runtime, specs: Sequence[str]) -> Iterator[None]:
    """Within it the trainings that change their method go by those *specs*, so that what belongs to
    them is taken: what a code had not sent, a worker's own model in the middle of a round. Afterwards
    each goes on as it did, also when the checkpoint is refused. Collective."""
    back: list[tuple[Changes, str]] = []
    try:
        for begun, spec in zip(runtime.job.trainings, specs, strict=False):
            if begun.released:
                continue
            present = present_of(begun.optimizer)
            changes = present.changes
            if changes is None or present.finished or spec in ("", changes.spec):
                continue
            before = changes.spec
            why = changes.change(spec, together=True)
            if not why:
                back.append((changes, before))
            elif runtime.rank == 0:
                print(
                    f"paceline: the checkpoint was saved under {spec}, which cannot be begun "
                    f"here ({why}): what only that method keeps is not taken",
                    file=sys.stderr,
                )
        yield
    except Exception:
        _go_back(back)  # what fails in a load fails on all ranks
        raise
    _go_back(back)


def _go_back(back: list[tuple[Changes, str]]) -> None:
    for changes, before in back:
        changes.change(before, together=True)
