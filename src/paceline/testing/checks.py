"""The checks: each runs on all workers of the world that it is called in.

A check trains a small model under one row of the table and one fusion rule, and raises
`CheckFailedError` on every worker that sees the law broken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

import paceline
from paceline import fusion
from paceline.collectives.comm import TorchComm
from paceline.distributing import distribute
from paceline.errors import PacelineError
from paceline.network import uniform_cluster
from paceline.optimizer import DistributedOptimizer
from paceline.testing.cases import Case
from paceline.testing.task import Quadratic, centers_of, flat_parameters
from paceline.worlds.join import join_world
from paceline.worlds.virtual import Simulation


class CheckFailedError(PacelineError, AssertionError):
    """A law that every method promises does not hold."""


def converges(case: Case, rule: str) -> None:
    """On quadratics with a known optimum, all workers end there: at the mean of their own
    optima; where timing decides who is heard how often, at the one that all share."""
    model, optimizer = _begin(case, rule)
    own = centers_of(paceline.rank() if case.timing_free else 0)
    for _ in range(case.steps):
        _step(model, optimizer, own)
    optimizer.finish()
    workers = range(paceline.world_size()) if case.timing_free else [0]
    optimum = torch.stack([centers_of(rank) for rank in workers]).double().mean(0)
    with optimizer.consolidated():
        distance = (flat_parameters(model) - optimum).abs().max().item()
    _require(
        distance <= 1e-5, f"ends {distance:.2g} away from the optimum, more than 1e-5"
    )


def one_worker_is_the_reference(case: Case, rule: str) -> None:
    """One worker alone takes exactly the steps of the plain optimizer. (Skipped where
    there are more.)"""
    if paceline.world_size() > 1:
        return
    for make in _OPTIMIZERS:
        model, optimizer = _begin(case, rule, make)
        plain_model = Quadratic()
        plain = make(plain_model, case.learning_rate)
        for step in range(1, 7):
            _step(model, optimizer, centers_of(0, step))
            plain.zero_grad()
            plain_model(centers_of(0, step)).backward()
            if case.reference is None:
                plain.step()
            else:
                case.reference(plain)
        optimizer.finish()
        _require_equal(
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
    optimizer = _distribute(case, rule, model, _momentum)
    for step in range(1, 4):
        _step(model, optimizer, centers_of(paceline.rank(), step))
    states = optimizer.state_dict()["state"]
    for number, dtype in enumerate(mixed):
        parameter = list(model.parameters())[number]
        _require(parameter.dtype == dtype, f"a {dtype} parameter is {parameter.dtype}")
        _require(
            parameter.grad is not None
            and parameter.grad.dtype == dtype
            and parameter.grad.shape == parameter.shape,
            f"the gradient of a {dtype} parameter has changed its type or shape",
        )
        momentum = states[number]["momentum_buffer"]
        _require(
            momentum.dtype == dtype and momentum.shape == parameter.shape,
            f"the momentum of a {dtype} parameter has changed its type or shape",
        )
    optimizer.finish()


def state_survives_a_restart(case: Case, rule: str) -> None:
    """3 + 3 steps with `state_dict` saved and loaded in between equal 6 straight ones; or,
    where something is under way between steps, 3 + 3 with a `finish` in between.

    (Skipped where the result depends on time anyway, and for measured plans: they depend
    on the step, and the order of sums on them.)
    """
    if rule in fusion.MEASURED or not case.timing_free:
        return
    for make in _OPTIMIZERS:
        straight, optimizer = _begin(case, rule, make)
        for step in range(1, 4):
            _step(straight, optimizer, centers_of(paceline.rank(), step))
        if case.under_way:
            optimizer.finish()
            inner = optimizer.unwrapped
            optimizer = distribute(straight, inner, method=case.method, fusion=rule)
        for step in range(4, 7):
            _step(straight, optimizer, centers_of(paceline.rank(), step))
        optimizer.finish()

        first, optimizer = _begin(case, rule, make)
        for step in range(1, 4):
            _step(first, optimizer, centers_of(paceline.rank(), step))
        with optimizer.consolidated() if case.under_way else nullcontext():
            saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
        optimizer.finish()
        second, optimizer = _begin(case, rule, make)
        second.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for step in range(4, 7):
            _step(second, optimizer, centers_of(paceline.rank(), step))
        optimizer.finish()
        _require_equal(second, straight, "a restart changes the result")


def uneven_data_ends(case: Case, rule: str) -> None:
    """Workers with different numbers of batches all end, with one model."""
    model, optimizer = _begin(case, rule)
    with optimizer.join():
        for step in range(1, 4 + 2 * paceline.rank()):
            _step(model, optimizer, centers_of(paceline.rank(), step))
    with optimizer.consolidated():
        mine = flat_parameters(model)
    everyone = torch.empty(paceline.world_size() * mine.numel(), dtype=mine.dtype)
    dist.all_gather_single(everyone, mine)
    _require(
        bool((everyone.view(-1, mine.numel()) == mine).all()),
        "workers hold different models after finish()",
    )


def evaluations_change_nothing(case: Case, rule: str) -> None:
    """Training with `consolidated` evaluations in between is bit-equal to without.

    (Skipped where the result depends on time anyway, and for measured plans, whose sums
    do.)
    """
    if rule in fusion.MEASURED or not case.timing_free:
        return
    ends = []
    for evaluate in (False, True):
        model, optimizer = _begin(case, rule, _momentum)
        for step in range(1, 7):
            _step(model, optimizer, centers_of(paceline.rank(), step))
            if evaluate:
                with optimizer.consolidated(), torch.no_grad():
                    model(centers_of(99))
        optimizer.finish()
        ends.append(model)
    _require_equal(ends[0], ends[1], "evaluations in between change the result")


def a_buffer_is_free_after_its_wait(case: Case, rule: str) -> None:
    """What a worker does to a buffer that it has waited for reaches nobody."""
    paceline.init()
    comm = TorchComm(join_world())
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
        _require(
            bool((got == n * (n - 1) / 2).all()),
            "a buffer that another worker changed after its wait arrived changed",
        )


RULES = (*fusion.FIXED, "optimal")
"""Under which each check runs."""

CHECKS: dict[str, Callable[[Case, str], None]] = {
    check.__name__: check
    for check in (
        converges,
        one_worker_is_the_reference,
        types_and_shapes_are_kept,
        state_survives_a_restart,
        uneven_data_ends,
        evaluations_change_nothing,
        a_buffer_is_free_after_its_wait,
    )
}


def final_parameters(case: Case, rule: str) -> list[float]:
    """Ten steps with momentum: what a method that does not depend on timing ends with, in
    whatever world."""
    model, optimizer = _begin(case, rule, _momentum)
    for step in range(1, 11):
        _step(model, optimizer, centers_of(paceline.rank(), step))
    optimizer.finish()
    with optimizer.consolidated():
        return [float(value) for value in flat_parameters(model)]


def run_checks(case: Case, rule: str) -> None:
    """All checks, in the world of the caller; raises `CheckFailedError` at the first that
    fails. Collective: every worker of that world calls it."""
    for name, check in CHECKS.items():
        with _named(f"{case.name}, fusion {rule}, {name}"):
            check(case, rule)


def check_method(case: Case, workers: tuple[int, ...] = (1, 2, 3)) -> None:
    """All checks under all fusion rules in the virtual world, for some numbers of workers.

    Raises what the failing worker raised: `CheckFailedError` for a broken law, and the
    virtual world's own errors, `DeadlockError` among them.
    """
    for count in workers:
        for rule in RULES:
            simulation = Simulation(uniform_cluster(count, "1gbit", "50us"))
            with _named(f"{count} workers"):
                simulation.run(lambda rank, rule=rule: run_checks(case, rule))  # type: ignore[misc]


def _sgd(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate)


def _momentum(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate / 10, momentum=0.9)


def _adamw(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate / 10)


_OPTIMIZERS = (_sgd, _momentum, _adamw)


def _begin(
    case: Case,
    rule: str,
    make: Callable[[torch.nn.Module, float], torch.optim.Optimizer] = _sgd,
) -> tuple[Quadratic, DistributedOptimizer]:
    model = Quadratic()
    return model, _distribute(case, rule, model, make)


def _distribute(
    case: Case,
    rule: str,
    model: Quadratic,
    make: Callable[[torch.nn.Module, float], torch.optim.Optimizer],
) -> DistributedOptimizer:
    optimizer = make(model, case.learning_rate)
    return distribute(model, optimizer, method=case.method, fusion=rule)


def _step(
    model: Quadratic, optimizer: torch.optim.Optimizer, centers: torch.Tensor
) -> None:
    optimizer.zero_grad()
    model(centers).backward()
    optimizer.step()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailedError(otherwise)


def _require_equal(
    a: torch.nn.Module, b: torch.nn.Module, otherwise: str, rounding: float = 0.0
) -> None:
    difference = (flat_parameters(a) - flat_parameters(b)).abs().max().item()
    _require(difference <= rounding, f"{otherwise}: by {difference:.2g}")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say in an error which row and check it comes from."""
    try:
        yield
    except PacelineError as error:
        error.add_note(f"conformance: {what}")
        raise
