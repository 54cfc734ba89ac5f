"""Fabric, each case under its own DDP or under paceline: of_fabric.py SIDE [METHOD]."""

import sys
import tempfile
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from common import OURS, loader, net, show

CASES = {
    "plain": {},
    "accumulation": {"every": 2},
    "clipping": {"clip": 0.3},
    "fp16": {"precision": "16-mixed"},
    "saved": {"save": True},
}


def train(side, method, every=1, clip=0.0, save=False, **options):
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
    for _ in range(2):
        for number, (inputs, labels) in enumerate(batches):
            due = (number + 1) % every == 0
            with fabric.no_backward_sync(wrapped, enabled=not due):
                fabric.backward(F.cross_entropy(wrapped(inputs), labels) / every)
            if due:
                if clip:
                    fabric.clip_gradients(wrapped, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
        if save:
            folder = fabric.broadcast(tempfile.mkdtemp())
            state = {"model": wrapped, "optimizer": optimizer}
            fabric.save(Path(folder, "saved.ckpt"), state)
            fabric.barrier()
            fabric.load(Path(folder, "saved.ckpt"), state)
    if side != "ddp":
        optimizer.finish()
    return fabric.global_rank, model


side, method = sys.argv[1], (sys.argv[2:] or [OURS])[0]
for case in CASES if len(sys.argv) < 4 else sys.argv[3:]:
    show(case, *train(side, method, **CASES[case]))
