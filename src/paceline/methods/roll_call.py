"""Who takes part: a second round, held only in steps where some rank asks for it.

A rank asks when a tensor took no part in its backward pass, or when it is out of data. It
must tell the others before any of them uses the mean, in a step that everybody else
thinks ordinary. A flag in every message would be padding, so the request travels inside
the gradient: the last element of the last bucket becomes NaN, and so does its mean on every
rank. All ranks then see the same NaN and hold the second round together: which ranks
train, which tensors were used anywhere, and the true value of that one element. A
genuine NaN there costs a round and stays a NaN. In ordinary steps nothing is sent.

Whoever has left his loop between ``backward()`` and ``step()`` says that, too: his model
lacks a step that the others' have.
"""

from __future__ import annotations

import math

import torch

from paceline.interfaces import Run

BEHIND = -1.0
"""The vote of a rank that has left with a step due; 0: without; else its weight."""


def ask_for_roll_call(run: Run, carrier: torch.Tensor) -> torch.Tensor:
    """Ask, if this rank has something to tell. *carrier* is the flat tensor that is sent
    last; call before that.

    Returns this rank's own value of the element that carries the request.
    """
    element = _last_element(carrier)
    own = element.clone()
    if not run.active or not all(all(bucket.used) for bucket in run.buckets):
        element.fill_(math.nan)
    return own


def answer_roll_call(run: Run, carrier: torch.Tensor, own: torch.Tensor) -> float:
    """Hold the second round if anybody asked. Call when all sums are in.

    Afterwards ``bucket.used`` says which tensors were used on any rank, and
    `Run.participants` and `Run.behind` are up to date. Returns what sums are to be multiplied with: not 1
    where some ranks no longer train, since a mean is over those that do.
    """
    element = _last_element(carrier)
    if not math.isnan(element.item()):
        return 1.0
    n = run.comm.size
    used = [float(flag) for bucket in run.buckets for flag in bucket.used]
    ballot = torch.zeros(n + len(used) + 1, dtype=torch.float64, device=own.device)
    if run.active:
        ballot[run.comm.rank] = run.weight
        ballot[n:-1] = torch.tensor(used, dtype=torch.float64)
        ballot[-1:] = own
    elif run.step_is_due:
        ballot[run.comm.rank] = BEHIND
    run.comm.all_reduce(ballot, "sum").wait()

    element.copy_(ballot[-1:])
    votes = ballot.tolist()
    run.participants = [rank for rank in range(n) if votes[rank] > 0]
    run.behind = [rank for rank in range(n) if votes[rank] < 0]
    flags = iter(votes[n:-1])
    for bucket in run.buckets:
        bucket.used[:] = [next(flags) > 0 for _ in bucket.used]
    whole = math.fsum(votes[rank] for rank in run.participants)
    return 1 / whole if 0 < len(run.participants) < n else 1.0


def keep_company_to_the_end(run: Run) -> int | None:
    """This rank is out of data: contribute nothing, in step with the others, until all are.

    Returns whose model all are to take then, unless all hold the same: somebody has stopped
    earlier than others, or a step short of them, and this rank trained to the end.
    """
    last = run.participants
    while run.participants:
        last = run.participants
        run.keep_company()
    equal = [rank for rank in last if rank not in run.behind] or last
    return equal[0] if len(equal) < run.comm.size else None


def _last_element(buffer: torch.Tensor) -> torch.Tensor:
    """The element that carries the request, as a real tensor of size 1."""
    flat = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    return flat[-1:]
