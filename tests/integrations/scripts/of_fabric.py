"""Fabric, each case under its own DDP or under paceline; see `common`."""

from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from common import die_once, each, loader, net

CASES = {
    "plain": {},
    "accumulation": {"every": 2},
    "clipping": {"clip": 0.3},
    "fp16": {"precision": "16-mixed"},
    "scheduler": {"falls": True},
    "saved": {"save": True, "falls": True},
    "dies": {"dies": True},
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
    strategy = "ddp"
    if side != "ddp":
        from paceline.integrations.fabric import FabricStrategy

        strategy = FabricStrategy(method)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=2, strategy=strategy, **options
    )
    fabric.launch()
    lightning.seed_everything(3, verbose=False)
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
