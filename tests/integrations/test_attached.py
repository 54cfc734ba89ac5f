"""What `attach` makes of a Trainer, with one that stands in: transformers is not needed."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

import paceline
from paceline.integrations import common
from tests.integrations.stand_ins import forget, module
from tests.support.simulations import run


class Trainer:
    """The parts of transformers' that `attach` works on, by their names."""

    is_fsdp_enabled = is_deepspeed_enabled = False

    def __init__(self, model):
        self.model, self.optimizer = model, None
        self.args = SimpleNamespace(max_grad_norm=0.0)
        self.control = SimpleNamespace(should_evaluate=False, should_save=False)
        kind = SimpleNamespace(name="MULTI_CPU")
        self.accelerator = SimpleNamespace(
            distributed_type=kind, num_processes=2, prepare_model=None
        )
        self.evaluated = self.saved = None

    def create_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), 0.1)

    def evaluate(self):
        self.evaluated = self.weights()
        paceline.pace(1.0)

    def predict(self):
        """Not called."""

    save_model = predict

    def _save_checkpoint(self):
        self.saved = self.weights()

    def _maybe_log_save_evaluate(self):
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self._save_checkpoint()

    def _finalize_training(self):
        """Called when training has ended."""

    def weights(self):
        return self.model.weight.detach().tolist()


@pytest.fixture
def attach(monkeypatch):
    """paceline's own."""
    forget(monkeypatch, "transformers", "accelerate")
    module(monkeypatch, "transformers", Trainer=Trainer)
    module(monkeypatch, "accelerate", Accelerator=object)
    names = ("AcceleratorState", "GradientState", "PartialState")
    states = dict.fromkeys((*names, "ThreadLocalSharedDict"), object)
    module(monkeypatch, "accelerate.state", **states)
    monkeypatch.setattr(common, "require", lambda *_: None)
    return importlib.import_module("paceline.integrations.transformers").attach


def test_what_is_saved_is_what_was_evaluated(attach):
    """Also where another worker goes on meanwhile: the best metric is that of the weights."""

    def body(rank):
        torch.manual_seed(0)
        trainer = attach(Trainer(torch.nn.Linear(3, 1)), method="asp")
        optimizer = trainer.create_optimizer()
        for number in range(12):
            optimizer.zero_grad()
            trainer.model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            paceline.pace(0.1)
            due = rank == 0 and number == 3
            trainer.control = SimpleNamespace(should_evaluate=due, should_save=due)
            trainer._maybe_log_save_evaluate()
        trainer._finalize_training()
        return trainer.evaluated, trainer.saved

    (evaluated, saved), others = run(2, body)
    assert others == (None, None)
    assert evaluated is not None
    assert evaluated == saved
