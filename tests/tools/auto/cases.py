"""Trainings that change their method, case by case; each runs on all workers of any runtime."""

import os
import random
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.core.checkpoint.folder import part
from paceline.errors import UsageError
from paceline.methods import METHODS
from paceline.methods.bsp import BSP
from paceline.runtimes.join import join_runtime
from paceline.testing import inspect
from paceline.tools.auto.config import AutoConfig
from paceline.tools.auto.method_switching import SwitchableTraining
from tests.support.training import inputs, network, sgd


class Scripted:
    """A controller whose decisions are known: specs, by the step after which they begin. *refused* has
    those that could not be begun, and why."""

    steady = True

    def __init__(self, specs, meets=False):
        self.specs, self.refused, self.meets_before_change = specs, [], meets

    def run(self):
        step = 0
        while True:
            step += 1
            spec = self.specs.get(step)
            why = yield spec
            if why:
                self.refused.append((spec, why))


def follows(scripted):
    return SwitchableTraining(AutoConfig(consistency="local"), scripted)


def changing(specs, meets=False):
    return follows(Scripted(specs, meets))


def one_step(model, optimizer, step):
    optimizer.zero_grad()
    model(inputs(paceline.rank(), step)).square().mean().backward()
    optimizer.step()


def trained(method, steps, optimizer=sgd, model=network, **options):
    """The parameters at the end; *steps*: of each worker, or for each rank."""
    net = model()
    options.setdefault("buckets", "ddp")
    wrapped = paceline.distribute(
        net, optimizer(net.parameters()), method=method, **options
    )
    mine = steps if isinstance(steps, int) else steps[paceline.rank()]
    for step in range(mine):
        one_step(net, wrapped, step)
    wrapped.finish()
    return flat(net)


def flat(net):
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def assert_equal_everywhere(mine):
    everyone = [torch.empty_like(mine) for _ in range(paceline.world_size())]
    dist.all_gather(everyone, mine)
    for other in everyone:
        assert torch.equal(mine, other)


EXACT = (
    *("bsp", "bsp:buckets=wfbp", "bsp:overlap=false", "bsp:collective=tree"),
    *("bsp:collective=parameter-server", "dear", "priority"),
    *("osp:collective=native,defer=nothing", "osp:defer=nothing"),
)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def normalized():
    torch.manual_seed(3)
    # Without a bias before it: its gradient would be rounding, which Adam makes steps of.
    layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 2))


def exact_methods_in_any_turn_are_bsp():
    """Also where models have running means, and optimizers moments."""
    chance = random.Random(7)
    for model, optimizer in ((network, sgd), (normalized, adam)):
        specs = {step: chance.choice(EXACT) for step in chance.sample(range(1, 12), 6)}
        scripted = Scripted(specs)
        usual = trained("bsp", 12, optimizer, model)
        found = trained(follows(scripted), 12, optimizer, model)
        assert not scripted.refused
        assert_equal_everywhere(found)
        assert torch.allclose(found, usual, rtol=1e-4, atol=1e-6), specs


def a_worker_without_data_keeps_company_through_changes():
    steps = [5, 9, 7]
    specs = {
        3: "dear",
        6: "bsp:collective=tree",
        8: "osp:collective=native,defer=nothing",
    }
    usual, found = trained("bsp", steps), trained(changing(specs), steps)
    assert_equal_everywhere(found)
    assert torch.allclose(found, usual, rtol=1e-5, atol=1e-6)
    steps.reverse()
    trained(changing({2: "local-sgd:sync_every=3", 6: "osp", 8: "bsp"}), steps)


@dataclass(frozen=True, kw_only=True)
class FailsOnOne(BSP):
    name = "fails-on-one"

    def start(self, run):
        if run.comm.rank == run.comm.size - 1:
            raise UsageError("not here")
        return super().start(run)


@dataclass(frozen=True, kw_only=True)
class FailsEverywhere(BSP):
    name = "fails-everywhere"

    def start(self, run):
        raise UsageError("nor here")


@contextmanager
def registered(*classes):
    """In virtual time all workers share the registry."""
    METHODS.update({cls.name: cls for cls in classes})
    yield
    dist.barrier()
    for cls in classes:
        METHODS.pop(cls.name, None)


def a_change_to_what_cannot_be_is_refused_on_all_workers():
    impossible = {
        2: ("bps", "unknown method 'bps'"),
        3: ("asp", "asynchronous"),
        4: ("bsp:compression=dgc", "momentum"),
        5: ("dear:compression=bf16", "two halves"),
        6: ("osp:servers=nowhere", "expected auto"),
        7: ("fails-on-one", "not here"),
        9: ("fails-everywhere", "nor here"),
    }
    scripted = Scripted({step: spec for step, (spec, _) in impossible.items()})
    with registered(FailsOnOne, FailsEverywhere):
        usual, found = trained("bsp", 11), trained(follows(scripted), 11)
    assert torch.equal(found, usual)
    assert len(scripted.refused) == len(impossible), scripted.refused
    for (spec, why), (wanted, words) in zip(
        scripted.refused, impossible.values(), strict=True
    ):
        assert spec == wanted
        assert words in why


def begun(method, optimizer=sgd, **options):
    net = network()
    plain = optimizer(net.parameters())
    return net, paceline.distribute(net, plain, method=method, buckets="ddp", **options)


def a_checkpoint_says_which_method_it_had():
    """And what only that method keeps is taken by it, also where it is not the present one."""
    code = "bsp:compression=top-k,compression.density=0.25,compression.small=0"
    folder = Path(os.environ["PACELINE_TEST_FOLDER"]) / "under-auto"
    runtime = join_runtime()
    for spec in (code, "local-sgd:sync_every=3"):
        runtime.registry.trainings.clear()
        net, straight = begun(changing({3: spec}))
        for step in range(5):
            one_step(net, straight, step)
        paceline.save(folder)
        for step in range(5, 9):
            one_step(net, straight, step)
        straight.finish()
        ends = flat(net)
        for method in (spec, changing({1: "dear"}), changing({})):
            runtime.registry.trainings.clear()
            net, wrapped = begun(method)
            if method != spec:
                one_step(net, wrapped, 50)
            paceline.load(folder)
            changes = inspect(wrapped).switcher
            if changes is not None:
                assert changes.spec.startswith(
                    "dear" if method.controller.specs else "bsp"
                )
                assert not changes.switch_to(spec)
            for step in range(5, 9):
                one_step(net, wrapped, step)
            wrapped.finish()
            exactly = method == spec or spec == code
            assert torch.allclose(flat(net), ends, atol=0 if exactly else 0.05), method
            assert_equal_everywhere(flat(net))
    runtime.registry.trainings.clear()


def a_load_that_is_refused_leaves_the_method_that_it_found():
    """Also where the method had to be changed to see that the checkpoint is not whole."""
    code = "bsp:compression=top-k,compression.density=0.25,compression.small=0"
    folder = Path(os.environ["PACELINE_TEST_FOLDER"]) / "not-whole"
    runtime = join_runtime()
    net, wrapped = begun(changing({1: code, 4: "bsp"}))
    for step in range(3):
        one_step(net, wrapped, step)
    paceline.save(folder)
    for step in range(3, 6):
        one_step(net, wrapped, step)
    changes = inspect(wrapped).switcher
    before, values = changes.spec, flat(net)
    dist.barrier()
    if runtime.rank == 0:
        part(folder, runtime.size - 1).rename(folder / "elsewhere")
    dist.barrier()
    with pytest.raises(UsageError, match=f"worker {runtime.size - 1}"):
        paceline.load(folder)
    assert changes.spec == before, changes.spec
    assert torch.equal(flat(net), values)
    one_step(net, wrapped, 6)
    wrapped.finish()
    assert_equal_everywhere(flat(net))
    runtime.registry.trainings.clear()


def buckets_that_were_planned_are_known_when_a_method_comes_back():
    net, wrapped = begun(changing({60: "dear", 62: "bsp:buckets=optimal", 66: "bsp"}))
    changes, recorder = inspect(wrapped).switcher, join_runtime().recorder
    assert not changes.switch_to("bsp:buckets=optimal", together=True)
    for step in range(60):
        one_step(net, wrapped, step)
    planned = recorder.buckets
    assert changes.spec.startswith("dear")
    assert inspect(wrapped).tuner.adopted is None
    for step in range(5):
        one_step(net, wrapped, step)
    assert recorder.buckets == planned
    assert recorder.tuned_after
    wrapped.finish()


class Linear(nn.Module):
    """Gradients are what it is given: they do not depend on the parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))
        self.more = nn.Parameter(torch.zeros(24))

    def forward(self, given):
        return (self.weight * given[:40]).sum() + (self.more * given[40:]).sum()


def given(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(64, generator=generator)


def applied(specs, steps):
    """What was applied of all mean gradients, and what codes keep; the steps of training."""
    net = Linear()
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    wrapped = paceline.distribute(net, plain, method=changing(specs), buckets="ddp")
    for step in range(steps):
        wrapped.zero_grad()
        net(given(paceline.rank(), step)).backward()
        wrapped.step()
    kept = residuals(wrapped)
    wrapped.finish()
    return -flat(net), kept


def residuals(wrapped):
    """What this worker's codes have not sent."""
    found = torch.zeros(64)
    for state in inspect(wrapped).worker_states:
        if state.name.startswith("compression."):
            saved = state.save()
            found += torch.cat([saved[n]["residual"] for n in ("weight", "more")])
    return found


def sum_of_means(steps):
    n = paceline.world_size()
    return sum(given(rank, step) for step in range(steps) for rank in range(n)) / n


def no_gradient_is_lost_or_applied_twice():
    late = "osp:collective=native,defer=most,budget=constant,most=0.5,chunk=16"
    on_servers = late.replace("collective=native,", "")
    chance = random.Random(11)
    for _ in range(2):
        turns = chance.sample([late, on_servers, "bsp", "priority", late], 5)
        at = sorted(chance.sample(range(1, 15), 5))
        found, kept = applied(dict(zip(at, turns, strict=True)), 16)
        assert torch.allclose(found, sum_of_means(16), atol=1e-4), (at, turns)
        assert not kept.any()


def what_a_code_keeps_waits_until_it_is_used_again():
    code = "bsp:compression=top-k,compression.density=0.25,compression.small=0"
    found, kept = applied({2: code, 6: "dear", 9: code}, 12)
    dist.all_reduce(kept)
    assert kept.abs().max() > 0.1
    assert torch.allclose(found + kept, sum_of_means(12), atol=1e-4)
    # The control: without the second turn what is kept of the first one is in no model.
    lost, kept = applied({2: code, 6: "dear"}, 12)
    assert not kept.any()
    assert not torch.allclose(lost, sum_of_means(12), atol=1e-2)


CASES = {
    case.__name__: case
    for case in (
        exact_methods_in_any_turn_are_bsp,
        a_worker_without_data_keeps_company_through_changes,
        a_change_to_what_cannot_be_is_refused_on_all_workers,
        no_gradient_is_lost_or_applied_twice,
        what_a_code_keeps_waits_until_it_is_used_again,
        a_checkpoint_says_which_method_it_had,
        a_load_that_is_refused_leaves_the_method_that_it_found,
        buckets_that_were_planned_are_known_when_a_method_comes_back,
    )
}
