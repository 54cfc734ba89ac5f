"""The laws about scripts: a method supports a training loop unchanged, or refuses it with a clear error.

`IDIOMS` are ways to write one step. Each trains a model whose parameters show how many gradients were applied to
them. So a lost, doubled or not averaged gradient shows under every method. Workers have gradients of different
size, and the sum of their means must arrive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.core.backward_passes import DDP_SYNCHRONIZES
from paceline.core.optimizer import DistributedOptimizer
from paceline.errors import GradientError, UsageError
from paceline.testing.cases import Case
from paceline.testing.problems import (
    PAUSE,
    Counting,
    begin,
    begin_counting,
    centers_of,
    counted,
    distribute_as,
    everyone,
    flat_parameters,
    momentum,
    require,
    require_equal,
    sgd,
    step,
)
from paceline.torch_internals import step_was_noted

LIMIT = 0.5
"""The limit that norms are clipped to."""

ROUNDING = 1e-5
"""Largest relative difference between two orders of adding the same gradients."""

Script = Callable[[Counting, DistributedOptimizer, float], None]
"""One step, whose gradients sum to the last argument."""


def _plain(model: Counting, optimizer: torch.optim.Optimizer, times: float) -> None:
    optimizer.zero_grad()
    model(times).backward()
    optimizer.step()


def a_closure(model: Counting, optimizer: DistributedOptimizer, times: float) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model(times)
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


def zeros_in_place(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(times).backward()
    optimizer.step()


def zeros_by_the_model(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    model(times).backward()
    optimizer.step()
    model.zero_grad()


def accumulation(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(times / 4).backward()
    model(times * 3 / 4).backward()
    optimizer.step()


def accumulation_by_ddps_attribute(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad()
    for last in (False, True):
        setattr(model, DDP_SYNCHRONIZES, last)
        model(times / 2).backward()
    optimizer.step()


def accumulation_alone(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(times).backward()
    optimizer.step()


def two_backward_passes(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad()
    model(times / 4).backward()
    model(times * 3 / 4).backward()
    optimizer.step()


def accumulation_comes_last(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad()
    model(times / 4).backward()
    with optimizer.no_sync():
        model(times * 3 / 4).backward()
    optimizer.step()


def two_forward_passes(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad()
    (model(times / 4) + model(times * 3 / 4)).backward()
    optimizer.step()


def evaluations_in_between(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad()
    loss = model(times)
    with torch.no_grad():
        model(5.0)
    loss.backward()
    with torch.no_grad():
        model(5.0)
    optimizer.step()
    with torch.no_grad():
        model.eval()(5.0)
    model.train()
    flat_parameters(model)
    model.state_dict()
    optimizer.state_dict()


def a_copy_is_trained_beside(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    _plain(model, optimizer, times)
    twin = copy.deepcopy(model)
    twin(5.0).backward()
    with torch.no_grad():
        twin.vector.sub_(1.0)


def a_grad_scaler(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(model(times)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def gradients_are_halved_by_hand(
    model: Counting, optimizer: DistributedOptimizer, times: float
) -> None:
    optimizer.zero_grad()
    model(2 * times).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    optimizer.step()


IDIOMS: tuple[Script, ...] = (
    a_closure,
    zeros_in_place,
    zeros_by_the_model,
    accumulation,
    accumulation_by_ddps_attribute,
    accumulation_alone,
    two_forward_passes,
    evaluations_in_between,
    a_copy_is_trained_beside,
)
"""Idioms that every method supports."""

MAY_BE_REFUSED: tuple[Script, ...] = (
    two_backward_passes,
    accumulation_comes_last,
    a_grad_scaler,
    gradients_are_halved_by_hand,
)
"""Idioms that a method may refuse with a `GradientError` on all workers, if gradients are in flight when
``backward()`` ends."""


def script_idioms(case: Case, rule: str) -> None:
    """Accumulation, closures, ``zero_grad`` of all kinds, evaluations, copies, several passes, a GradScaler and
    manual changes work as in plain torch, or raise `GradientError`."""
    for script in IDIOMS:
        _require_all_gradients(case, rule, script)
    for script in MAY_BE_REFUSED:
        with suppress(GradientError):
            _require_all_gradients(case, rule, script)


def _require_all_gradients(case: Case, rule: str, script: Script) -> None:
    model, optimizer = begin_counting(case, rule)
    steps, workers = 3, paceline.world_size()
    try:
        for _ in range(steps):
            script(model, optimizer, 1.0 + paceline.rank())
    except GradientError:
        _end_refused(optimizer)
        raise
    optimizer.finish()
    expected = steps * (1.0 + workers) / 2
    off = (counted(model, case) - expected).abs().max().item()
    require(
        off <= 1e-3 + case.lossy * steps * workers,
        f"{script.__name__}: the applied gradients differ by {off:.3g} from the expected sum "
        f"{expected:g}",
    )


def _end_refused(optimizer: DistributedOptimizer) -> None:
    """End a training that all workers refused. A worker only sees its own refusal."""
    dist.barrier()
    optimizer.finish()
    dist.barrier()


def a_scaler_leaves_out_infinite_gradients(case: Case, rule: str) -> None:
    """If one worker's loss is infinite in a step, a GradScaler skips that update on all workers. If workers update
    by themselves, only that one skips it. All end with one finite model. A method may refuse scaled gradients
    with a `GradientError`."""
    model, optimizer = begin_counting(case, rule)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    steps, last = 6, paceline.world_size() - 1
    try:
        for number in range(steps):
            optimizer.zero_grad()
            loss = model()
            if number == 2 and paceline.rank() == last:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    except GradientError:
        _end_refused(optimizer)
        return
    optimizer.finish()
    found = counted(model, case)
    require(bool((everyone(found) == found).all()), "workers hold different models")
    off = 1e-3 + case.lossy * steps
    least, most = found.min().item(), found.max().item()
    require(
        steps - 1 - off <= least <= most <= steps + off,
        f"of {steps} steps one had an infinite loss on one worker: the model has the gradients "
        f"of {least:.3f} to {most:.3f} steps, expected {steps - 1} to {steps}",
    )


class _Branches(torch.nn.Module):
    """A weight that is used twice, a branch that is used in two steps of three, an unused branch, and a frozen
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) / 2)

        self.shared, self.never = drawn(4, 4), drawn(4, 4)
        self.bias, self.seldom = drawn(4), drawn(4)
        self.frozen = drawn(4)
        self.frozen.requires_grad_(False)

    def forward(self, number: int) -> torch.Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        hidden = (x @ self.shared + self.bias).tanh() * self.frozen
        if number % 3:
            hidden = hidden * self.seldom
        return (hidden @ self.shared - x.sin()).square().mean()

    def optimizer(self, learning_rate: float, **keys: float) -> torch.optim.Optimizer:
        """SGD with *keys*, whose first group has a learning rate of its own."""
        others = [self.bias, self.seldom, self.never, self.frozen]
        groups: list[dict[str, Any]] = [
            {"params": [self.shared], "lr": learning_rate / 2, **keys},
            {"params": others, **keys},
        ]
        return torch.optim.SGD(groups, lr=learning_rate)


def workers_with_one_batch_train_as_one(case: Case, rule: str) -> None:
    """Workers with the same batches end like plain torch with one of them. This includes shared, unused and frozen
    weights, and groups with hyperparameters of their own. Momentum and decay do not move unused parameters."""
    alone = paceline.world_size() == 1
    keys = {"momentum": 0.9, "weight_decay": 0.1}
    if not (alone or case.equals or case.under_way):
        keys = {}  # A server may apply each worker's gradient in a step of its own.
    model, expected = _Branches(), _Branches()
    inner = model.optimizer(case.learning_rate / 4, **keys)
    optimizer = distribute_as(case, rule, model, inner)
    plain = expected.optimizer(case.learning_rate / 4, **keys)
    for number in range(1, 8):
        optimizer.zero_grad()
        model(number).backward()
        optimizer.step()
        plain.zero_grad()
        expected(number).backward()
        if case.reference is None:
            plain.step()
        else:
            case.reference(plain)
    optimizer.finish()
    require_equal(model, expected, "the model differs from plain torch's", ROUNDING)


def parameters_may_get_other_memory(case: Case, rule: str) -> None:
    """A script may replace parameters' memory between steps, as lookahead optimizers and
    `torch.nn.utils.vector_to_parameters` do: no bit changes."""
    ends = []
    for moves in (False, True):
        model, optimizer = begin(case, rule, momentum)
        for number in range(1, 8):
            step(model, optimizer, centers_of(paceline.rank(), number))
            if moves and number in (2, 5):
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
        optimizer.finish()
        ends.append(model)
    require_equal(ends[0], ends[1], "new memory for parameters changes the result")


def schedules_are_followed(case: Case, rule: str) -> None:
    """A step uses the learning rate of torch's scheduler. The scheduler sees the steps, or it would warn. It may be
    made before or after `distribute`, and steps may use a closure."""
    for before, script in ((True, _plain), (False, a_closure)):
        model, steps, whole = Counting(), 6, 3
        inner = sgd(model, case.learning_rate)
        schedule = _half_after(whole, inner) if before else None
        optimizer = distribute_as(case, rule, model, inner)
        schedule = schedule or _half_after(whole, optimizer)
        for _ in range(steps):
            script(model, optimizer, 1.0)
            noted = step_was_noted(schedule.optimizer)
            require(noted, "torch's scheduler has not noticed a step")
            schedule.step()
        optimizer.finish()
        expected = whole + (steps - whole) / 2
        off = (counted(model, case) - expected).abs().max().item()
        require(
            off <= 1e-3 + case.lossy * steps,
            f"the learning rates of {steps} steps add up to {expected} times the first one, but "
            f"the parameters' change differs by {off:.3g}",
        )


def _half_after(
    whole: int, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: 1.0 if done < whole else 0.5
    )


def gradients_are_clipped_once(case: Case, rule: str) -> None:
    """Equal gradients on all workers have the same norm as their mean. So each step applies one clipped gradient,
    whichever norm is clipped. The script may clip instead, unless the method refuses that."""
    _require_clipped(case, rule, by_hand=False)
    with suppress(GradientError):
        _require_clipped(case, rule, by_hand=True)


def _require_clipped(case: Case, rule: str, *, by_hand: bool) -> None:
    limit = None if by_hand else LIMIT
    model, optimizer = begin_counting(case, rule, clip_norm=limit)
    steps = 5
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            if by_hand:
                torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
    except GradientError:
        _end_refused(optimizer)
        raise
    optimizer.finish()
    moved = counted(model, case).norm().item()
    require(
        abs(moved - steps * LIMIT) <= 1e-4 + case.lossy * steps,
        f"{steps} gradients clipped to norm {LIMIT} have changed parameters by {moved:.6g}: "
        f"expected {steps * LIMIT:g}",
    )


class _Noting(Counting):
    """Its buffer holds the last input number of forward, like running statistics."""

    noted: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noted", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, times: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            self.noted.fill_(times)
            self.calls += 1
        return super().forward()


def buffers_follow_the_policy(case: Case, rule: str) -> None:
    """With ``buffers="local"`` each worker keeps its own buffers (BatchNorm's statistics). Otherwise all workers
    end with the same ones: those of one worker, or a mean."""
    steps, rank, workers = 4, paceline.rank(), paceline.world_size()
    for policy in ("local", "rank0"):
        model, optimizer = begin_counting(case, rule, _Noting(), buffers=policy)
        assert isinstance(model, _Noting)
        for number in range(1, steps + 1):
            given = 10.0 * number + rank
            _plain(model, optimizer, given)
            own = bool((model.noted == given).all())
            require(
                own or policy == "rank0",
                f"with buffers=local a worker's buffer is {model.noted[0]}: expected {given}",
            )
        optimizer.finish()
        most = steps if case.timing_free or policy == "local" else steps * workers
        require(
            steps <= int(model.calls) <= most,
            f"a buffer that counts forward passes is {int(model.calls)}: expected {steps} to {most}",
        )
        ends = [float(values[0]) for values in everyone(model.noted.double())]
        if policy == "local":
            require(
                ends[rank] == given,
                f"with buffers=local a worker's buffer ends as {ends[rank]}: expected {given}",
            )
            continue
        require(len(set(ends)) == 1, f"buffers differ between workers: {ends}")
        require(
            10.0 <= ends[0] <= 10.0 * steps + workers - 1,
            f"a buffer ends as {ends[0]}: expected a worker's value, or a mean of them",
        )


def loads_take_effect(case: Case, rule: str) -> None:
    """If parameters and momentum are loaded during training, all workers continue from them, and no earlier
    gradient reaches them. Workers load at different times. A method may refuse it with a `UsageError` if a
    part of an update is in flight between steps."""
    # If a server applies each worker's gradient separately, momentum differs from plain torch's.
    make = sgd if case.equals is None else momentum
    model = Counting()
    optimizer = distribute_as(case, rule, model, make(model, case.learning_rate))
    for done in (0, 3):  # Before the first step, and during training.
        for _ in range(done):
            paceline.pace(PAUSE * paceline.rank())
            _plain(model, optimizer, 1.0)
        expected = Counting()
        torch.nn.init.constant_(expected.matrix, 3.0 + done)
        plain = make(expected, case.learning_rate)
        _plain(expected, plain, 2.0)
        try:
            _load(model, optimizer, expected, plain)
        except UsageError:
            if not case.under_way:
                raise
            return
        for _ in range(2):
            paceline.pace(PAUSE * paceline.rank())
            _plain(model, optimizer, 1.0)
            _plain(expected, plain, 1.0)
    optimizer.finish()
    off = (flat_parameters(model) - flat_parameters(expected)).abs().max().item()
    off /= case.learning_rate
    require(
        off <= 1e-3 + 2 * case.lossy,
        f"two steps after a load, parameters differ from plain torch's by {off:.3g} gradients",
    )


def _load(
    model: Counting,
    optimizer: DistributedOptimizer,
    other: Counting,
    plain: torch.optim.Optimizer,
) -> None:
    """Load the state of another model and its optimizer; the next forward pass uses it."""
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    seen, expected = model().item(), other().item()
    require(
        abs(seen - expected) <= 1e-4,
        f"right after a load forward computes {seen:.6g}: expected {expected:.6g}, as with the "
        "loaded parameters",
    )
