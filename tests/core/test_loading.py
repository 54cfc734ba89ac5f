"""What a script loads after `distribute`, and what else it writes, where servers update."""

from __future__ import annotations

import copy

import pytest
import torch

import paceline
from paceline.errors import UsageError, WorkerFailedError
from paceline.testing import inspect
from tests.support.training import simulate

METHODS = [
    *("asp", "ssp", "ssp:staleness=0", "r2sp:warm_up=2", "backup", "backup:wait_for=1"),
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

    with pytest.raises(WorkerFailedError, match="load after step"):
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
