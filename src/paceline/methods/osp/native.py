"""OSP by all-reduce: both stages among workers that each hold the optimizer.

Exact for every optimizer that can be applied piece by piece: a worker keeps the last exact
values of what is deferred, with the optimizer's state that belongs to them, and the
tentative step is a step of that optimizer whose result is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Hyperparameters, Pending, Piece, Updater, UpdatingRun
from paceline.methods.osp.decision import Decider
from paceline.methods.osp.layout import Layout, Message
from paceline.methods.osp.options import OSPOptions
from paceline.tensors import Bucket

SECOND = "stage 2"
"""The channel that stage 2 has for itself."""

PREDICTED = 0.9
"""How much of the mean of mean gradients stays from one step to the next
(``correction=average``)."""


@dataclass
class Deferral:
    """What of one step travels in stage 2, and what the worker computes with meanwhile."""

    pieces: list[Piece]  # U(i), those that took part in the step
    gradients: list[torch.Tensor]  # their means, once `pending` was waited for
    hyperparameters: Hyperparameters
    exact: list[torch.Tensor]  # P(i), and P(i+1) once `applied`
    stamps: list[int]
    applied: bool = False


@dataclass
class NativeState:
    """*deferral*: of the last step, until the end of the next backward pass."""

    options: OSPOptions
    updater: Updater
    layout: Layout
    decider: Decider
    pending_first: list[Pending] = field(default_factory=list)
    pending_second: list[Pending] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    unused: set[int] = field(default_factory=set)
    weight: float = 1.0  # of this worker's gradients in the mean
    deferral: Deferral | None = None
    predicted: dict[Piece, torch.Tensor] = field(default_factory=dict)
    room: dict[Any, torch.Tensor] = field(default_factory=dict)


def begin(options: OSPOptions, run: UpdatingRun) -> NativeState:
    """Collective."""
    total = sum(bucket.bytes for bucket in run.buckets)
    updater = run.take_over(options.piece_bytes(total))
    layout = Layout(run, updater)
    second = run.comm.channel(SECOND) if options.defer != "nothing" else None
    return NativeState(
        options=options,
        updater=updater,
        layout=layout,
        decider=Decider(options, run, layout, second),
    )


def bucket_ready(state: NativeState, run: UpdatingRun, bucket: Bucket) -> None:
    state.layout.follow(run)
    state.decider.watch.bucket_ready()
    if state.options.overlap:
        _send(state, run, bucket)


def backward_ended(state: NativeState, run: UpdatingRun) -> None:
    state.decider.watch.backward_ended()
    if not state.options.overlap:
        for bucket in run.buckets:
            _send(state, run, bucket)
    for pending in (*state.pending_second, *state.pending_first):
        pending.wait()
    state.pending_second.clear()
    state.pending_first.clear()
    state.decider.watch.all_arrived()
    # Kept, since a forward pass before step() would make it the next batch's.
    state.weight = run.weight
    state.unused = {
        id(parameter)
        for bucket in run.buckets
        for parameter, used in zip(bucket.parameters, bucket.used, strict=True)
        if not used
    }


def after_update(state: NativeState, run: UpdatingRun) -> None:
    if not run.active:
        # This worker only keeps the others company. What it had under way is complete.
        _settle(state, run)
        state.messages.clear()
        if run.participants:
            _send_second(state, run, zeros=True)
        state.decider.step_ended(run, state.pending_second)
        return
    hyperparameters = state.updater.hyperparameters()
    _settle(state, run)
    pieces, gradients = [], []
    for message in state.messages:
        for number, part in message.parts():
            if state.layout.owner_of(number) not in state.unused:
                pieces.append(state.layout.pieces[number])
                gradients.append(part)
    run.clip(gradients)
    state.decider.rate(state.updater, pieces, gradients)
    start = run.stopwatch.mark()
    state.updater.apply(pieces, gradients, hyperparameters)
    size = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    state.decider.updated(start, run.stopwatch.mark(), size)
    state.messages.clear()
    _defer(state, run, hyperparameters)
    state.decider.step_ended(run, state.pending_second)


def finish(state: NativeState, run: UpdatingRun) -> None:
    source = run.keep_company_to_the_end()
    for pending in state.pending_second:
        pending.wait()
    state.pending_second.clear()
    _settle(state, run)
    state.decider.ended(run)
    if source is not None:
        run.take_model(source)


def consolidate(state: NativeState, run: UpdatingRun) -> Callable[[], None]:
    """The parameters with all gradients in them that were sent; and the optimizer's state
    that belongs to them."""
    deferral = state.deferral
    if deferral is None:
        return lambda: None
    for pending in state.pending_second:
        pending.wait()
    values = state.updater.values(deferral.pieces)
    tentative = [value.clone() for value in values]
    _settle(state, run)
    exact = [value.clone() for value in values]

    def undo() -> None:
        values = state.updater.values(deferral.pieces)
        _copy(tentative, values)
        deferral.exact, deferral.applied = exact, True
        deferral.stamps = state.updater.stamps(deferral.pieces)
        state.deferral = deferral

    return undo


# ---- stage 1 ----


def _send(state: NativeState, run: UpdatingRun, bucket: Bucket) -> None:
    """A bucket's important part leaves."""
    message = state.layout.message(bucket)
    if message.numbers:
        state.messages.append(message)
    flat = message.flat
    if bucket.last and not flat.numel():
        flat = bucket.buffer.new_zeros(1)  # what all learn in a step travels with it
    if flat.numel():
        state.pending_first.append(run.mean(flat, of=bucket))


# ---- stage 2 ----


def _defer(
    state: NativeState, run: UpdatingRun, hyperparameters: Hyperparameters
) -> None:
    """Take the tentative step (LGP), and send what was deferred on its way."""
    layout, updater = state.layout, state.updater
    layout.follow(run)  # the planner may have made new buckets
    numbers = [n for n in layout.deferred if layout.owner_of(n) not in state.unused]
    if not layout.deferred:
        return
    pieces = [layout.pieces[number] for number in numbers]
    own = [layout.gradient(number) for number in numbers]
    values = updater.values(pieces)
    exact = [
        _room(state, ("exact", piece), value).copy_(value)
        for piece, value in zip(pieces, values, strict=True)
    ]
    sums = _send_second(state, run)
    # Buckets hold this worker's share of the mean; its own gradient is the whole of that.
    whole = 1 / state.weight if state.weight else 0.0
    if whole != 1.0:
        for gradient in own:
            gradient.mul_(whole)
    # p~_k(i+1) = P(i) - eta g_k(i), by the optimizer's own rule and with its state
    guess = _guess(state, pieces, own)
    if guess is not None and pieces:
        if state.options.correction == "plain":
            for piece, value, gradient in zip(pieces, values, guess, strict=True):
                group = hyperparameters[updater.group_of(piece)]
                rate = -group["lr"] if group.get("maximize") else group["lr"]
                value.sub_(gradient.view_as(value) * rate)
        else:
            tentative = updater.apply(pieces, guess, hyperparameters, commit=False)
            _copy(tentative, values)
    state.deferral = Deferral(
        pieces=pieces,
        gradients=[sums[number] for number in numbers],
        hyperparameters=hyperparameters,
        exact=exact,
        stamps=updater.stamps(pieces),
    )


def _send_second(
    state: NativeState, run: UpdatingRun, zeros: bool = False
) -> dict[int, torch.Tensor]:
    """Start the all-reduce of everything deferred; returns where each piece's mean will
    be. All ranks send as much, used or not."""
    places: dict[int, torch.Tensor] = {}
    for kind, numbers in state.layout.deferred_by_kind().items():
        message = state.layout.pack(numbers, _room(state, ("second", kind)))
        if zeros:
            message.flat.zero_()
        places.update(message.parts())
        state.pending_second.append(run.mean(message.flat, channel=SECOND))
    return places


def _settle(state: NativeState, run: UpdatingRun) -> None:
    """Put the exact values of what was deferred in the place of the tentative ones: their
    means have arrived."""
    deferral, state.deferral = state.deferral, None
    if deferral is None:
        return
    updater = state.updater
    _require_untouched(deferral, state)
    _copy(deferral.exact, updater.values(deferral.pieces))
    if deferral.applied:
        return
    state.decider.rate(updater, deferral.pieces, deferral.gradients)
    if state.options.correction == "average":
        for piece, gradient in zip(deferral.pieces, deferral.gradients, strict=True):
            known = state.predicted.get(piece)
            if known is None:
                state.predicted[piece] = gradient.clone()
            else:
                known.lerp_(gradient, 1 - PREDICTED)
    updater.apply(deferral.pieces, deferral.gradients, deferral.hyperparameters)


def _guess(
    state: NativeState, pieces: Sequence[Piece], own: list[torch.Tensor]
) -> list[torch.Tensor] | None:
    """What the mean gradient may be: this worker's own, in the paper."""
    if state.options.correction == "none":
        return None
    if state.options.correction != "average":
        return own
    guesses = []
    for piece, gradient in zip(pieces, own, strict=True):
        known = state.predicted.get(piece)
        guesses.append(gradient if known is None else (gradient + known) / 2)
    return guesses


def _require_untouched(deferral: Deferral, state: NativeState) -> None:
    now = state.updater.stamps(deferral.pieces)
    for piece, before, after in zip(deferral.pieces, deferral.stamps, now, strict=True):
        if before != after:
            raise UsageError(
                f"parameter {state.layout.name_of(piece)!r} was written to since step(), "
                "while a part of its update was under way (osp, stage 2): what was "
                "written would be lost. Load and change parameters before training, or "
                "call finish(), change them, and distribute again"
            )


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for value, into in zip(source, target, strict=True):
            into.copy_(value)


def _room(state: NativeState, key: Any, like: torch.Tensor | None = None) -> Any:
    """Memory that is kept from step to step: new pages cost more than the copy."""
    if like is None:
        return lambda size, model: _grown(state.room, key, size, model)
    kept = state.room.get(key)
    if kept is None or kept.shape != like.shape or kept.dtype != like.dtype:
        kept = state.room[key] = torch.empty_like(like)
    return kept


def _grown(
    rooms: dict[Any, torch.Tensor], key: Any, size: int, model: torch.Tensor
) -> torch.Tensor:
    kept = rooms.get(key)
    if kept is None or kept.numel() < size:
        kept = rooms[key] = model.new_empty(size)
    return kept[:size]
