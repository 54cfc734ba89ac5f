"""Fabric, each case under its own DDP or under paceline; see `common`."""

from contextlib import nullcontext
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from common import contend, die_once, each, loader, net, rivals


def launched(side, method, theirs="ddp", **options):
    strategy = theirs
    if side != "ddp":
        from paceline.integrations.fabric import FabricStrategy

        strategy = FabricStrategy(method)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=2, strategy=strategy, **options
    )
    fabric.launch()
    lightning.seed_everything(3, verbose=False)
    return fabric


class Both(torch.nn.ModuleList):
    """Two nets in one module, of which one is called."""

    def forward(self, number, inputs):
        return self[number](inputs)


def train_rivals(side, method, folder, quiet=False, joint=False):
    """Set up one by one or, *joint*, as one module with two optimizers."""
    fabric = launched(side, method, "ddp_find_unused_parameters_true")
    nets = rivals()
    optimizers = (
        torch.optim.SGD(nets[0].parameters(), 0.05, momentum=0.9),
        torch.optim.Adam(nets[1].parameters(), 0.01),
    )
    batches = fabric.setup_dataloaders(loader())
    if joint:
        whole, *ours = fabric.setup(Both(nets), *optimizers)
        called = [lambda x, number=number: whole(number, x) for number in (0, 1)]
    else:
        pairs = [
            fabric.setup(one, its) for one, its in zip(nets, optimizers, strict=True)
        ]
        called, ours = zip(*pairs, strict=True)
    for _ in range(2):
        for inputs, _labels in batches:
            silent = fabric.no_backward_sync(called[0]) if quiet else nullcontext()
            contend(inputs, called, ours, fabric.backward, silent)
    if side != "ddp":
        for one in ours:
            one.finish()
    return {"rank": fabric.global_rank, "model": torch.nn.ModuleList(nets)}


CASES = {
    "plain": {},
    "accumulation": {"every": 2},
    "clipping": {"clip": 0.3},
    "fp16": {"precision": "16-mixed"},
    "scheduler": {"falls": True},
    "saved": {"save": True, "falls": True},
    "dies": {"dies": True},
    "two": {"by": train_rivals, "quiet": True},
    "through": {"by": train_rivals},
    "joint": {"by": train_rivals, "joint": True},
}


def train(
    side,
    method,
    folder,
    every=1,
    clip=0.0,
    save=False,
    falls=False,
    dies=False,
    **options,
):
    fabric = launched(side, method, **options)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    batches = fabric.setup_dataloaders(loader())
    wrapped, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    for _ in range(2):
        for number, (inputs, labels) in enumerate(batches):
            due = (number + 1) % every == 0
            if dies:
                die_once(number)
            with fabric.no_backward_sync(wrapped, enabled=not due):
                fabric.backward(F.cross_entropy(wrapped(inputs), labels) / every)
            if due:
                if clip:
                    fabric.clip_gradients(wrapped, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
                if falls:
                    scheduler.step()
        if save:
            state = {"model": wrapped, "optimizer": optimizer, "scheduler": scheduler}
            fabric.save(Path(folder, "saved.ckpt"), state)
            fabric.barrier()
            fabric.load(Path(folder, "saved.ckpt"), state)
    if side != "ddp":
        optimizer.finish()
    said = {"rate": optimizer.param_groups[0]["lr"]}
    if dies:
        said = {"first_step": optimizer.optimizer.first_step}
    return {"rank": fabric.global_rank, "model": model, **said}


each(train, CASES)
