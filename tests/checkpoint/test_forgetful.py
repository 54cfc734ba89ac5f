"""Methods with a state of their own: who forgets to save it breaks the laws of restarts."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.errors import UsageError, WorkerFailedError
from paceline.interfaces import Rhythm, shares_of
from paceline.methods.bsp import BSP
from paceline.network import uniform_cluster
from paceline.testing import Case
from paceline.testing import restarts as laws
from paceline.worlds.virtual import Simulation

from .test_save_load import on

BITS = [laws.state_survives_a_restart, laws.a_checkpoint_is_a_restart]
LAWS = [*BITS, laws.evaluations_change_nothing, laws.evaluations_lose_nothing]


def check(law, method, workers=2):
    case = Case(method=method)
    simulation = Simulation(uniform_cluster(workers, "1gbit", "50us"))
    simulation.run(lambda rank: law(case, "ddp"))


@dataclass(frozen=True, kw_only=True)
class Forgetful(BSP):
    """Sends gradients in steps of 1/8, and keeps the rest of each for the next time."""

    name: ClassVar[str] = "forgetful"

    def init(self, run):
        state = super().init(run)
        state.left = {}
        return state

    def bucket_ready(self, state, run, bucket):
        for name, view in zip(bucket.names, bucket.views, strict=True):
            whole = view + state.left.get(name, 0.0)
            view.copy_(torch.round(8 * whole) / 8)
            state.left[name] = whole - view
        super().bucket_ready(state, run, bucket)


@dataclass(frozen=True, kw_only=True)
class Remembers(Forgetful):
    name: ClassVar[str] = "remembers"

    def save_state(self, state, run):
        return {"left": dict(state.left)}

    def load_state(self, state, run, saved):
        state.left = saved["left"]


@dataclass(frozen=True, kw_only=True)
class ForgetsToLoad(Remembers):
    def load_state(self, state, run, saved):
        pass


@dataclass(frozen=True, kw_only=True)
class Shares(Remembers):
    def redistribute_state(self, state, run, parts):
        return shares_of(parts, run.comm.size)


@dataclass(frozen=True, kw_only=True)
class Averages:
    """Averages parameters after every third step; its result is their average."""

    name: ClassVar[str] = "averages"
    updates_on: ClassVar[str] = "worker"
    gradient_seen_by_user: ClassVar[str] = "local-kept"
    clips: ClassVar[str] = "own"
    rhythm: ClassVar[Rhythm] = Rhythm(every=3)
    consolidates_together: ClassVar[bool] = True

    def init(self, run):
        return None

    def after_update(self, state, run):
        if run.meets:
            self.average(run)

    def average(self, run):
        for parameter in run.parameters:
            run.average(parameter.data).wait()

    def consolidate(self, state, run):
        own = [parameter.data.clone() for parameter in run.parameters]
        for parameter in run.parameters:
            parameter.data.div_(run.comm.size)
            run.comm.all_reduce(parameter.data, "sum").wait()

        def undo():
            for parameter, value in zip(run.parameters, own, strict=True):
                parameter.data.copy_(value)

        return undo

    def finish(self, state, run):
        source = run.keep_company_to_the_end()
        if source is not None:
            run.take_model(source)


@dataclass(frozen=True, kw_only=True)
class CountsRounds(Averages):
    """Every second average is the one that counts, and nobody saves which one is next."""

    def init(self, run):
        return {"rounds": 0}

    def after_update(self, state, run):
        if run.meets:
            state["rounds"] += 1
            if state["rounds"] % 2:
                self.average(run)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("method", [Shares(), Averages()], ids=lambda m: m.name)
def test_who_saves_its_state_keeps_all_laws(law, method):
    check(law, method)


@pytest.mark.parametrize("law", BITS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    "method", [Forgetful(), ForgetsToLoad(), CountsRounds()], ids=lambda m: m.name
)
def test_who_forgets_its_state_breaks_them(law, method):
    with pytest.raises(WorkerFailedError, match="changes the result: by"):
        check(law, method)


# ---- other numbers of workers ----


def train(rank, method, folder, load=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.distribute(model, inner, method=method, fusion="ddp")
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

    on(2, save)
    on(3, load)
    on(3, lambda rank: train(rank, Shares(), tmp_path / "x", load=True))


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

    saved = on(2, save)
    (first, result, again), (second, other, _) = saved
    assert first == again
    assert first != second
    assert result == other
    assert on(2, load) == [first, second]
    assert on(3, load) == [result] * 3
    assert on(1, load) == [result]
