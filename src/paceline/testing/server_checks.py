"""Laws of methods that update on a server, checked on the server's state machine alone.

Small trainings run in virtual time over a network that loses connections, workers and the server, as seeds decide
(`server_trial`). At the end of any such training these laws hold:

- **Exactly once**: each gradient that the server has accepted is in the parameters once. A method that drops late
  gradients declares it (`ServerLaws.drops`).
- **No hang**: when nothing is in flight and no deadline is left, all workers have ended.
- **Bound**: no worker starts step c before all have done c - `ServerLaws.bound` steps, and its parameters contain
  their gradients. Deferred units (`ServerLaws.stages`) are bound one step later.
- **Snapshot and restart**: all of this also holds if the server restarts from a snapshot of any moment.
- **Refusals**: a refused request changes nothing, at any moment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from paceline.interfaces import Discipline
from paceline.interfaces.server_messages import (
    Decide,
    Describe,
    EnterBarrier,
    KeepAlive,
    Leave,
    Load,
    LoadState,
    LoadUntrained,
    MixBuffers,
    Pull,
    PullState,
    PullUntrained,
    Push,
    Reduce,
    Rejected,
    Request,
)
from paceline.testing.problems import CheckFailedError, require
from paceline.testing.server_trial import (
    ANY,
    BUCKETS,
    Faults,
    MakeDiscipline,
    ServerLaws,
    ServerTrial,
    TrialWorker,
)

# ---- refused requests ----


def mistakes(
    trial: ServerTrial, worker: TrialWorker
) -> list[tuple[Request, torch.Tensor | None]]:
    """Requests that the server must refuse from this worker now."""
    push, gradient = trial.push(worker.rank, worker.step, 0)
    assert gradient is not None
    wrong: list[dict[str, Any]] = [
        *({"bucket": BUCKETS}, {"used": []}, {"weight": -1.0}),
        *({"weight": math.nan}, {"units": [trial.units]}, {"units": [0, 0]}),
        *({"late": True, "step": FAR}, {"late": True, "step": -1}, {"report": b"?"}),
        *({"hyperparameters": []}, {"hyperparameters": [{"lr": "a"}]}),
        {"step": worker.step - 1},
    ]
    mistakes: list[tuple[Request, torch.Tensor | None]] = [
        *((msgspec.structs.replace(push, **what), gradient) for what in wrong),
        *((push, None), (push, gradient[1:]), (push, gradient.double())),
        (trial.join(), None),
        (Load(bucket=0), gradient),
        (LoadState(bucket=0, entries=[[]]), None),
        (LoadUntrained(start=0), torch.zeros(1, dtype=torch.uint8)),
        (Pull(bucket=BUCKETS), None),
        (PullState(bucket=BUCKETS), None),
        (PullState(bucket=0, units=[trial.units]), None),
        (PullUntrained(start=1 << 40, most=1), None),
        (EnterBarrier(kind="pulled"), None),
        (MixBuffers(weight=0.5, floats=0), None),
        (Reduce(number=0, channel="", operation="sum"), None),
        (Describe(kind="", services=[], number=0), None),
    ]
    kind = type(trial.server.shard.discipline)
    if kind.on_decision is Discipline.on_decision:  # The discipline decides nothing.
        mistakes.append((Decide(step=0, workers=[0]), None))
    # Requests that have arrived, sent again.
    for message in worker.arrived:
        if isinstance(message, Push):
            mistakes.append(
                trial.push(
                    worker.rank,
                    message.step,
                    message.bucket,
                    message.units,
                    message.late,
                )
            )
    if trial.laws.stages is None:
        mistakes += [
            (msgspec.structs.replace(push, late=True), gradient),
            (msgspec.structs.replace(push, units=[0], used=[True]), gradient),
        ]
    else:
        mistakes.append((PullState(bucket=0, units=[0], step=FAR), None))
        mistakes += _mistakes_beside_late_pushes(trial, worker)
    if not worker.arrived:
        mistakes += [
            (msgspec.structs.replace(push, step=FAR), gradient),
            (Pull(bucket=0, step=FAR), None),
            (KeepAlive(step=FAR, late_joiner=True), None),
        ]
    elif worker.is_in_mid_step:
        mistakes += [(Leave(), None), (EnterBarrier(kind="meet"), None)]
    return mistakes


def _mistakes_beside_late_pushes(
    trial: ServerTrial, worker: TrialWorker
) -> list[tuple[Request, torch.Tensor | None]]:
    """Requests while late pushes of a worker's last step have not arrived: other units, and requests that must
    follow the late pushes."""
    mistakes: list[tuple[Request, torch.Tensor | None]] = []
    for _, message, _ in worker.requests:
        if isinstance(message, Push) and message.late:
            left = range(trial.units) if message.units is None else message.units
            others = [unit for unit in range(trial.units) if unit not in left]
            mistakes += [
                trial.push(
                    worker.rank, message.step, message.bucket, others, late=True
                ),
                (Leave(), None),
            ]
            if worker.has_sent_step:
                mistakes.append(
                    trial.push(worker.rank, worker.step + 1, message.bucket)
                )
    return mistakes


def require_refusals_change_nothing(trial: ServerTrial) -> None:
    """Only the worker with the invalid request gets a reply, and the server is unchanged."""
    workers = [w for w in trial.workers if w.is_pushing and not w.is_lost]
    if not workers:
        return
    before = state_of(trial.server)
    for worker in workers:
        kinds = set()
        for message, payload in mistakes(trial, worker):
            copied = None if payload is None else payload.clone()
            answers = trial.ask(worker, message, copied)
            refused = [isinstance(answer.message, Rejected) for answer in answers]
            require(
                refused == [True],
                f"the server replies to {message} with {answers}: expected Rejected",
            )
            kinds.add(type(message).__name__)
        # Comparing states takes longest, so it is done once for all requests of a worker.
        changed = difference(before, state_of(trial.server))
        require(
            not changed,
            f"refused requests ({', '.join(sorted(kinds))}) have changed the server's {changed}",
        )


FAR = 1 << 50
"""A step that no worker reaches."""
_PASSING = frozenset(
    ("counts", "now", "replies", "_replies", "_work", "_snapshots", "_number")
)
"""Attributes about replies, their times and their cost."""


def state_of(value: Any) -> dict[str, Any]:
    """All of a server's state as plain values by path, to compare it with itself."""
    found: dict[str, Any] = {}
    _collect(value, "", found, set())
    return found


_PLAIN = frozenset((bool, bytes, int, str, type(None)))


def _collect(value: Any, path: str, found: dict[str, Any], seen: set[int]) -> None:
    """Collect each object once, since parts of a server refer to each other."""
    parts: list[tuple[Any, Any]]
    if type(value) in _PLAIN:
        found[path] = value
        return
    if isinstance(value, torch.Tensor):
        found[path] = str(value.dtype), value.tolist()
        return
    if isinstance(value, dict):
        # Parameters are keys of an optimizer's state, and take long to convert to text.
        keys = [n if isinstance(k, torch.Tensor) else k for n, k in enumerate(value)]
        parts = list(zip(keys, value.values(), strict=True))
    elif isinstance(value, list | tuple | deque | set | frozenset):
        parts = list(enumerate(value))
    elif not hasattr(value, "__dict__"):
        found[path] = repr(value)
        return
    elif id(value) in seen or callable(value):
        return
    else:
        seen.add(id(value))
        names = vars(value).keys() - _PASSING
        parts = [(name, vars(value)[name]) for name in sorted(names)]
    found[path] = len(parts)
    for place, its in parts:
        _collect(its, f"{path}.{place}", found, seen)


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The differences between two states."""
    if before == after:
        return []
    places = before.keys() | after.keys()
    return sorted(p for p in places if before.get(p) != after.get(p))


# ---- the laws ----


def _require_laws(trial: ServerTrial) -> None:
    """The laws at the end of each trial."""
    trial.require_all_ended()
    trial.require_each_once()
    trial.require_replies_left_alone()


def what_is_refused_changes_nothing(
    make: MakeDiscipline, workers: int, laws: ServerLaws, seed: int
) -> None:
    """At any moment of a training each kind of invalid request is refused, and the server's state is
    unchanged."""
    if seed >= 2:
        return  # Comparing states many times is slow.
    trial = ServerTrial(make, workers, seed, laws)

    def watch(number: int) -> None:
        if number % 23 == 7 * seed:
            require_refusals_change_nothing(trial)

    trial.run(watch)
    _require_laws(trial)


def training_without_faults_keeps_the_laws(
    make: MakeDiscipline, workers: int, laws: ServerLaws, seed: int
) -> None:
    """Messages may arrive in any order."""
    trial = ServerTrial(make, workers, seed, laws)
    trial.run()
    _require_laws(trial)


def workers_that_die_break_no_law(
    make: MakeDiscipline, workers: int, laws: ServerLaws, seed: int
) -> None:
    """Some workers die during training and do not come back: the others continue without them."""
    faults = Faults(losses=min(2, workers), come_back=False)
    trial = ServerTrial(make, workers, seed, laws, faults)
    trial.run()
    _require_laws(trial)


def faults_of_all_kinds_break_no_law(
    make: MakeDiscipline, workers: int, laws: ServerLaws, seed: int
) -> None:
    """Connections are lost, workers die and come back, and the server restarts from its last snapshot, even
    one taken during a step."""
    faults = Faults(losses=4 if seed % 3 else 0, restarts=3 if seed % 4 else 0)
    trial = ServerTrial(make, workers, seed, laws, faults)
    trial.run()
    _require_laws(trial)


CHECKS: tuple[Callable[[MakeDiscipline, int, ServerLaws, int], None], ...] = (
    training_without_faults_keeps_the_laws,
    workers_that_die_break_no_law,
    faults_of_all_kinds_break_no_law,
    what_is_refused_changes_nothing,
)


def check_server_method(
    make: MakeDiscipline,
    workers: Sequence[int] = (1, 2, 3),
    laws: ServerLaws = ANY,
    seeds: Sequence[int] = range(12),
) -> None:
    """Check all laws of a method that updates on a server, on the server's state machine alone.

    Args:
        make: Makes a new discipline, of a server for as many workers as *workers* says.
        workers: Numbers of workers.
        laws: The method's guarantees besides "each gradient once".
        seeds: Each decides a training's deliveries and faults.

    Raises:
        CheckFailedError: A law is broken. Its notes name the law, the number of workers and the seed.

    Example:
        >>> check_server_method(lambda: SSP(staleness=1).server(3), (3,), ServerLaws(bound=1))
    """
    for count in workers:
        for check in CHECKS:
            for seed in seeds:
                try:
                    check(make, count, laws, seed)
                except CheckFailedError as error:
                    error.add_note(
                        f"conformance: {check.__name__}, {count} workers, seed {seed}"
                    )
                    raise
