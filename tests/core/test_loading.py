"""What a script loads after `distribute`, and what else it writes, where servers update; and where loads,
saves, clipping, skipped steps and ends of loops meet.
"""

from __future__ import annotations

import copy

import pytest
import torch

import paceline
from paceline.errors import UsageError, WorkerFailedError
from paceline.testing import inspect
from paceline.testing.problems import Quadratic, centers_of, flat_parameters
from tests.support.training import simulate

METHODS = [
    *(
        "asp",
        "ssp",
        "ssp:staleness=0",
        "r2sp:warmup_steps=2",
        "backup",
        "backup:wait_for=1",
    ),
    *("sync-switch", "sync-switch:bsp_steps=3"),
    *("osp", "osp:defer=most,budget=constant,most=1,chunk=16"),
]
OPTIMUM = 100.0
WORKERS = 3


class Pulled(torch.nn.Module):
    """Its gradient is its distance from the optimum; it notes what it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))
        self.other = torch.nn.Linear(4, 4, bias=False)
        self.seen: list[float] = []

    def forward(self) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen.append(self.weight[0].item())
        return (self.weight - OPTIMUM).square().sum() / 2 + 0 * self.other.weight.sum()


def begin(
    method: str, momentum: float = 0.9
) -> tuple[Pulled, paceline.DistributedOptimizer]:
    model = Pulled()
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
    return model, paceline.distribute(model, sgd, method=method)


def step(model: Pulled, optimizer: torch.optim.Optimizer) -> None:
    paceline.pace(0.01)
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def optimum() -> dict[str, torch.Tensor]:
    return {**Pulled().state_dict(), "weight": torch.full((8,), OPTIMUM)}


# ---- loads ----


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("method", ["asp", "osp"])
def test_everybody_has_the_lowest_ranks(method: str, servers: int) -> None:
    """Parameters, those that are frozen, and buffers; and as it is, what was not loaded."""
    ends = {}

    def script(rank: int) -> None:
        torch.manual_seed(rank)
        model = Pulled()
        model.other.weight.requires_grad_(False)
        model.register_buffer("masked", torch.tensor([-torch.inf, 0.5]))
        model.register_buffer("table", torch.tensor([2**60 + 1, 3]))
        model.register_buffer("which", torch.tensor([True, False]))
        model.register_buffer("turned", torch.zeros(2, dtype=torch.complex64))
        sgd = torch.optim.SGD([model.weight], lr=0.02)
        optimizer = paceline.distribute(model, sgd, method=method)
        step(model, optimizer)
        state = copy.deepcopy(model.state_dict())
        state["weight"] += rank
        state["other.weight"] += rank
        state["table"] += rank
        state["turned"] += rank * 1j
        state["masked"][1] += rank
        model.load_state_dict(state)
        step(model, optimizer)
        optimizer.finish()
        ends[rank] = copy.deepcopy(model.state_dict())

    simulate(WORKERS, script, servers)
    assert ends[0]["table"].tolist() == [2**60 + 1, 3]
    assert ends[0]["masked"].tolist() == [-torch.inf, 0.5]
    for end in ends.values():
        for name, value in end.items():
            assert torch.equal(value, ends[0][name]), name


def test_what_is_not_loaded_is_the_servers() -> None:
    """Rank 0's own copy of it may be old."""

    def script(rank: int) -> None:
        model, optimizer = begin("asp", momentum=0.0)
        for _ in range(1 + 4 * rank):
            model.weight.register_hook(torch.ones_like)  # each gradient is 1
            step(model, optimizer)
        # Only now all have done their steps, and rank 0 has not seen most of them.
        model.other.load_state_dict({"weight": torch.ones(4, 4)})
        model()
        assert model.seen[-1] == pytest.approx(-0.02 / 3 * (1 + 5 + 9))
        optimizer.finish()
        assert model.other.weight.tolist() == [[1.0] * 4] * 4

    simulate(WORKERS, script)


def test_what_was_loaded_is_evaluated_and_kept_before_any_step() -> None:
    def script(rank: int) -> None:
        model, optimizer = begin("ssp")
        step(model, optimizer)
        model.load_state_dict(optimum())
        if rank == 1:
            with optimizer.consolidated():
                assert model.weight[0] == OPTIMUM
        assert inspect(optimizer).load_is_complete()
        if rank == 2:
            with optimizer.consolidated():
                assert model.weight[0] == OPTIMUM
        model.load_state_dict({**optimum(), "weight": torch.ones(8)})
        optimizer.finish()
        assert model.weight[0] == 1.0

    simulate(WORKERS, script)


def test_a_load_goes_on_with_who_has_data() -> None:
    def script(rank: int) -> None:
        model, optimizer = begin("asp", momentum=0.0)
        step(model, optimizer)
        if rank != 1:
            model.load_state_dict(optimum())
            step(model, optimizer)
            assert model.seen[-1] == OPTIMUM
        optimizer.finish()
        assert model.weight[0] != 0

    simulate(WORKERS, script)


@pytest.mark.parametrize("method", METHODS)
def test_a_load_at_the_top_by_some_is_refused(method: str) -> None:
    def script(rank: int) -> None:
        model, optimizer = begin(method)
        if rank == 0:
            model.load_state_dict(optimum())
        for _ in range(5):
            step(model, optimizer)

    with pytest.raises(
        WorkerFailedError,
        match="0 waits to load",
    ):
        simulate(WORKERS, script)


@pytest.mark.parametrize("method", ["ssp", "backup", "osp"])
def test_a_load_by_some_that_others_wait_for_is_refused(method: str) -> None:
    def script(rank: int) -> None:
        model, optimizer = begin(method)
        for number in range(9):
            if rank == 1 and number == 2:
                model.load_state_dict(optimum())
            step(model, optimizer)

    with pytest.raises(
        WorkerFailedError,
        match=r"worker 1 .*workers 0, 2",
    ):
        simulate(WORKERS, script)


def test_a_load_between_backward_and_step_is_refused() -> None:
    def script(rank: int) -> None:
        model, optimizer = begin("asp")
        model().backward()
        model.load_state_dict(optimum())
        optimizer.step()

    with pytest.raises(WorkerFailedError, match="Load after step"):
        simulate(WORKERS, script)


@pytest.mark.parametrize("method", ["bsp", "asp", "osp"])
def test_all_meet(method: str) -> None:
    def script(rank: int) -> None:
        model, optimizer = begin(method)
        step(model, optimizer)
        paceline.pace(0.1 * rank)
        assert inspect(optimizer).meet()
        assert paceline.now() > 0.2
        assert inspect(optimizer).load_is_complete()
        optimizer.finish()

    simulate(WORKERS, script)


# ---- whatever else is written ----


@pytest.mark.parametrize("when", ["before the first step", "between", "in mid-step"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_between_steps_is_refused(method: str, when: str) -> None:
    def script(rank: int) -> None:
        model, optimizer = begin(method)
        if when != "before the first step":
            step(model, optimizer)
        loss = model() if when == "in mid-step" else None
        with torch.no_grad():
            model.other.weight.clamp_(-1, 1)
        if loss is None:
            step(model, optimizer)
        else:
            loss.backward()
            optimizer.step()

    with pytest.raises(
        WorkerFailedError,
        match=r"'other.weight'.*optimizer.consolidated",
    ):
        simulate(WORKERS, script)


def test_what_forward_writes_is_refused() -> None:
    def script(rank: int) -> None:
        model = torch.nn.Embedding(10, 2, max_norm=0.1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.02)
        optimizer = paceline.distribute(model, sgd, method="asp")
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(UsageError, match="'weight' was written to"):
            optimizer.step()

    simulate(WORKERS, script)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_inside_consolidated_is_taken_back(method: str) -> None:
    def script(rank: int) -> None:
        model, optimizer = begin(method)
        for _ in range(4):
            step(model, optimizer)
            mine = model.weight.clone()
            with optimizer.consolidated(), torch.no_grad():
                model.weight.mul_(0.5)
                model.load_state_dict(optimum())
                model()
            assert torch.equal(model.weight, mine)
        optimizer.finish()

    simulate(WORKERS, script)


def test_a_copy_of_the_model_is_nobodys() -> None:
    def script(rank: int) -> None:
        model, optimizer = begin("asp")
        step(model, optimizer)
        if rank == 0:
            copy.deepcopy(model).load_state_dict(optimum())
        step(model, optimizer)
        optimizer.finish()
        assert model.weight[0] != OPTIMUM

    simulate(WORKERS, script)


def begin_quadratic(method, clip_norm=None, model=None):
    model = model or Quadratic()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, paceline.distribute(
        model, plain, method=method, buckets="wfbp", clip_norm=clip_norm
    )


def step_for(model, optimizer, rank, number, seconds=0.0):
    paceline.pace(seconds)
    optimizer.zero_grad()
    model(centers_of(rank, number)).backward()
    optimizer.step()


@pytest.mark.parametrize(("servers", "clip_norm"), [(1, None), (1, 0.5), (2, None)])
@pytest.mark.parametrize("how", ["save", "load"])
def test_who_is_slow_comes_to_where_the_fastest_wait(how, servers, clip_norm, tmp_path):
    """The last step of the slowest worker ends without those who wait for it."""
    ended = []

    def train(rank):
        model, optimizer = begin_quadratic("backup:wait_for=2", clip_norm)
        for number in range(1, 5):
            slow = rank == 2 and number != 3
            step_for(model, optimizer, rank, number, 0.25 if slow else 0.1)
            if number == 2 and how == "load":
                paceline.save(tmp_path / "checkpoint")
        if how == "save":
            paceline.save(tmp_path / "checkpoint")
        else:
            paceline.load(tmp_path / "checkpoint")
        step_for(model, optimizer, rank, 5)
        optimizer.finish()
        ended.append(rank)

    simulate(3, train, servers)
    assert sorted(ended) == [0, 1, 2]


def test_a_late_worker_waits_for_no_step_that_is_clipped_before_a_load():
    ends = {}

    def train(rank):
        model, optimizer = begin_quadratic("backup:wait_for=2", 0.5)
        late = rank == 2
        for number in range(1, 2 if late else 8):
            step_for(model, optimizer, rank, number, 3.5 if late else 1.0)
        model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()})
        for number in range(20, 23 if late else 20):
            step_for(model, optimizer, rank, number, 3.5)
        optimizer.finish()
        ends[rank] = flat_parameters(model)

    simulate(3, train, 1)
    assert all(torch.equal(end, ends[0]) for end in ends.values())


@pytest.mark.parametrize("method", ["bsp", "asp", "backup", "osp:defer=nothing"])
def test_what_is_loaded_between_backward_and_finish_is_the_result(method):
    def train(rank):
        model, optimizer = begin_quadratic(method)
        step_for(model, optimizer, rank, 1)
        optimizer.zero_grad()
        model(centers_of(rank, 2)).backward()
        best = {name: torch.full_like(v, 7.0) for name, v in model.state_dict().items()}
        model.load_state_dict(best)
        optimizer.finish()
        assert bool((flat_parameters(model) == 7).all())

    simulate(2, train)


@pytest.mark.parametrize("method", ["asp", "backup", "osp"])
def test_state_that_is_loaded_after_the_end_is_there(method):
    def train(rank):
        model, optimizer = begin_quadratic(method)
        step_for(model, optimizer, rank, 1)
        optimizer.finish()
        saved = optimizer.state_dict()
        assert len(saved["state"]) == 3
        optimizer.load_state_dict(saved)
        assert len(optimizer.state_dict()["state"]) == 3

    simulate(2, train)


@pytest.mark.parametrize("zeroed", [False, True])
def test_gradients_may_be_cleared_where_the_loop_was_left(zeroed):
    def train(rank):
        model, optimizer = begin_quadratic("backup")
        model(centers_of(rank, 1)).backward()
        optimizer.zero_grad(set_to_none=not zeroed)
        optimizer.finish()

    simulate(2, train)


def test_buffers_of_a_skipped_step_do_not_outlive_a_load():
    """As where a GradScaler has found an infinity: `step` is not called."""

    def train(rank):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        model, optimizer = begin_quadratic("bsp", model=model)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        torch.manual_seed(rank)
        model(torch.randn(8, 4)).sum().backward()
        model.load_state_dict(saved)
        with torch.no_grad():
            model.eval()(torch.randn(8, 4))
        for name, value in model.state_dict().items():
            assert torch.equal(value, saved[name])
        model.train()
        optimizer.finish()

    simulate(2, train)
