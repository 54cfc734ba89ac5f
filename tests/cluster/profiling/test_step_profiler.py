"""Compute times, tensor by tensor, of models that take known times on a clock by hand."""

from __future__ import annotations

import copy
import pickle
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.cluster import Workload
from paceline.cluster.profiling import (
    WARM_UP_STEPS,
    StepProfiler,
    step_profiler,
    times_of,
    with_times,
)
from paceline.errors import UsageError
from paceline.runtimes.simulated import simulation as runtime
from tests.support.simulations import run_on, simulation

UPDATE = 0.25


class HostClock:
    """The host's clock in the simulated runtime: it goes on when somebody computes."""

    def __init__(self) -> None:
        self.now = 100.0

    def compute(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = HostClock()
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(runtime, "time", time)
    return clock


def count_computing(clock, monkeypatch, thread=1.0, process=1.0):
    """The thread, and all threads of the process, compute in such a part of the clock's time."""
    time = SimpleNamespace(
        thread_time=lambda: thread * clock.now,
        process_time=lambda: process * clock.now,
    )
    monkeypatch.setattr(step_profiler, "time", time)


class Computes(torch.autograd.Function):
    """Takes time backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, clock: HostClock, seconds: float
    ) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.compute(ctx.seconds)
        return gradient, None, None


class Layer(nn.Linear):
    """A linear layer that takes *forward* and *backward* seconds."""

    def __init__(
        self, clock: HostClock, forward: float, backward: float, outputs: int = 4
    ) -> None:
        super().__init__(4, outputs)
        self.clock, self.seconds = clock, (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.compute(self.seconds[0])
        return Computes.apply(super().forward(x), self.clock, self.seconds[1])


class SlowSGD(torch.optim.SGD):
    clock: HostClock

    def step(self, closure: Any = None) -> Any:
        self.clock.compute(UPDATE)
        return super().step(closure)


def three_layers(clock: HostClock) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        Layer(clock, 1.0, 4.0),
        nn.Tanh(),
        Layer(clock, 2.0, 16.0),
        Layer(clock, 3.0, 8.0),
    )


def distributed(model: nn.Module, clock: HostClock) -> Any:
    inner = SlowSGD(model.parameters(), lr=0.01)
    inner.clock = clock
    return paceline.distribute(model, inner)


def one_pass(model: nn.Module, optimizer: Any, step: int) -> None:
    model(torch.ones(8, 4)).square().mean().backward()


def profile(
    clock: HostClock,
    make: Callable[[HostClock], nn.Module] = three_layers,
    take: Callable[[nn.Module, Any, int], None] = one_pass,
    *,
    count: int = 5,
    workers: int = 1,
) -> StepProfiler:
    """The profiler of a training of *count* steps: *take* does one up to the update."""

    def body(rank: int) -> None:
        model = make(clock)
        optimizer = distributed(model, clock)
        for step in range(count):
            optimizer.zero_grad()
            take(model, optimizer, step)
            optimizer.step()
        optimizer.finish()

    return profile_of(body, workers)


def profile_of(body: Callable[[int], Any], workers: int = 1) -> StepProfiler:
    runtime = simulation(workers, profile=True)
    run_on(runtime, body)
    (profiler,) = runtime.result.profilers
    return profiler


def by_layer(values: tuple[float, ...], workload: Workload) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, value in zip(workload.names, values, strict=True):
        layer = name.partition(".")[0]
        sums[layer] = sums.get(layer, 0.0) + value
    return sums


def test_times_sizes_order_update_and_batch_are_those_of_the_model(clock):
    profiler = profile(clock)
    workload = profiler.workload("here")
    assert workload.names == tuple(n for n, _ in three_layers(clock).named_parameters())
    assert workload.sizes == (64, 16) * 3
    assert by_layer(workload.forward, workload) == {"0": 1.0, "2": 2.0, "3": 3.0}
    assert workload.forward[0] == pytest.approx(0.8)  # 64 of a layer's 80 bytes
    assert by_layer(workload.backward, workload) == {"0": 4.0, "2": 16.0, "3": 8.0}
    assert [i // 2 for i in workload.order] == [2, 2, 1, 1, 0, 0]
    assert workload.update == UPDATE
    assert workload.batch == 8
    assert workload.source == "here"
    assert profiler.profiled_steps == 5 - WARM_UP_STEPS


@pytest.mark.parametrize(
    ("ran", "waited", "cores", "part"),
    [
        (1.0, 0.0, 1, 1.0),
        # So many workers a core: 2, and 10.
        (0.5, 0.5, 1, 0.5),
        (0.1, 0.9, 1, 0.1),
        # It sleeps, or reads files: it takes that time wherever it runs.
        (0.6, 0.1, 1, 1.0),
        (0.4, 0.2, 0, 1.0),
        (0.0, 0.0, 0, 1.0),
    ],
)
def test_waits_for_a_core_are_no_part_of_what_a_worker_takes_alone(
    clock, monkeypatch, ran, waited, cores, part
):
    count_computing(clock, monkeypatch, ran, ran)
    monkeypatch.setattr(
        step_profiler, "waited_for_processor", lambda threads: waited * clock.now
    )
    profiler = profile(clock)
    alone, together = profiler.workload_alone("here"), profiler.workload("here")
    assert (alone.cores, together.cores) == (cores, 0)
    assert times_of(alone) == pytest.approx([part * t for t in times_of(together)])
    assert alone.order == together.order
    # In a simulation others compute meanwhile.
    computed = profiler.workload_alone("here", idle_counts=False)
    assert times_of(computed) == pytest.approx([ran * t for t in times_of(together)])
    assert computed.cores == 1


@pytest.mark.parametrize(
    ("busy", "pool", "cores"), [(3.2, 4, 3), (3.2, 2, 2), (0.3, 4, 1)]
)
def test_cores_are_those_that_forward_kept_busy(clock, monkeypatch, busy, pool, cores):
    count_computing(clock, monkeypatch, 1.0, busy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: pool)
    profiler = profile(clock)
    assert profiler.workload_alone("").cores == cores


@pytest.mark.parametrize("evaluates", [False, True])
def test_input_is_what_a_thread_computes_between_steps(clock, monkeypatch, evaluates):
    """Not with an evaluation in between, whose passes are charged by themselves."""
    count_computing(clock, monkeypatch)
    loads = iter([9.0, 5.0, 3.0, 4.0, 30.0])

    def take(model, optimizer, step):
        clock.compute(next(loads))
        if evaluates and step == 4:
            with torch.no_grad():
                model(torch.ones(8, 4))
        for _ in range(2):  # only before the first pass of a step
            model(torch.ones(8, 4)).square().mean().backward()

    profiler = profile(clock, take=take)
    # Of steps 1 to 4, and to 3 where the last one evaluates.
    assert profiler.workload_alone("").input == (4.0 if evaluates else 4.5)
    assert profiler.workload("").input == 0.0


def test_overhead_is_what_a_thread_computes_in_hooks_and_before_the_update(
    clock, monkeypatch
):
    count_computing(clock, monkeypatch)

    def take(model, optimizer, step):
        model(torch.ones(8, 4)).square().mean().backward()
        clock.compute(0.5)  # such as a norm that is logged

    taken = StepProfiler.gradient_taken

    def in_hook(self):
        clock.compute(0.25)
        taken(self)

    monkeypatch.setattr(StepProfiler, "gradient_taken", in_hook)
    profiler = profile(clock, take=take)
    workload = profiler.workload_alone("")
    assert workload.overhead == 0.5 + 0.25 * len(workload.names)
    # What hooks take is no part of backward.
    assert times_of(workload) == pytest.approx(times_of(profiler.workload("")))
    assert profiler.workload("").overhead == 0.0


def test_ready_times_are_the_ones_that_a_clock_would_show(clock):
    ready: dict[str, float] = {}

    def hooked(clock: HostClock) -> nn.Module:
        model = three_layers(clock)
        start = []
        model.register_forward_pre_hook(lambda *_: start.append(clock.now))
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: ready.update({name: clock.now - start[-1]})
            )
        return model

    workload = profile(clock, hooked).workload("")
    names = [workload.names[i] for i in workload.order]
    assert names == list(ready)
    assert workload.ready_seconds == pytest.approx(list(ready.values()))


def test_figures_are_medians_of_steps_after_the_first(clock):
    times = [50.0, 1.0, 1.0, 9.0, 1.0, 2.0]

    def take(model: nn.Module, optimizer: Any, step: int) -> None:
        model.seconds = times[step], 2 * times[step]
        one_pass(model, optimizer, step)

    profiler = profile(
        clock, lambda clock: Layer(clock, 1.0, 1.0), take, count=len(times)
    )
    workload = profiler.workload("")
    middle = statistics.median(times[1:])
    assert workload.forward_seconds == middle
    assert workload.backward_seconds == 2 * middle


def test_the_loss_belongs_to_the_first_gradient(clock):
    def take(model: nn.Module, optimizer: Any, step: int) -> None:
        loss = model(torch.ones(8, 4)).square().mean()
        clock.compute(0.5)
        loss.backward()

    workload = profile(clock, take=take).workload("")
    assert workload.backward[workload.order[0]] == 8.5


def test_of_accumulated_passes_the_last_counts(clock):
    def take(model: nn.Module, optimizer: Any, step: int) -> None:
        model[0].seconds = 70.0, 70.0
        with optimizer.no_sync():
            one_pass(model, optimizer, step)
        model[0].seconds = 1.0, 4.0
        one_pass(model, optimizer, step)

    workload = profile(clock, take=take).workload("")
    assert workload.forward_seconds == 6.0
    assert workload.backward_seconds == 28.0
    assert workload.batch == 8


def test_evaluations_are_no_part_of_a_step(clock):
    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(torch.ones(99, 4))

    def take(model: nn.Module, optimizer: Any, step: int) -> None:
        evaluate(model)
        one_pass(model, optimizer, step)
        evaluate(model)

    workload = profile(clock, take=take).workload("")
    assert workload.forward_seconds == 6.0
    assert workload.backward_seconds == 28.0
    assert workload.update == UPDATE
    assert workload.batch == 8


class Shared(nn.Module):
    """One layer used twice, its weight a third time, and a part that is frozen."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.clock = clock
        self.frozen = Layer(clock, 0.5, 0.0).requires_grad_(False)
        self.layer = Layer(clock, 1.0, 4.0)
        self.tied = Layer(clock, 2.0, 8.0)
        self.tied.weight = self.layer.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.layer(self.layer(self.frozen(x))))


def test_shared_frozen_and_unused_tensors(clock):
    workload = profile(clock, Shared).workload("")
    names = ("layer.weight", "layer.bias", "tied.bias", "unused.weight", "unused.bias")
    assert workload.names == names
    forward = by_layer(workload.forward, workload)
    # what runs before the first module with tensors of its own is counted with it
    assert forward == {"layer": 0.5 + 1.0 + 1.0, "tied": 2.0, "unused": 0.0}
    assert workload.backward_seconds == pytest.approx(4.0 + 4.0 + 8.0)
    backward = dict(zip(workload.names, workload.backward, strict=True))
    assert backward["tied.bias"] == 8.0
    assert [workload.names[i] for i in workload.order[-2:]] == [
        "unused.bias",
        "unused.weight",
    ]


class WithBuffers(nn.Module):
    """Rank 0's buffers are broadcast when a forward pass begins: that is no computing."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = Layer(clock, 1.0, 4.0)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def test_what_other_workers_compute_does_not_count(clock):
    def take(model: nn.Module, optimizer: Any, step: int) -> None:
        if paceline.rank():
            clock.compute(1000.0)
        one_pass(model, optimizer, step)

    workload = profile(clock, WithBuffers, take, workers=3).workload("")
    assert workload.forward_seconds == 1.0
    assert workload.backward_seconds == 4.0
    assert workload.update == UPDATE


class OwnTensor(nn.Module):
    """Its only parameter is its own."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__()
        self.clock = clock
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.compute(3.0)
        return Computes.apply(F.relu(x * self.scale), self.clock, 5.0)


def test_a_model_whose_tensors_are_its_own(clock):
    workload = profile(clock, OwnTensor).workload("")
    assert (workload.forward, workload.backward) == ((3.0,), (5.0,))


def test_a_model_that_is_never_called_itself_says_so(clock):
    profiler = profile(
        clock,
        lambda clock: nn.ModuleDict({"inner": three_layers(clock)}),
        lambda model, optimizer, step: one_pass(model["inner"], optimizer, step),
    )
    with pytest.raises(UsageError, match="got 5"):
        profiler.workload("")


def test_a_profiled_model_can_be_copied_and_pickled(clock):
    """As to average its weights; the copy is not profiled."""

    def take(model: nn.Module, optimizer: Any, step: int) -> None:
        loss = model(torch.ones(8, 4)).square().mean()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.ones(99, 4)).sum().backward()
            assert other[0].weight.grad is not None
        clock.compute(7.0)
        loss.backward()

    def plain(_: HostClock) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    workload = profile(clock, plain, take).workload("")
    assert workload.batch == 8
    assert workload.backward_seconds == 7.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
def test_compiled_blocks_stay_whole():
    """On the true clock; a warning of the compiler would be an error."""

    def compiled(_: HostClock) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        for block in model:
            block.compile(backend="aot_eager")
        return model

    workload = profile(HostClock(), compiled).workload("")
    assert workload.forward_seconds > 0
    assert min(workload.forward) > 0  # of all blocks, spread over all


def test_a_step_that_a_scaler_skips_is_not_taken_for_one(clock):
    def body(rank: int) -> None:
        model = three_layers(clock)
        optimizer = distributed(model, clock)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4)).square().mean()
            if step == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.finish()

    profiler = profile_of(body)
    assert profiler.profiled_steps == 4
    assert profiler.workload("").update == UPDATE


def test_all_times_in_one_list_and_back():
    workload = Workload(
        names=("a", "b"), sizes=(4, 8), forward=(1, 2), backward=(3, 4), update=5
    )
    assert times_of(workload) == [1, 2, 3, 4, 5]
    other = with_times(workload, [10, 20, 30, 40, 50])
    assert (other.forward, other.backward, other.update) == ((10, 20), (30, 40), 50)
    assert (other.names, other.sizes) == (workload.names, workload.sizes)
