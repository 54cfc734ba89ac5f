"""What `FabricStrategy` holds, on a Fabric that stands in: lightning is not needed."""

from __future__ import annotations

import gc
import importlib
import weakref

import pytest
import torch

from paceline.errors import UsageError
from paceline.integrations import common
from tests.integrations.stand_ins import forget, module


class Strategy:
    """As Fabric's own."""

    world_size = 2


@pytest.fixture
def fabric(monkeypatch):
    """paceline's module; what it trains is not."""
    forget(monkeypatch, "fabric")
    for name in ("", ".fabric", ".fabric.plugins"):
        module(monkeypatch, f"lightning{name}")
    fabric = "lightning.fabric"
    module(monkeypatch, f"{fabric}.strategies", DDPStrategy=Strategy)
    module(monkeypatch, f"{fabric}.strategies.strategy", _BackwardSyncControl=object)
    module(monkeypatch, f"{fabric}.plugins.environments", ClusterEnvironment=object)
    monkeypatch.setattr(common, "require", lambda *_: None)
    made = importlib.import_module("paceline.integrations.fabric")
    monkeypatch.setattr(made, "distribute", lambda model, optimizer, **_: optimizer)
    # Nobody has started workers, whatever ran in this process before.
    monkeypatch.setattr(made.PacelineEnvironment, "detect", staticmethod(lambda: False))
    return made


@pytest.mark.slow
def test_what_the_script_drops_is_not_held(fabric):
    strategy = fabric.FabricStrategy("bsp")
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        strategy.setup_module_and_optimizers(model, [optimizer])
        assert strategy.optimizers_of(model) == [optimizer]
    strategy._require_averaged("weight", models[0].weight)
    died = [weakref.ref(one) for one in (models.pop(0), optimizers.pop(0))]
    del model, optimizer
    gc.collect()
    assert [one() for one in died] == [None, None]
    assert strategy.optimizers_of(models[0]) == optimizers


class Counted(torch.nn.Module):
    """Counts how often somebody goes over its parameters."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))
        self.seen = 0

    def parameters(self, recurse=True):
        for parameter in super().parameters(recurse):
            self.seen += 1
            yield parameter

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_the_guard_looks_at_one_parameter_a_gradient(fabric):
    """At 600 tensors going over all of them took 196 ms a backward pass."""
    strategy, model = fabric.FabricStrategy("bsp"), Counted(20)
    assert strategy.setup_module(model) is model
    optimizer = torch.optim.SGD(model.parameters())
    strategy.setup_module_and_optimizers(model, [optimizer])
    model.seen = 0
    model(torch.ones(1, 2)).backward()
    assert model.layers[0].weight.grad is not None
    assert model.seen == 0


def test_the_guard_refuses_what_nobody_averages(fabric):
    strategy, model = fabric.FabricStrategy("bsp"), Counted(2)
    strategy.setup_module(model)
    with pytest.raises(UsageError, match=r"'layers\.1\..*' has a gradient"):
        model(torch.ones(1, 2)).backward()
    optimizer = torch.optim.SGD(model.parameters())
    strategy.setup_module_and_optimizers(model, [optimizer])
    model(torch.ones(1, 2)).backward()
    other = torch.nn.Linear(2, 2)
    strategy.setup_module_and_optimizers(other, [torch.optim.SGD(other.parameters())])
    model(torch.ones(1, 2)).backward()
    del optimizer
    gc.collect()
    with pytest.raises(UsageError, match=r"'layers\.1\..*' has a gradient"):
        model(torch.ones(1, 2)).backward()
