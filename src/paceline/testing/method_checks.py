"""The checks: each runs on all workers of the runtime that it is called in.

A check trains a small model under one row of the table and one bucket rule, and raises
`CheckFailedError` on every worker that sees the law broken. Where a law says nothing about a
row, a rule or a number of workers its check does not apply, and is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

import paceline
from paceline import bucketing
from paceline.collectives.communicator import TorchComm
from paceline.core.optimizer import DistributedOptimizer
from paceline.errors import PacelineError
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation
from paceline.testing.cases import CASES, Case
from paceline.testing.problems import (
    OPTIMIZERS,
    begin,
    distribute_as,
    momentum,
    require,
    require_equal,
    sgd,
    step,
)
from paceline.testing.restart_checks import (
    a_checkpoint_is_a_restart,
    a_checkpoint_loses_nothing,
    a_restart_loses_nothing,
    evaluations_change_nothing,
    evaluations_lose_nothing,
    state_survives_a_restart,
)
from paceline.testing.task import Counting, Quadratic, centers_of, flat_parameters
from paceline.torch_internals import step_was_noted


def converges(case: Case, rule: str) -> None:
    """On quadratics with a known optimum, all workers end there: at the mean of their own
    optima; where timing decides who is heard how often, at the one that all share."""
    model, optimizer = begin(case, rule)
    own = centers_of(paceline.rank() if case.timing_free else 0)
    for number in range(case.steps):
        if case.together and number % case.together == 0:
            dist.barrier()
        step(model, optimizer, own)
    optimizer.finish()
    workers = range(paceline.world_size()) if case.timing_free else [0]
    optimum = torch.stack([centers_of(rank) for rank in workers]).double().mean(0)
    with optimizer.consolidated():
        distance = (flat_parameters(model) - optimum).abs().max().item()
    allowed = 1e-5 + case.lossy
    require(
        distance <= allowed,
        f"ends {distance:.2g} away from the optimum, more than {allowed:.2g}",
    )


def one_worker_is_the_reference(case: Case, rule: str) -> None:
    """One worker alone takes exactly the steps of the plain optimizer."""
    for make in OPTIMIZERS:
        model, optimizer = begin(case, rule, make)
        plain_model = Quadratic()
        plain = make(plain_model, case.learning_rate)
        for number in range(1, 7):
            step(model, optimizer, centers_of(0, number))
            plain.zero_grad()
            plain_model(centers_of(0, number)).backward()
            if case.reference is None:
                plain.step()
            else:
                case.reference(plain)
        optimizer.finish()
        require_equal(
            model,
            plain_model,
            "one worker differs from the reference",
            case.rounding,
        )


def types_and_shapes_are_kept(case: Case, rule: str) -> None:
    """Parameters, gradients and optimizer state keep their types and shapes, also where
    one model mixes them."""
    mixed = (torch.float64, torch.float32, torch.bfloat16)
    model = Quadratic(mixed)
    inner = momentum(model, case.learning_rate)
    optimizer = distribute_as(case, rule, model, inner)
    for number in range(1, 4):
        step(model, optimizer, centers_of(paceline.rank(), number))
    states = optimizer.state_dict()["state"]
    for number, dtype in enumerate(mixed):
        parameter = list(model.parameters())[number]
        require(parameter.dtype == dtype, f"a {dtype} parameter is {parameter.dtype}")
        require(
            parameter.grad is not None
            and parameter.grad.dtype == dtype
            and parameter.grad.shape == parameter.shape,
            f"the gradient of a {dtype} parameter has changed its type or shape",
        )
        state = states[number]["momentum_buffer"]
        require(
            state.dtype == dtype and state.shape == parameter.shape,
            f"the momentum of a {dtype} parameter has changed its type or shape",
        )
    optimizer.finish()


def strides_change_nothing(case: Case, rule: str) -> None:
    """A parameter whose elements lie in another order in memory, as in ``channels_last``,
    is trained alike; also by a fused optimizer, which takes a parameter, its gradient and
    its state for flat memory."""
    ends = []
    for transpose in (False, True):
        model = Quadratic()
        if transpose:
            model.matrix.data = model.matrix.data.t().contiguous().t()
        inner = torch.optim.SGD(
            model.parameters(), lr=case.learning_rate / 10, momentum=0.9, fused=True
        )
        optimizer = distribute_as(case, rule, model, inner)
        for number in range(1, 7):
            step(model, optimizer, centers_of(paceline.rank(), number))
        optimizer.finish()
        # The optimizer goes on with the state that it was given back.
        inner.zero_grad()
        model(centers_of(0, 7)).backward()
        inner.step()
        ends.append(model)
    # Sums may add up in another order.
    require_equal(ends[0], ends[1], "strides change the result", 1e-5)


def schedules_are_followed(case: Case, rule: str) -> None:
    """A step is done with the learning rate that a scheduler of torch's has set for it; and
    the scheduler sees that steps are done, or it would warn. It is made before `distribute`."""
    model, steps, whole = Counting(), 6, 3
    inner = sgd(model, case.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        inner, lambda done: 1.0 if done < whole else 0.5
    )
    optimizer = distribute_as(case, rule, model, inner)
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        require(step_was_noted(inner), "torch's schedulers were not told of a step")
        schedule.step()
    optimizer.finish()
    moved = -flat_parameters(model) / case.learning_rate
    expected = whole + (steps - whole) / 2
    off = (moved - expected).abs().max().item()
    require(
        off <= 1e-3 + case.lossy * steps,
        f"the learning rates of {steps} steps add up to {expected} of the first one's, and "
        f"parameters have moved {off:.3g} more or less",
    )


def gradients_are_clipped_once(case: Case, rule: str) -> None:
    """With equal gradients on all workers the norm of the mean is that of each one's own:
    either way as many clipped gradients are applied as steps were done."""
    model, limit, steps = Counting(), 0.5, 5
    inner = sgd(model, case.learning_rate)
    optimizer = distribute_as(case, rule, model, inner, clip_norm=limit)
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    optimizer.finish()
    moved = flat_parameters(model).norm().item() / case.learning_rate
    require(
        abs(moved - steps * limit) <= 1e-4 + case.lossy * steps,
        f"{steps} gradients of norm {limit} have moved parameters by {moved:.6g}",
    )


def uneven_data_ends(case: Case, rule: str) -> None:
    """Workers with different numbers of batches all end, with one model."""
    model, optimizer = begin(case, rule)
    with optimizer.join():
        for number in range(1, 4 + 2 * paceline.rank()):
            step(model, optimizer, centers_of(paceline.rank(), number))
    _require_one_model(model, optimizer)


def leaving_after_backward_ends_with_one_model(case: Case, rule: str) -> None:
    """Some workers leave their loop between ``backward()`` and ``step()``, in a step that the
    others take; as after a time limit of their own."""
    model, optimizer = begin(case, rule)
    for number in range(1, 5):
        step(model, optimizer, centers_of(paceline.rank(), number))
    optimizer.zero_grad()
    model(centers_of(paceline.rank(), 5)).backward()
    if paceline.rank() % 2:
        optimizer.step()
    optimizer.finish()
    _require_one_model(model, optimizer)


def _require_one_model(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
    with optimizer.consolidated():
        mine = flat_parameters(model)
    everyone = torch.empty(paceline.world_size() * mine.numel(), dtype=mine.dtype)
    dist.all_gather_single(everyone, mine)
    require(
        bool((everyone.view(-1, mine.numel()) == mine).all()),
        "workers hold different models after finish()",
    )


def a_buffer_is_free_after_its_wait() -> None:
    """What a worker does to a buffer that it has waited for reaches nobody."""
    paceline.init()
    comm = TorchComm(join_runtime())
    n = comm.size
    for late in range(n):
        buffer = torch.full((1000,), float(comm.rank))
        pending = comm.all_reduce(buffer, "sum")
        if comm.rank == late:  # the others are through, and have changed theirs
            paceline.pace(0.01)
        pending.wait()
        got = buffer.clone()
        buffer.fill_(-1.0)
        comm.all_reduce(torch.zeros(1)).wait()
        require(
            bool((got == n * (n - 1) / 2).all()),
            "a buffer that another worker changed after its wait arrived changed",
        )


# ---- which law says something where ----


def _always(case: Case, rule: str, workers: int) -> bool:
    return True


def _together(case: Case, rule: str, workers: int) -> bool:
    return workers > 1


def _counts(case: Case, rule: str, workers: int) -> bool:
    return case.counts


def _has_reference(case: Case, rule: str, workers: int) -> bool:
    return workers == 1 and (case.counts or case.reference is not None)


def repeats(case: Case, rule: str, workers: int) -> bool:
    """Whether the same training ends with the same bits: neither who is fast decides, nor
    a plan that was measured, on whose buckets the order of sums depends."""
    return case.timing_free and rule not in bucketing.MEASURED


@dataclass(frozen=True)
class Check:
    """A *law*, and where it says something."""

    law: Callable[[Case, str], None]
    applies: Callable[[Case, str, int], bool] = _always
    """To a case, under a bucket rule, on so many workers."""

    @property
    def name(self) -> str:
        return self.law.__name__

    def __call__(self, case: Case, rule: str) -> None:
        self.law(case, rule)


RULES = (*bucketing.FIXED, "optimal")
"""Under which each check runs."""

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(converges),
        Check(one_worker_is_the_reference, _has_reference),
        Check(types_and_shapes_are_kept),
        Check(strides_change_nothing, repeats),
        Check(uneven_data_ends),
        Check(leaving_after_backward_ends_with_one_model, _together),
        Check(evaluations_change_nothing, repeats),
        Check(state_survives_a_restart, repeats),
        Check(a_restart_loses_nothing, _counts),
        Check(evaluations_lose_nothing, _counts),
        Check(a_checkpoint_is_a_restart, repeats),
        Check(a_checkpoint_loses_nothing, _counts),
        Check(gradients_are_clipped_once, _counts),
        Check(schedules_are_followed, _counts),
    )
}

RUNTIME_CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check for check in (a_buffer_is_free_after_its_wait,)
}
"""What a runtime promises to every method: run once in each."""


def checks_of(case: Case, rule: str, workers: int) -> list[Check]:
    """Those that apply."""
    return [check for check in CHECKS.values() if check.applies(case, rule, workers)]


class Trial(NamedTuple):
    """One check of one case under one bucket rule."""

    case: Case
    rule: str
    check: Check

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.rule} {self.check.name}"

    def run(self) -> None:
        """Raises `CheckFailedError`. Collective."""
        self.check(self.case, self.rule)


def trials(workers: int, cases: Sequence[Case] = CASES) -> list[Trial]:
    """All that apply to so many workers, case by case."""
    return [
        Trial(case, rule, check)
        for case in cases
        for rule in RULES
        for check in checks_of(case, rule, workers)
    ]


def sample(table: Sequence[Trial], every: int) -> list[Trial]:
    """Of each case's trials one in so many; from case to case others, so that each law and
    each rule is tried."""
    return [
        trial
        for number, (_, of_case) in enumerate(groupby(table, lambda t: t.case))
        for position, trial in enumerate(of_case)
        if (position + number) % every == 0
    ]


def final_parameters(case: Case, rule: str) -> list[float]:
    """Ten steps with momentum: what a method that does not depend on timing ends with, in
    whatever runtime."""
    model, optimizer = begin(case, rule, momentum)
    for number in range(1, 11):
        step(model, optimizer, centers_of(paceline.rank(), number))
    optimizer.finish()
    with optimizer.consolidated():
        return [float(value) for value in flat_parameters(model)]


def run_checks(case: Case, rule: str) -> None:
    """All checks that apply, in the runtime of the caller; raises `CheckFailedError` at the
    first that fails. Collective: every worker of that runtime calls it."""
    paceline.init()
    for check in checks_of(case, rule, paceline.world_size()):
        with _named(f"{case.name}, buckets {rule}, {check.name}"):
            check(case, rule)


def check_method(case: Case, workers: tuple[int, ...] = (1, 2, 3)) -> None:
    """All checks under all bucket rules in the simulated runtime, for some numbers of workers.

    Raises what the failing worker raised: `CheckFailedError` for a broken law, and the
    simulated runtime's own errors, `DeadlockError` among them.
    """
    for count in workers:
        for rule in RULES:
            simulation = Simulation(case.cluster(count))
            with _named(f"{count} workers"):
                simulation.run(lambda rank, rule=rule: run_checks(case, rule))  # type: ignore[misc]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say in an error which row and check it comes from."""
    try:
        yield
    except PacelineError as error:
        error.add_note(f"conformance: {what}")
        raise
