"""The mean of all workers' models as they are, outside of rounds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.interfaces import Run
from paceline.methods.local_updates.fragments import LocalState, Part
from paceline.methods.local_updates.options import Options


def mean_of_all(state: LocalState, run: Run) -> Callable[[], None]:
    """Put it into the model; returns what undoes that. Workers weigh what they have trained
    on since the last mean of all: where nobody has, models are equal. Collective."""
    undo = state.remember()
    for part, total in zip(state.parts, _totals(state, run), strict=True):
        if total:
            _form(part, run, total)
            for flat in part.flats:
                flat.put()
    return undo


def settle(options: Options, state: LocalState, run: Run) -> None:
    """After the last round: what is left of each part becomes the plain mean, weighed in the
    same way, and the outer momentum is dropped. Where nobody has trained since the last mean
    nothing moves. Collective."""
    for part, total in zip(state.parts, _totals(state, run), strict=True):
        if total:
            _form(part, run, total)
            for flat in part.flats:
                flat.put()
            if options.keeps_anchor:
                part.take_anchor()
        elif options.keep_local:
            part.put_anchor()
        for momentum in part.momenta:
            momentum.zero_()
        part.since.begin(run.step)
    state.since_group.begin(run.step)


def _totals(state: LocalState, run: Run) -> list[float]:
    """What all workers weigh together, for each part."""
    own = [part.since.weight for part in state.parts]
    device = run.parameters[0].device
    totals = torch.tensor(own, dtype=torch.float64, device=device)
    run.comm.all_reduce(totals, "sum").wait()
    summed: list[float] = totals.tolist()
    return summed


def _form(part: Part, run: Run, total: float) -> None:
    """The flat buffers become the weighed mean."""
    share = part.since.weight / total
    pending = []
    for flat in (*part.parameters, *part.statistics):
        flat.take()
        flat.buffer.mul_(share)
        pending.append(run.comm.all_reduce(flat.buffer, "sum"))
    for flat in part.counters:
        flat.take()
        pending.append(run.comm.all_reduce(flat.buffer, "max"))
    for one in pending:
        one.wait()
