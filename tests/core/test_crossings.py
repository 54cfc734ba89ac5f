"""Where loads, saves, clipping, skipped steps and ends of loops meet."""

import pytest
import torch

import paceline
from paceline.testing.problems import Quadratic, centers_of, flat_parameters
from tests.support.training import simulate


def begin(method, clip_norm=None, model=None):
    model = model or Quadratic()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, paceline.distribute(
        model, plain, method=method, buckets="wfbp", clip_norm=clip_norm
    )


def step(model, optimizer, rank, number, seconds=0.0):
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
        model, optimizer = begin("backup:wait_for=2", clip_norm)
        for number in range(1, 5):
            slow = rank == 2 and number != 3
            step(model, optimizer, rank, number, 0.25 if slow else 0.1)
            if number == 2 and how == "load":
                paceline.save(tmp_path / "checkpoint")
        if how == "save":
            paceline.save(tmp_path / "checkpoint")
        else:
            paceline.load(tmp_path / "checkpoint")
        step(model, optimizer, rank, 5)
        optimizer.finish()
        ended.append(rank)

    simulate(3, train, servers)
    assert sorted(ended) == [0, 1, 2]


def test_a_late_worker_waits_for_no_step_that_is_clipped_before_a_load():
    ends = {}

    def train(rank):
        model, optimizer = begin("backup:wait_for=2", 0.5)
        late = rank == 2
        for number in range(1, 2 if late else 8):
            step(model, optimizer, rank, number, 3.5 if late else 1.0)
        model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()})
        for number in range(20, 23 if late else 20):
            step(model, optimizer, rank, number, 3.5)
        optimizer.finish()
        ends[rank] = flat_parameters(model)

    simulate(3, train, 1)
    assert all(torch.equal(end, ends[0]) for end in ends.values())


@pytest.mark.parametrize("method", ["bsp", "asp", "backup", "osp:defer=nothing"])
def test_what_is_loaded_between_backward_and_finish_is_the_result(method):
    def train(rank):
        model, optimizer = begin(method)
        step(model, optimizer, rank, 1)
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
        model, optimizer = begin(method)
        step(model, optimizer, rank, 1)
        optimizer.finish()
        saved = optimizer.state_dict()
        assert len(saved["state"]) == 3
        optimizer.load_state_dict(saved)
        assert len(optimizer.state_dict()["state"]) == 3

    simulate(2, train)


@pytest.mark.parametrize("zeroed", [False, True])
def test_gradients_may_be_cleared_where_the_loop_was_left(zeroed):
    def train(rank):
        model, optimizer = begin("backup")
        model(centers_of(rank, 1)).backward()
        optimizer.zero_grad(set_to_none=not zeroed)
        optimizer.finish()

    simulate(2, train)


def test_buffers_of_a_skipped_step_do_not_outlive_a_load():
    """As where a GradScaler has found an infinity: `step` is not called."""

    def train(rank):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        model, optimizer = begin("bsp", model=model)
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
