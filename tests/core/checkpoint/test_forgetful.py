"""Methods with a state of their own: who forgets to save it breaks the laws of restarts."""

import itertools
from contextlib import nullcontext

import pytest
import torch

import paceline
from paceline.compression import COMPRESSORS
from paceline.errors import UsageError, WorkerFailedError
from paceline.testing import Case
from paceline.testing import method_checks as laws
from tests.core.checkpoint.toys import (
    Averages,
    CountsRounds,
    Forgetful,
    ForgetsToLoad,
    Hides,
    Pairs,
    Remembers,
    Shares,
)
from tests.support.training import simulate

BITS = [laws.state_survives_a_restart, laws.a_checkpoint_is_a_restart]


@pytest.mark.parametrize("law", BITS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    "method", [Forgetful(), ForgetsToLoad(), CountsRounds()], ids=lambda m: m.name
)
def test_who_forgets_its_state_breaks_them(law, method):
    with pytest.raises(WorkerFailedError, match="changes the result, by"):
        simulate(2, lambda rank: law(Case(method=method), "ddp"))


@pytest.mark.parametrize("law", BITS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("saved", [True, False])
def test_a_compressor_that_hides_what_it_keeps_breaks_them(law, saved, monkeypatch):
    monkeypatch.setitem(COMPRESSORS, "hides", Hides)
    code = "hides"
    if saved:
        code = "int8,compression.error_feedback=true"
    case = Case(method=f"bsp:compression={code}")
    broken = pytest.raises(WorkerFailedError, match="changes the result, by")
    with nullcontext() if saved else broken:
        simulate(2, lambda rank: law(case, "ddp"))


@pytest.mark.parametrize(
    "method", [Averages(), Pairs(), Remembers()], ids=lambda m: m.name
)
def test_each_worker_goes_on_with_all_that_is_its_own(method, tmp_path):
    """Parameters, momentum, statistics of batches and random numbers, bit for bit, from
    between two rounds; in straight training it is saved as well."""

    def begin():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Dropout(),
            torch.nn.Linear(4, 1),
        )
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, paceline.distribute(model, inner, method=method, buckets="ddp")

    def train(model, optimizer, steps):
        for _ in steps:
            optimizer.zero_grad()
            (model(torch.randn(5, 3)) - 1).square().mean().backward()
            optimizer.step()

    def ends(model, optimizer):
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        own = [*model.state_dict().values(), *momentum, torch.rand(2)]
        found = [tensor.double().flatten().tolist() for tensor in own]
        optimizer.finish()
        return found

    def straight(rank):
        model, optimizer = begin()
        torch.manual_seed(10 + rank)
        train(model, optimizer, range(5))
        paceline.save(tmp_path / "x")
        train(model, optimizer, range(5))
        return ends(model, optimizer)

    def resumed(rank):
        model, optimizer = begin()
        paceline.load(tmp_path / "x")
        train(model, optimizer, range(5))
        return ends(model, optimizer)

    expected = simulate(4, straight)
    assert simulate(4, resumed) == expected
    assert all(one != other for one, other in itertools.combinations(expected, 2))


# ---- other numbers of workers ----


def train(rank, method, folder, load=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.distribute(model, inner, method=method, buckets="ddp")
    if load:
        paceline.load(folder)
    else:
        for number in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 3), 0.3 + rank + number)).sum().backward()
            optimizer.step()
        paceline.save(folder)
    return model, optimizer


def test_a_methods_state_is_refused_by_other_workers_unless_it_says_otherwise(tmp_path):
    def save(rank):
        train(rank, Remembers(), tmp_path / "x")[1].finish()

    def load(rank):
        with pytest.raises(UsageError, match=r"holds method.remembers of 2 workers"):
            train(rank, Remembers(), tmp_path / "x", load=True)

    simulate(2, save)
    simulate(3, load)
    simulate(3, lambda rank: train(rank, Shares(), tmp_path / "x", load=True))


def test_other_workers_begin_with_the_one_result_of_local_models(tmp_path):
    def parameters(model):
        return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()

    def save(rank):
        model, optimizer = train(rank, Averages(), tmp_path / "x")
        own = parameters(model)
        with optimizer.consolidated():
            result = parameters(model)
        again = parameters(model)
        optimizer.finish()
        return own, result, again

    def load(rank):
        model, optimizer = train(rank, Averages(), tmp_path / "x", load=True)
        found = parameters(model)
        optimizer.finish()
        return found

    saved = simulate(2, save)
    (first, result, again), (second, other, _) = saved
    assert first == again
    assert first != second
    assert result == other
    assert simulate(2, load) == [first, second]
    assert simulate(3, load) == [result] * 3
    assert simulate(1, load) == [result]
