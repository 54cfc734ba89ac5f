"""What people do with a trainer beside training. ``habits.py TRAINER FOLDER``; raises where one fails."""

import copy
import functools
import sys
from pathlib import Path

import pytest
import torch
from common import loader, net

import paceline
from paceline.errors import UsageError

TRAINER, FOLDER = sys.argv[1], Path(sys.argv[2])


def refused(words):
    return pytest.raises(UsageError, match=words)


class Tied(torch.nn.Module):
    """Two layers with one weight, as language models have them."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
        self.outer.weight = self.inner.weight

    def forward(self, x):
        return self.outer(self.inner(x))


def of_accelerate():
    from paceline.integrations.accelerate import prepare  # isort: skip
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = prepare(accelerator, model, optimizer)
    accelerator.backward(model(torch.ones(2, 20)).sum())
    optimizer.step()
    accelerator.save_state(str(FOLDER))
    saved = model.inner.weight.detach().clone()
    average = copy.deepcopy(model)  # trained by nobody
    average(torch.ones(2, 20)).sum().backward()
    with average.no_sync():
        assert torch.equal(average.outer.weight, saved)
    accelerator.backward(model(torch.ones(2, 20)).sum())
    optimizer.step()
    assert not torch.equal(model.inner.weight, saved)
    accelerator.wait_for_everyone()
    accelerator.load_state(str(FOLDER))
    assert torch.equal(model.inner.weight, saved)
    assert model.outer.weight is model.inner.weight


def of_trainer():
    from paceline.integrations.transformers import attach  # isort: skip
    from transformers import Trainer, TrainingArguments

    class Decorated(Trainer):
        @functools.wraps(Trainer.create_optimizer)
        def create_optimizer(self, *arguments, **named):
            return super().create_optimizer(*arguments, **named)

    arguments = TrainingArguments(str(FOLDER), use_cpu=True, report_to=[])
    trainer = Decorated(net(), arguments)
    with refused("leave one of them out"):
        attach(trainer, method="ssp", clip_norm=1.0)
    attach(trainer, method="ssp", clip_norm=None)
    with refused("attached before"):
        attach(trainer)


def of_fabric():
    import lightning

    from paceline.integrations.fabric import FabricStrategy

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy())
    fabric.launch()
    own = fabric.setup_dataloaders(loader(), use_distributed_sampler=False)
    shared = fabric.setup_dataloaders(loader())
    assert (len(own), len(shared)) == (32, 16)
    alone = fabric.setup(net())
    with torch.no_grad():
        alone(torch.ones(2, 20))
    with refused("is not averaged: its model was set up without an optimizer"):
        fabric.backward(alone(torch.ones(2, 20)).sum())
    model = net()
    fabric.setup(model)
    trained, optimizer = fabric.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    fabric.backward(trained(torch.ones(2, 20)).sum())
    optimizer.step()
    optimizer.finish()


{"accelerate": of_accelerate, "trainer": of_trainer, "fabric": of_fabric}[TRAINER]()
sys.stdout.write(f"\nall tried by worker {paceline.rank()}\n")
sys.stdout.flush()
