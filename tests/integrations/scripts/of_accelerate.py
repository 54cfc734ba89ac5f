"""Accelerate, each case under its own DDP or under paceline; see `common`."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F

from paceline.integrations.accelerate import prepare  # isort: skip
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from common import contend, each, loader, net, rivals


class Training:
    """One incarnation of a training."""

    def __init__(self, side, method, seeded=False, **options):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        self.accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seeded),
            **options,
        )
        self.side, self.model = side, net()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        torch.manual_seed(3)
        parts = (self.model, optimizer, loader(), scheduler)
        if side == "ddp":
            made = self.accelerator.prepare(*parts)
        else:
            made = prepare(self.accelerator, *parts, method=method)
        self.wrapped, self.optimizer, self.batches, self.scheduler = made

    def train(self, first=0, last=32, clip=0.0):
        """From one step to another one; an epoch has 16."""
        for epoch in range(first // 16, 2):
            self.batches.set_epoch(epoch)
            done = first % 16 if epoch == first // 16 else 0
            left = skip_first_batches(self.batches, done) if done else self.batches
            for number, (inputs, labels) in enumerate(left, 16 * epoch + done):
                if number == last:
                    return
                with self.accelerator.accumulate(self.wrapped):
                    loss = F.cross_entropy(self.wrapped(inputs), labels)
                    self.accelerator.backward(loss)
                    if clip and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(
                            self.wrapped.parameters(), clip
                        )
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()

    def finish(self):
        if self.side != "ddp":
            self.optimizer.optimizer.finish()


def train(side, method, folder, clip=0.0, breaks_at=None, **options):
    training = Training(side, method, **options)
    if breaks_at is not None:
        training.train(last=breaks_at)
        training.accelerator.save_state(str(folder))
        training.finish()
        training = Training(side, method, **options)
        training.accelerator.load_state(str(folder))
    training.train(breaks_at or 0, clip=clip)
    training.finish()
    return {
        "rank": training.accelerator.process_index,
        "model": training.model,
        "rate": training.optimizer.param_groups[0]["lr"],
    }


def train_rivals(side, method, folder, quiet=False):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    nets = rivals()
    optimizers = (
        torch.optim.SGD(nets[0].parameters(), 0.05, momentum=0.9),
        torch.optim.Adam(nets[1].parameters(), 0.01),
    )
    torch.manual_seed(3)
    batches = accelerator.prepare(loader())
    if side == "ddp":
        first, second, *ours = accelerator.prepare(*nets, *optimizers)
        called = first, second
    else:
        pairs = [
            prepare(accelerator, one, its, method=method)
            for one, its in zip(nets, optimizers, strict=True)
        ]
        called, ours = zip(*pairs, strict=True)
    for _ in range(2):
        for inputs, _labels in batches:
            silent = accelerator.no_sync(called[0]) if quiet else nullcontext()
            contend(inputs, called, ours, accelerator.backward, silent)
    if side != "ddp":
        for one in ours:
            one.optimizer.finish()
    return {"rank": accelerator.process_index, "model": torch.nn.ModuleList(nets)}


CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"clip": 0.3},
    "bf16": {"mixed_precision": "bf16"},
    "seeded": {"seeded": True},
    "resumed": {"seeded": True, "breaks_at": 23},
    "two": {"by": train_rivals, "quiet": True},
    "through": {"by": train_rivals},
}
"""*breaks_at*: after so many steps, in mid-epoch, all is saved, and a new training goes on."""

each(train, CASES)
