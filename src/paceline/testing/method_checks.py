"""The checks of methods: each runs on all workers of the caller's runtime.

A check trains a small model with one row of the table and one bucket rule. It raises `CheckFailedError` on every
worker that finds the law broken. A law that does not apply to a row, a rule or a number of workers is not
checked.
"""

from __future__ import annotations

import copy
import gc
import math
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple, get_origin

import torch
import torch.distributed as dist

import paceline
from paceline.bucketing.rules import FIXED, MEASURED
from paceline.collectives.communicator import Communicator
from paceline.core.checkpoint.worker_state import worker_states
from paceline.core.optimizer import DistributedOptimizer, training_of
from paceline.core.settings import parse_method
from paceline.errors import PacelineError, UsageError
from paceline.interfaces import Method
from paceline.methods import METHODS
from paceline.records import StepRecorder
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation
from paceline.spec import convert_fields, field_types
from paceline.testing.cases import CASES, Case
from paceline.testing.problems import (
    OPTIMIZERS,
    PAUSE,
    Counting,
    MakeOptimizer,
    Quadratic,
    adamw,
    begin,
    begin_counting,
    centers_of,
    counted,
    distribute_as,
    everyone,
    flat_parameters,
    momentum,
    only_these_trainings,
    require,
    require_equal,
    shared_folder,
    step,
)
from paceline.testing.script_checks import (
    a_scaler_leaves_out_infinite_gradients,
    buffers_follow_the_policy,
    gradients_are_clipped_once,
    loads_take_effect,
    parameters_may_get_other_memory,
    schedules_are_followed,
    script_idioms,
    workers_with_one_batch_train_as_one,
)

CLOSE = 1e-5
"""Largest relative difference between two orders of adding the same gradients."""

SPAN = 24
"""Steps between two counts of held objects: a multiple of the rounds of all rows."""


def converges(case: Case, rule: str) -> None:
    """All workers reach the known optimum of a quadratic: the mean of their own optima. If timing decides how
    often a worker counts, all share one optimum."""
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
        f"training ends {distance:.2g} away from the optimum: expected at most {allowed:.2g}",
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
            "a single worker differs from its reference",
            case.rounding,
        )


def equals_its_reference(case: Case, rule: str) -> None:
    """After each step parameters equal the case's reference: bit-equal to another method's, or equal to a
    plain torch training with all workers' batches."""
    rank, workers = paceline.rank(), paceline.world_size()
    assert case.equals is not None
    for make in (momentum, adamw):
        model, optimizer = begin(case, rule, make)
        models: list[torch.nn.Module]
        if isinstance(case.equals, str):
            reference, other = begin(replace(case, method=case.equals), rule, make)
            models = [reference]
        else:
            models = [Quadratic() for _ in range(workers)]
            optimizers = [make(one, case.learning_rate) for one in models]
        for number in range(1, 9):
            step(model, optimizer, centers_of(rank, number))
            if isinstance(case.equals, str):
                step(reference, other, centers_of(rank, number))
            else:
                for one, worker in zip(models, range(workers), strict=True):
                    one.zero_grad()
                    one(centers_of(worker, number)).backward()
                case.equals(models, optimizers, number)
            require_equal(
                model,
                models[rank % len(models)],
                f"after step {number} parameters differ from the reference",
                0.0 if isinstance(case.equals, str) else CLOSE,
            )
        optimizer.finish()
        if isinstance(case.equals, str):
            other.finish()


def memory_does_not_grow(case: Case, rule: str) -> None:
    """The number of tensors and containers that a worker holds between steps does not grow with the steps;
    occasional decisions may add fewer than one a step."""
    model, optimizer = begin(case, rule, momentum)
    held = []
    for number in range(1, 2 * SPAN + 1):
        step(model, optimizer, centers_of(paceline.rank(), number))
        if number % SPAN == 0:
            dist.barrier()
            held.append(_held_by(optimizer))
    optimizer.finish()
    more = held[1] - held[0]
    require(
        more.total() < SPAN // 2,
        f"after {2 * SPAN} steps a worker holds {more.total()} more objects than after "
        f"{SPAN}: {dict(more.most_common(3))}",
    )


_NOT_HELD = (types.ModuleType, types.CodeType, type, StepRecorder)
"""Objects of the process, and the records of all steps, which a report needs."""


def _held_by(root: object) -> Counter[str]:
    """How many tensors and containers are reachable from an object, by kind."""
    kinds: Counter[str] = Counter()
    seen: dict[int, object] = {}
    left = [root]
    while left:
        one = left.pop()
        kind = type(one)
        other = kind.__module__.startswith(("paceline.runtimes", "threading"))
        if id(one) in seen or other or isinstance(one, _NOT_HELD):
            continue
        seen[id(one)] = one
        if not isinstance(one, (int, float, str, bytes, type(None))):
            kinds[f"{kind.__module__}.{kind.__name__}"] += 1
        if isinstance(one, types.FunctionType):  # Its globals belong to the process.
            left += [*(one.__closure__ or ()), one.__defaults__, one.__dict__]
        elif isinstance(one, torch.Tensor):
            left += [one.__dict__, one.grad]
        else:
            left += gc.get_referents(one)
    return kinds


def options_are_validated(case: Case, rule: str) -> None:
    """An unknown option, a wrong type or a value out of range raises `UsageError` with key and value. Every
    numeric range ends above -999, except that of seeds."""
    cls = type(_method_of(case))
    registered = METHODS.get(cls.name) is cls
    if registered:
        _require_refusal(cls, "no_such_option", "1", registered=True)
    for key, kind in field_types(cls).items():
        words = {bool: ["perhaps"], int: ["many"], float: ["much"]}.get(kind, [])
        if get_origin(kind) is Literal:
            words = ["no-such-choice"]
        if kind in (int, float) and key != "seed":
            words.append("-999")
        for value in words:
            _require_refusal(cls, key, value, registered=registered)


def _method_of(case: Case) -> Method:
    return parse_method(case.method)[0] if isinstance(case.method, str) else case.method


def _require_refusal(
    cls: type[Method], key: str, value: str, *, registered: bool
) -> None:
    option = f"{key}={value}"
    raised = "nothing is raised"
    try:
        if registered:
            parse_method(f"{cls.name}:{option}")
        else:
            cls(**convert_fields(cls, {key: value}, cls.name))
    except UsageError as error:
        raised = str(error)
    number = value.removesuffix(".0")
    named = key in raised and (number in raised or key == "no_such_option")
    require(
        named, f"{option}: expected UsageError that names key and value, got: {raised}"
    )


def types_and_shapes_are_kept(case: Case, rule: str) -> None:
    """Parameters, gradients and optimizer state keep their types and shapes, even if one model mixes types."""
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
            f"the gradient of a {dtype} parameter has another type or shape",
        )
        state = states[number]["momentum_buffer"]
        require(
            state.dtype == dtype and state.shape == parameter.shape,
            f"the momentum of a {dtype} parameter has another type or shape",
        )
    optimizer.finish()


def strides_change_nothing(case: Case, rule: str) -> None:
    """Parameters with other strides, as in ``channels_last``, are trained alike. This includes fused optimizers,
    which treat a parameter, its gradient and its state as flat memory."""
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
        # The optimizer continues with the state that it got back.
        inner.zero_grad()
        model(centers_of(0, 7)).backward()
        inner.step()
        ends.append(model)
    # Sums may add up in another order.
    require_equal(ends[0], ends[1], "strides change the result", 1e-5)


def uneven_data_ends(case: Case, rule: str) -> None:
    """Workers with different numbers of batches all end, with one model; some or all may have none."""
    rank = paceline.rank()
    for batches in (3 + 2 * rank, 5 * (rank % 2), 0):
        model, optimizer = begin(case, rule)
        with optimizer.join():
            for number in range(1, 1 + batches):
                step(model, optimizer, centers_of(rank, number))
        _require_one_model(model, optimizer)
    require_equal(model, Quadratic(), "no worker had data, but the model has changed")


def leaving_after_backward_ends_with_one_model(case: Case, rule: str) -> None:
    """Some workers leave their loop between ``backward()`` and ``step()``, as after a time limit of their own,
    and the others take the step. The step counts if its gradients were sent. It also counts if another worker
    takes it, unless workers update by themselves."""
    rank, workers, steps = paceline.rank(), paceline.world_size(), 3
    for leavers in (range(1, workers, 2), range(1), range(workers)):
        model, optimizer = begin_counting(case, rule)
        for _ in range(steps - 1):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        optimizer.zero_grad()
        model().backward()
        if rank not in leavers:
            optimizer.step()
        optimizer.finish()
        _require_one_model(model, optimizer)
        if not case.counts:
            continue
        method = _method_of(case)
        seen = method.visible_gradient
        alike = seen == "mean" and not method.rounds.groups
        kept = alike and len(leavers) < workers
        least = steps if seen == "sent" or kept else steps - 1
        found, off = counted(model, case), 1e-3 + case.lossy * steps
        require(
            least - off <= found.min().item() <= found.max().item() <= steps + off,
            f"workers {[*leavers]} left after backward: the model has the gradients of "
            f"{found.min():.3f} to {found.max():.3f} steps, expected {least} to {steps}",
        )


def _require_one_model(model: torch.nn.Module, optimizer: DistributedOptimizer) -> None:
    with optimizer.consolidated():
        mine = flat_parameters(model)
    require(
        bool((everyone(mine) == mine).all()),
        "workers hold different models after finish()",
    )


# ---- restarts: no evaluation, save or load changes the training ----

# If results are reproducible, they are compared bit by bit with uninterrupted training. In all cases steps are
# counted: with gradients of one and plain SGD, the parameters show how many steps' gradients they contain.
# Workers have different speeds meanwhile.

SEGMENTS = (range(1, 3), range(3, 6), range(6, 8))
"""Steps from one restart to the next. Segments have two lengths, so that a method that forgets its position in a
round is late after one of them."""


def state_survives_a_restart(case: Case, rule: str) -> None:
    """Saving and loading all states between steps equals uninterrupted training. If a part of an update is in
    flight between steps, it equals training with a `finish` there. The states are those of `state_dict`, and
    each worker's own."""
    for make in OPTIMIZERS:
        straight = _straight(case, rule, make)
        model, optimizer = begin(case, rule, make)
        for segment in SEGMENTS:
            if segment is not SEGMENTS[0]:
                model, optimizer = _begin_again(case, rule, make, model, optimizer)
            _steps(model, optimizer, segment)
        optimizer.finish()
        require_equal(model, straight, "a restart changes the result")


def _begin_again(
    case: Case,
    rule: str,
    make: MakeOptimizer,
    model: Quadratic,
    optimizer: DistributedOptimizer,
) -> tuple[Quadratic, DistributedOptimizer]:
    """Start another training with the states of this one."""
    with optimizer.consolidated() if case.under_way else nullcontext():
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    before = training_of(optimizer)
    progress = before.progress
    own = {owner.name: copy.deepcopy(owner.save()) for owner in worker_states(before)}
    optimizer.finish()
    model, optimizer = begin(case, rule, make)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    training = training_of(optimizer)
    training.progress = progress
    for owner in worker_states(training):
        owner.load(own[owner.name])
    return model, optimizer


def a_checkpoint_is_a_restart(case: Case, rule: str) -> None:
    """As `state_survives_a_restart`, with `paceline.save` and `load` between steps."""
    straight = _straight(case, rule, adamw)
    with shared_folder() as folder:
        for segment in SEGMENTS:
            with only_these_trainings():
                model, optimizer = begin(case, rule, adamw)
                if segment is not SEGMENTS[0]:
                    paceline.load(folder / "checkpoint")
                _steps(model, optimizer, segment)
                if segment is not SEGMENTS[-1]:
                    paceline.save(folder / "checkpoint")
                optimizer.finish()
    require_equal(model, straight, "a checkpoint changes the result")


def evaluations_change_nothing(case: Case, rule: str) -> None:
    """Training is bit-equal with and without `consolidated` evaluations between steps."""
    ends = []
    for evaluate in (False, True):
        model, optimizer = begin(case, rule, momentum)
        for number in range(1, 7):
            _steps(model, optimizer, [number])
            if evaluate:
                with optimizer.consolidated(), torch.no_grad():
                    model(centers_of(99))
        optimizer.finish()
        ends.append(model)
    require_equal(ends[0], ends[1], "evaluations between steps change the result")


def _straight(case: Case, rule: str, make: MakeOptimizer) -> Quadratic:
    model, optimizer = begin(case, rule, make)
    for segment in SEGMENTS:
        if case.under_way and segment is not SEGMENTS[0]:
            optimizer.finish()
            optimizer = distribute_as(case, rule, model, optimizer.unwrapped)
        _steps(model, optimizer, segment)
    optimizer.finish()
    return model


def _steps(
    model: Quadratic, optimizer: DistributedOptimizer, numbers: range | list[int]
) -> None:
    for number in numbers:
        step(model, optimizer, centers_of(paceline.rank(), number))


def a_restart_loses_nothing(case: Case, rule: str) -> None:
    """After `finish` every worker's gradients are in every worker's model exactly once. The same holds for
    another training of that model."""
    model, optimizer = begin_counting(case, rule)
    _train_counting(model, optimizer, 3, first_is_fast=True)
    optimizer.finish()
    _require_steps(case, model, 3, "after finish()")
    optimizer = distribute_as(case, rule, model, optimizer.unwrapped)
    _train_counting(model, optimizer, 2, first_is_fast=False)
    optimizer.finish()
    _require_steps(case, model, 5, "after a second training")


def a_checkpoint_loses_nothing(case: Case, rule: str) -> None:
    """A checkpoint contains every gradient of a step that ended before `save` on any worker, and none of a later
    one. `load` restores it on every worker, and no gradient is lost after that."""
    with only_these_trainings():
        model, optimizer = begin_counting(case, rule)
        with shared_folder() as folder:
            _train_counting(model, optimizer, 3, first_is_fast=True)
            paceline.save(folder / "checkpoint")
            _train_counting(model, optimizer, 2, first_is_fast=False)
            optimizer.finish()
            _require_steps(case, model, 5, "after a training with a save in between")
            with only_these_trainings():
                model, optimizer = begin_counting(case, rule)
                paceline.load(folder / "checkpoint")
                _require_steps(case, model, 3, "after load()")
                _train_counting(model, optimizer, 2, first_is_fast=False)
                optimizer.finish()
    _require_steps(case, model, 5, "after a load and two more steps")


def evaluations_lose_nothing(case: Case, rule: str) -> None:
    """`consolidated` neither removes nor adds a gradient, whichever worker enters it at any time; all enter
    together if the method requires it."""
    model, optimizer = begin_counting(case, rule)
    for number in range(6):
        _train_counting(model, optimizer, 1, first_is_fast=bool(number % 2))
        together = training_of(optimizer).consolidates_together
        if together or (number + paceline.rank()) % 2:
            with optimizer.consolidated(), torch.no_grad():
                model()
    optimizer.finish()
    _require_steps(case, model, 6, "after a training with evaluations")


def _train_counting(
    model: Counting,
    optimizer: DistributedOptimizer,
    steps: int,
    first_is_fast: bool,
) -> None:
    rank, last = paceline.rank(), paceline.world_size() - 1
    for _ in range(steps):
        paceline.pace(PAUSE * (rank if first_is_fast else last - rank))
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def _require_steps(case: Case, model: Counting, steps: int, when: str) -> None:
    found = counted(model, case)
    least, most = found.min().item(), found.max().item()
    off = 1e-3 + case.lossy * steps
    require(
        steps - off <= least <= most <= steps + off,
        f"{when} the model has the gradients of {least:.3f} to {most:.3f} steps: expected "
        f"{steps}",
    )


# ---- guarantees of a runtime ----


def a_buffer_is_free_after_its_wait() -> None:
    """Changes of a buffer after its ``wait()`` reach no other worker."""
    paceline.init()
    comm = Communicator(join_runtime())
    n = comm.size
    for late in range(n):
        buffer = torch.full((1000,), float(comm.rank))
        pending = comm.all_reduce(buffer, "sum")
        # The others have returned from wait(), and changed their buffers.
        if comm.rank == late:
            paceline.pace(0.01)
        pending.wait()
        got = buffer.clone()
        buffer.fill_(-1.0)
        comm.all_reduce(torch.zeros(1)).wait()
        require(
            bool((got == n * (n - 1) / 2).all()),
            "a buffer has a value that another worker has written after its wait()",
        )


# ---- which law applies to which row ----


def _always(case: Case, rule: str, workers: int) -> bool:
    return True


def _together(case: Case, rule: str, workers: int) -> bool:
    return workers > 1


def _counts(case: Case, rule: str, workers: int) -> bool:
    return case.counts


def _under_first_rule(case: Case, rule: str, workers: int) -> bool:
    return rule == RULES[0]


def _has_plain_twin(case: Case, rule: str, workers: int) -> bool:
    if workers == 1:
        return _has_reference(case, rule, workers)
    return case.timing_free and case.counts and not case.lossy


def _once(case: Case, rule: str, workers: int) -> bool:
    return workers == 1 and rule == RULES[0]


def _has_several_references(case: Case, rule: str, workers: int) -> bool:
    return workers > 1 and case.equals is not None and repeats(case, rule, workers)


def _has_reference(case: Case, rule: str, workers: int) -> bool:
    return workers == 1 and (case.counts or case.reference is not None)


def repeats(case: Case, rule: str, workers: int) -> bool:
    """Whether the same training is bit-equal when repeated: neither timing nor measured bucket plans, on which
    the order of sums depends, decide anything."""
    return case.timing_free and rule not in MEASURED


@dataclass(frozen=True)
class Check:
    """A *law*, and the rows that it applies to."""

    law: Callable[[Case, str], None]
    applies: Callable[[Case, str, int], bool] = _always
    """Whether it applies to a case, a bucket rule and a number of workers."""

    @property
    def name(self) -> str:
        return self.law.__name__

    def __call__(self, case: Case, rule: str) -> None:
        self.law(case, rule)


RULES = (*FIXED, "optimal")
"""The bucket rules of all checks."""

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(converges),
        Check(one_worker_is_the_reference, _has_reference),
        Check(equals_its_reference, _has_several_references),
        Check(workers_with_one_batch_train_as_one, _has_plain_twin),
        Check(options_are_validated, _once),
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
        Check(loads_take_effect, _counts),
        Check(script_idioms, _counts),
        Check(a_scaler_leaves_out_infinite_gradients, _counts),
        Check(parameters_may_get_other_memory, repeats),
        Check(buffers_follow_the_policy),
        Check(memory_does_not_grow, _under_first_rule),
        Check(types_and_shapes_are_kept),
    )
}

RUNTIME_CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check for check in (a_buffer_is_free_after_its_wait,)
}
"""Guarantees of a runtime to every method: run once in each."""


def checks_of(case: Case, rule: str, workers: int) -> list[Check]:
    """The checks that apply."""
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
    """All trials that apply to this number of workers, case by case."""
    return [
        Trial(case, rule, check)
        for case in cases
        for rule in RULES
        for check in checks_of(case, rule, workers)
    ]


def sample(table: Sequence[Trial], every: int) -> list[Trial]:
    """Choose one in *every* trials of each case, and at least one.

    Each choice has the law, and then the bucket rule, that was chosen least often before.
    """
    times, found = Counter[object](), list[Trial]()
    for _, trials_of_case in groupby(table, lambda trial: trial.case):
        untried = list(trials_of_case)
        for _ in range(math.ceil(len(untried) / every)):
            trial = min(untried, key=lambda one: (times[one.check], times[one.rule]))
            untried.remove(trial)
            times.update([trial.check, trial.rule])
            found.append(trial)
    return found


def final_parameters(case: Case, rule: str) -> list[float]:
    """Ten steps with momentum; returns the parameters. Without dependence on timing they are equal in all
    runtimes."""
    model, optimizer = begin(case, rule, momentum)
    for number in range(1, 11):
        step(model, optimizer, centers_of(paceline.rank(), number))
    optimizer.finish()
    with optimizer.consolidated():
        return [float(value) for value in flat_parameters(model)]


def run_checks(case: Case, rule: str) -> None:
    """Run all checks that apply, in the caller's runtime; raises `CheckFailedError` at the first failure.
    Collective: every worker of that runtime calls it."""
    paceline.init()
    for check in checks_of(case, rule, paceline.world_size()):
        with _named(f"{case.name}, buckets {rule}, {check.name}"):
            check(case, rule)


def check_method(case: Case, workers: tuple[int, ...] = (1, 2, 3)) -> None:
    """Check all laws of a method, under all bucket rules, in the simulated runtime.

    Args:
        case: The method, and how it is tested.
        workers: Numbers of workers, one after the other.

    Raises:
        CheckFailedError: A law is broken. A note of the error names it.
        PacelineError: The simulated training failed, by `DeadlockError` for example.

    Example:
        ::

            check_method(Case(method="bsp:overlap=false"))
    """
    for count in workers:
        for rule in RULES:
            simulation = Simulation(case.cluster(count))
            with _named(f"{count} workers"):
                simulation.run(lambda rank, rule=rule: run_checks(case, rule))  # type: ignore[misc]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Add the row and the check to an error."""
    try:
        yield
    except PacelineError as error:
        error.add_note(f"conformance: {what}")
        raise
