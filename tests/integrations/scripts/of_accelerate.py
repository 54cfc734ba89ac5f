"""Accelerate, each case under its own DDP or under paceline: of_accelerate.py SIDE [METHOD]."""

import sys

import torch
import torch.nn.functional as F

from paceline.integrations.accelerate import prepare  # isort: skip
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from common import OURS, loader, net, show

CASES = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"clip": 0.3},
    "bf16": {"mixed_precision": "bf16"},
}


def train(side: str, method: str, clip: float = 0.0, **options: object):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    torch.manual_seed(3)
    parts = (model, optimizer, loader(), scheduler)
    if side == "ddp":
        wrapped, optimizer, batches, scheduler = accelerator.prepare(*parts)
    else:
        wrapped, optimizer, batches, scheduler = prepare(
            accelerator, *parts, method=method
        )
    for _ in range(2):
        for inputs, labels in batches:
            with accelerator.accumulate(wrapped):
                accelerator.backward(F.cross_entropy(wrapped(inputs), labels))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if side != "ddp":
        optimizer.optimizer.finish()
    return accelerator.process_index, model, optimizer.param_groups[0]["lr"]


side, method = sys.argv[1], (sys.argv[2:] or [OURS])[0]
for case in CASES if len(sys.argv) < 4 else sys.argv[3:]:
    rank, model, rate = train(side, method, **CASES[case])
    show(case, rank, model, rate=rate)
