"""A small GPT-like loop: accumulation, clipping, warm-up, weight decay by group."""

import json
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
TEXT = (b"the quick brown fox jumps over the lazy dog; " * 40)[:1600]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x, mask):
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def batch(step, micro):
    data = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + RANK)
    starts = torch.randint(len(data) - 17, (8,), generator=generator)
    rows = torch.stack([data[s : s + 17] for s in starts])
    return rows[:, :-1], rows[:, 1:]


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=3e-3,
    betas=(0.9, 0.95),
)
model = DistributedDataParallel(model)
holder = model if hasattr(model, "no_sync") else optimizer
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
losses = []
for step in range(25):
    total = torch.zeros(())
    for micro in range(2):
        with holder.no_sync() if micro == 0 else nullcontext():
            x, y = batch(step, micro)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
            loss.backward()
            total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    dist.all_reduce(total)
    losses.append(total.item() / dist.get_world_size())
if dist.get_rank() == 0:
    print("losses", json.dumps(losses))
dist.barrier()
dist.destroy_process_group()
