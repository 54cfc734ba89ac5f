"""`save` and `load`: what is in a checkpoint, what is refused, and trainings that have ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline.core.checkpoint import worker_state
from paceline.core.random_state import random_states
from paceline.errors import UsageError
from tests.core.checkpoint.kill import killed_after
from tests.support import forked
from tests.support.training import simulate


def begin(sampler=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.distribute(model, optimizer, buckets="ddp", sampler=sampler)
    return model, optimizer


class Counter:
    """A stateful of a script's own."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


# ---- killed ----


def test_a_save_that_is_killed_at_any_instant_leaves_a_checkpoint(tmp_path):
    """Every step of `save` in the file system, torch's own among them."""
    folder = tmp_path / "checkpoint"

    def save_with(value):
        model, optimizer = begin()
        with torch.no_grad():
            model.weight.fill_(value)
        paceline.save(folder, counter=Counter(value))
        optimizer.finish()

    def loaded():
        model, optimizer = begin()
        counter = Counter(None)
        paceline.load(folder, counter=counter)
        assert (model.weight == counter.value).all()
        optimizer.finish()
        return counter.value

    steps, seen = 0, []
    while True:
        simulate(1, lambda rank: save_with(1))
        killed = killed_after(
            steps, tmp_path, lambda: simulate(1, lambda rank: save_with(2))
        )
        seen += simulate(1, lambda rank: loaded())
        if not killed:
            break
        steps += 1
    assert steps > 5
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


def test_loading_what_an_interrupted_save_left_is_said(tmp_path, capfd):
    def body(rank):
        _, optimizer = begin()
        paceline.save(tmp_path / "checkpoint")
        if rank == 0:
            (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")
        paceline.load(tmp_path / "checkpoint")
        optimizer.finish()

    simulate(2, body)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("paceline: a save into")
    assert line.endswith("was interrupted: loading " + str(tmp_path / "checkpoint.old"))


# ---- refused ----


@pytest.mark.parametrize("refusing", [0, 1])
def test_what_one_worker_refuses_to_save_all_refuse(refusing, tmp_path, monkeypatch):
    """On rank 0 a script's own state; on another one its random states."""
    folder, broken = tmp_path / "checkpoint", set()

    def states():
        return {"python": object()} if paceline.rank() in broken else random_states()

    monkeypatch.setattr(worker_state, "random_states", states)

    def body(rank):
        _, optimizer = begin()
        counter = Counter(np.float64(rank))
        paceline.save(folder, counter=counter)
        if rank == refusing == 1:
            broken.add(rank)
        elif rank == refusing:
            counter.value = object()
        with pytest.raises(UsageError) as caught:
            paceline.save(folder, counter=counter)
        counter.value = None
        paceline.load(folder, counter=counter)
        optimizer.finish()
        return str(caught.value), counter.value

    said = simulate(2, body)
    assert [value for _, value in said] == [0.0, 0.0]
    assert said[refusing][0].startswith("cannot save ")
    assert said[1 - refusing][0].startswith(
        f"save failed on rank {refusing}: UsageError: cannot save "
    )


def test_a_folder_that_cannot_be_written_is_an_error_on_every_worker(tmp_path):
    (tmp_path / "results").write_text("mine")

    def body(rank):
        _, optimizer = begin()
        with pytest.raises(UsageError, match="results is no checkpoint"):
            paceline.save(tmp_path / "results")
        with pytest.raises(UsageError, match="got 'a/b'"):
            paceline.save(tmp_path / "new", **{"a/b": Counter(1)})
        optimizer.finish()

    simulate(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_a_state_that_does_not_fit_on_one_worker_is_an_error_on_all(tmp_path):
    class Picky(Counter):
        def load_state_dict(self, state):
            if paceline.rank() == 1:
                raise KeyError("mine")

    def body(rank):
        _, optimizer = begin()
        paceline.save(tmp_path / "checkpoint", counter=Counter(1))
        with pytest.raises(
            (KeyError, paceline.PacelineError),
            match=r"mine|on rank 1: KeyError: 'mine'",
        ):
            paceline.load(tmp_path / "checkpoint", counter=Picky(1))
        optimizer.finish()

    simulate(2, body)


# ---- after the training ----


@pytest.mark.parametrize("method", ["bsp", "asp", "osp:collective=native"])
def test_what_is_saved_after_finish_is_what_all_hold(method, tmp_path):
    def train(rank):
        model = torch.nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = paceline.distribute(model, inner, method=method, buckets="ddp")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + rank)).sum().backward()
            optimizer.step()
        optimizer.finish()
        paceline.save(tmp_path / "checkpoint")
        return model.weight.tolist(), inner.state_dict()["state"][0]

    def read(rank):
        model, optimizer = begin()
        paceline.load(tmp_path / "checkpoint")
        optimizer.finish()
        return model.weight.tolist(), optimizer.state_dict()["state"][0]

    (weight, state), (other, _) = simulate(2, train)
    ((found, kept),) = simulate(1, read)
    assert found == weight == other
    assert torch.equal(kept["momentum_buffer"], state["momentum_buffer"])


# ---- samplers ----


def epochs(sampler, passes):
    return [[batch for batch in sampler] for _ in range(passes)]  # noqa: C416


@pytest.mark.parametrize("given", ["to distribute", "among others"])
def test_a_sampler_that_counts_epochs_goes_on_after_a_load(given, tmp_path):
    folder = tmp_path / "checkpoint"

    def sampler_and_others():
        paceline.init()
        sampler = paceline.Sampler(range(24), 8)
        others = {"sampler": sampler} if given == "among others" else {}
        _, optimizer = begin(None if others else sampler)
        return sampler, optimizer, others

    def straight(rank):
        sampler, optimizer, others = sampler_and_others()
        first = epochs(sampler, 2)
        paceline.save(folder, **others)
        rest = epochs(sampler, 2)
        optimizer.finish()
        return first + rest

    def resumed(rank):
        sampler, optimizer, others = sampler_and_others()
        paceline.load(folder, **others)
        rest = epochs(sampler, 2)
        optimizer.finish()
        return rest

    expected = simulate(2, straight)
    assert simulate(2, resumed) == [every[2:] for every in expected]
    assert expected[0][2] != expected[0][0]


def test_a_pass_under_way_is_over_after_a_load(tmp_path):
    def body(rank):
        paceline.init()
        sampler = paceline.Sampler(range(24), 8)
        expected = epochs(sampler, 3)
        begun = paceline.Sampler(range(24), 8)
        epochs(begun, 1)
        next(iter(begun))  # one batch of epoch 1
        state = begun.state_dict()
        fresh = paceline.Sampler(range(24), 8)
        fresh.load_state_dict(state)
        assert epochs(fresh, 1) == [expected[2]]

    simulate(2, body)


def test_an_epoch_that_was_chosen_stays_chosen():
    def body(rank):
        paceline.init()
        sampler = paceline.Sampler(range(24), 8)
        sampler.set_epoch(5)
        fresh = paceline.Sampler(range(24), 8)
        fresh.load_state_dict(sampler.state_dict())
        assert epochs(fresh, 2) == epochs(sampler, 2)

    simulate(2, body)


# ---- what it costs not to be used ----


@pytest.mark.slow
def test_importing_paceline_does_not_import_torchs_checkpoints():
    words = "import sys, paceline; print('torch.distributed.checkpoint' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


SCRIPT = """
import copy, gc, pickle, sys, weakref
import torch, paceline
from paceline.errors import UsageError

folder = sys.argv[1]


def trained(ends=True):
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.BatchNorm1d(1))
    adam = torch.optim.Adam(model.parameters())
    optimizer = paceline.distribute(model, adam, method="bsp:buckets=ddp")
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if ends:
        optimizer.finish()
    return model, optimizer


def zeroed(model):
    with torch.no_grad():
        model[0].weight.zero_()


kept = trained()[:1]  # and so its optimizer
dropped = trained()
died = [weakref.ref(one) for one in (*dropped, dropped[0][0].weight)]
paceline.save(folder + "/before")  # the last one: whoever holds it
present = trained(ends=False)
paceline.save(folder + "/all")
del dropped
gc.disable()  # memory is collected at other moments on other workers
paceline.save(folder + "/some")
assert [one() for one in died] == [None] * 3
models = [kept[0], present[0]]
before = [model[0].weight.detach().clone() for model in models]
for name in ("all", "some"):  # what is gone is asked for by nobody
    for model in models:
        zeroed(model)
    paceline.load(f"{folder}/{name}")
    for model, weight in zip(models, before):
        assert torch.equal(model[0].weight, weight)
average = copy.deepcopy(kept[0])  # has no optimizer
assert pickle.loads(pickle.dumps(average))[0].weight.equal(before[0])
again = trained()
try:
    paceline.load(folder + "/some")
except UsageError as error:
    assert "holds model0, model2, optimizer0, optimizer2, and this job needs" in str(error)
else:
    raise AssertionError("it holds no model3")
del kept, models  # the first one
paceline.save(folder + "/others")
print("all tried")
"""


@pytest.mark.slow
def test_what_has_ended_is_the_script_s_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for end in forked.run_together(2, [script, tmp_path]):
        assert "all tried" in end.stdout
