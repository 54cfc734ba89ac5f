"""OSP over servers: the worker's half.

Servers hold the exact parameters and the optimizer's state. For its tentative step a worker
has the exact values of what it defers, and mirrors the momentum from how these moved: SGD
without Nesterov's form moves by -eta v, so v is (P(i-1) - P(i)) / eta, up to rounding, at
no traffic. The state of other optimizers is pulled for what is deferred, meanwhile; or
what they did last is repeated: P(i) + (P(i) - P(i-1)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.interfaces import Piece, Remote, ServerRun, UnitPlace, Updater
from paceline.methods.osp.budget import Growth
from paceline.methods.osp.choice import measured_rate
from paceline.methods.osp.explain import why_nothing
from paceline.methods.osp.options import FADES, INTERVAL, OSPOptions
from paceline.methods.osp.reports import Measured, read_mask, written_report
from paceline.methods.osp.trial import looks_in
from paceline.methods.osp.watch import StepWatch
from paceline.tensors import Bucket

Unit = tuple[int, int]
"""A unit: its bucket, and its number there."""


@dataclass
class WorkerState:
    """*deferred*, of the last step, with their exact values *base* P(i) as of then, and
    *before* P(i-1), where it is known; *late*: what the second stage has brought since."""

    options: OSPOptions
    updater: Updater
    watch: StepWatch
    growth: Growth
    step: int
    began: int
    """The step with which this worker joined."""
    has_deferred: bool = False
    deferred: set[Unit] = field(default_factory=set)
    this_step: list[list[int]] = field(default_factory=list)
    """Per bucket, what the step under way defers."""
    base: dict[Unit, torch.Tensor] = field(default_factory=dict)
    before: dict[Unit, torch.Tensor] = field(default_factory=dict)
    late: dict[Unit, torch.Tensor] | None = None
    rates: list[float] = field(default_factory=list)
    """The learning rates of the last step, by group."""
    per_byte: float = 0.0
    layout: int = 0


def begin(options: OSPOptions, run: ServerRun) -> WorkerState:
    step = run.remote.join()
    state = WorkerState(
        options=options,
        updater=run.remote.own_updater(),
        watch=StepWatch(run.stopwatch, options.overlap),
        growth=Growth(options.budget, options.ramp, run.say),
        step=step,
        began=step,
        this_step=next_deferred(run.remote),
    )
    _ask_states(state, run.remote)
    return state


def next_deferred(remote: Remote) -> list[list[int]]:
    """Per bucket, the numbers of its units that the next step defers, as servers have told
    with their last answers (GIB)."""
    return [
        sorted(
            part.units[n] for part in remote.told(bucket) for n in read_mask(part.words)
        )
        for bucket in range(len(remote.units))
    ]


def bucket_ready(state: WorkerState, run: ServerRun, bucket: Bucket) -> None:
    state.watch.bucket_ready()
    if state.options.overlap:
        _push_first(state, run, bucket)


def backward_ended(state: WorkerState, run: ServerRun) -> None:
    state.watch.backward_ended()
    if not state.options.overlap:
        for bucket in run.buckets:
            _push_first(state, run, bucket)


def after_update(state: WorkerState, run: ServerRun) -> None:
    remote = run.remote
    hyperparameters = state.updater.hyperparameters()
    late = _late(state, remote)  # P(i) of what the last step deferred
    arrived = {(b, n): value for b, n, value in remote.arrived()}  # P(i+1)
    state.watch.all_arrived()
    deferred = next_deferred(remote)
    deferring = {(b, n) for b, numbers in enumerate(state.this_step) for n in numbers}
    next_step = {(b, n) for b, numbers in enumerate(deferred) for n in numbers}

    def exact(unit: Unit) -> torch.Tensor:  # P(i)
        return late[unit] if unit in late else _value(state, remote, unit)

    base = {unit: exact(unit).clone() for unit in deferring}
    before = {u: state.base.get(u, state.before.get(u)) for u in deferring}
    kept = {unit: exact(unit).clone() for unit in next_step - deferring}
    for unit, value in arrived.items():
        _put(state, remote, unit, value)
    for bucket in run.buckets:
        if state.this_step[bucket.index]:
            remote.push(bucket, state.step, state.this_step[bucket.index], late=True)
    _guess(state, run, base, before, hyperparameters)
    state.deferred, state.base, state.before, state.late = deferring, base, kept, None
    state.has_deferred = state.has_deferred or bool(deferring)
    state.rates = [float(group["lr"]) for group in hyperparameters]
    remote.written()
    changed = state.this_step != deferred
    state.this_step = deferred
    state.step += 1
    _ask_states(state, remote)
    state.growth.step(run.loss)
    state.watch.step_ended(state.layout)
    state.layout += changed
    state.watch.step_begins()


def finish(state: WorkerState, run: ServerRun) -> None:
    _settle(state, run.remote)
    if not state.has_deferred:
        steps, waited = state.step - state.began, state.per_byte > 0
        why = why_nothing(state.options, steps, state.growth.part, waited)
        if why is not None:
            run.say(why)
    run.remote.leave()


def consolidate(state: WorkerState, run: ServerRun) -> Callable[[], None]:
    """The parameters with all gradients in them that were sent."""
    remote = run.remote
    late = _late(state, remote)
    before = {
        (bucket, number): _value(state, remote, (bucket, number)).clone()
        for bucket, places in enumerate(remote.units)
        for number in range(len(places))
    }
    for unit, value in late.items():
        _put(state, remote, unit, value)

    def undo() -> None:
        for unit, value in before.items():
            _put(state, remote, unit, value)
        remote.written()

    return undo


def loaded(state: WorkerState, run: ServerRun) -> None:
    """All parameters are exact, and none of what was known of them is of use."""
    remote = run.remote
    _late(state, remote)
    remote.states()  # they were asked for before
    state.deferred, state.base, state.before, state.late = set(), {}, {}, None
    state.rates = []
    state.this_step = next_deferred(remote)
    state.layout += 1
    remote.written()
    _ask_states(state, remote)


# ---- the two stages ----


def _push_first(state: WorkerState, run: ServerRun, bucket: Bucket) -> None:
    deferred = state.this_step[bucket.index]
    count = len(run.remote.units[bucket.index])
    important = set(range(count)).difference(deferred)
    report = b""
    if bucket.last and state.step % INTERVAL == 0:
        report = written_report(_measured(state, run, FADES))
    elif bucket.last and looks_in(state.step) and any(state.this_step):
        report = written_report(_measured(state, run, fades=1.0))
    run.remote.push(bucket, state.step, important, report=report)


def _late(state: WorkerState, remote: Remote) -> dict[Unit, torch.Tensor]:
    """What the second stage of the last step brings; waits for it."""
    if state.late is None:
        # Copied: the memory in which it lands is used by the next second stage.
        state.late = {(b, n): v.clone() for b, n, v in remote.arrived(late=True)}
    return state.late


def _settle(state: WorkerState, remote: Remote) -> None:
    for unit, value in _late(state, remote).items():
        _put(state, remote, unit, value)
    state.deferred = set()
    remote.written()


# ---- the tentative step ----


def _guess(
    state: WorkerState,
    run: ServerRun,
    base: dict[Unit, torch.Tensor],
    before: dict[Unit, torch.Tensor | None],
    hyperparameters: Sequence[dict[str, Any]],
) -> None:
    """LGP: p~_k(i+1) = P(i) - eta (mu v + g_k + ...), for everything deferred."""
    remote, updater, correction = run.remote, state.updater, state.options.correction
    units = sorted(base)
    for unit in units:
        _put(state, remote, unit, base[unit])
    if correction == "none" or not units:
        return
    buckets = {bucket.index: bucket for bucket in run.buckets}
    places = [_place(remote, unit) for unit in units]
    own = [
        buckets[bucket].buffer[place.start : place.stop]
        for (bucket, _), place in zip(units, places, strict=True)
    ]
    pieces = [place.piece for place in places]
    values = updater.values(pieces)
    if correction == "plain":
        for piece, value, gradient in zip(pieces, values, own, strict=True):
            group = hyperparameters[updater.group_of(piece)]
            rate = -group["lr"] if group.get("maximize") else group["lr"]
            value.sub_(gradient.view_as(value) * rate)
        return
    pulled = {(b, n): entries for b, n, entries in remote.states()}
    mirrored: list[int] = []
    for number, (unit, piece, value) in enumerate(
        zip(units, pieces, values, strict=True)
    ):
        group, earlier = hyperparameters[updater.group_of(piece)], before[unit]
        if unit in pulled:
            _take(state, piece, pulled[unit], value)
        elif _is_plain_momentum(group):
            _mirror(state, piece, group, earlier, base[unit])
        elif earlier is not None:
            value.add_((base[unit] - earlier).view_as(value))
            continue
        mirrored.append(number)
    tentative = updater.apply(
        [pieces[n] for n in mirrored],
        [own[n] for n in mirrored],
        hyperparameters,
        commit=False,
    )
    for number, result in zip(mirrored, tentative, strict=True):
        values[number].copy_(result)


def _mirror(
    state: WorkerState,
    piece: Piece,
    group: dict[str, Any],
    before: torch.Tensor | None,
    base: torch.Tensor,
) -> None:
    """The momentum that the server has for a piece: V(i-1) = (P(i-1) - P(i)) / eta."""
    live = state.updater.state([piece])[0]
    live.clear()
    if not group["momentum"] or before is None or not state.rates:
        return
    rate = state.rates[state.updater.group_of(piece)]
    if rate:
        momentum = (before - base) / rate
        shape = state.updater.values([piece])[0].shape
        live["momentum_buffer"] = momentum.view(shape)


def _take(
    state: WorkerState, piece: Piece, entries: dict[str, Any], like: torch.Tensor
) -> None:
    """The state that the server has for a piece, as it was pulled."""
    live = state.updater.state([piece])[0]
    live.clear()
    for name, value in entries.items():
        live[name] = value.view(like.shape) if value.numel() == like.numel() else value


def _ask_states(state: WorkerState, remote: Remote) -> None:
    """Pull the optimizer's state of what the step that begins will defer."""
    if state.options.state != "pull" or state.options.correction != "local":
        return
    groups = state.updater.hyperparameters()
    units = [
        (bucket, number)
        for bucket, numbers in enumerate(state.this_step)
        for number in numbers
        if not _is_plain_momentum(
            groups[state.updater.group_of(remote.units[bucket][number].piece)]
        )
    ]
    if units:
        remote.ask_states(units, state.step)


def _is_plain_momentum(group: dict[str, Any]) -> bool:
    """Whether these are SGD's hyperparameters, without Nesterov's form."""
    return "dampening" in group and not group["nesterov"]


def _place(remote: Remote, unit: Unit) -> UnitPlace:
    bucket, number = unit
    return remote.units[bucket][number]


def _value(state: WorkerState, remote: Remote, unit: Unit) -> torch.Tensor:
    """A unit's part of the model, flat."""
    return state.updater.values([_place(remote, unit).piece])[0].reshape(-1)


def _put(state: WorkerState, remote: Remote, unit: Unit, value: torch.Tensor) -> None:
    into = state.updater.values([_place(remote, unit).piece])[0]
    with torch.no_grad():
        into.copy_(value.view(into.shape))


# ---- what is measured ----


def _measured(state: WorkerState, run: ServerRun, fades: float) -> Measured:
    """What this worker tells its servers, now and then; a network of which nothing was seen
    is *fades* times as slow as before."""
    remote, times = run.remote, state.watch.times()
    sizes = [remote.unit_bytes(bucket.index) for bucket in run.buckets]
    if times is None:
        return Measured(
            ready=[],
            end=0.0,
            start_up=0.0,
            per_byte=0.0,
            bytes=[sum(units) for units in sizes],
            part=state.growth.part,
        )
    late = sum(
        sizes[bucket][number]
        for bucket, numbers in enumerate(state.this_step)
        for number in numbers
    )
    left = [
        sum(size for n, size in enumerate(units) if n not in deferred)
        for units, deferred in zip(sizes, state.this_step, strict=True)
    ]
    seen = measured_rate(times, late, left, 0.0, state.watch.arrived(), pulls=True)
    state.per_byte = fades * state.per_byte if seen is None else seen
    return Measured(
        ready=list(times.ready),
        end=times.end,
        start_up=0.0,
        per_byte=state.per_byte,
        bytes=[sum(units) for units in sizes],
        part=state.growth.part,
        whole=state.watch.whole(),
    )
