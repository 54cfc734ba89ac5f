"""A byte-level transformer on the Python standard library's own source text.

torchrun --nproc-per-node 2 examples/bytes_lm.py
paceline simulate examples/bytes_lm.py --workers 4 --link 1gbit
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paceline

CONTEXT = 64


def load_data(megabytes):
    """The first bytes of the standard library's top-level modules, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    limit = int(megabytes * 1e6)
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    data = torch.frombuffer(text[:limit], dtype=torch.uint8).long()
    split = len(data) * 9 // 10
    return data[:split], data[split:]


class ByteModel(nn.Module):
    def __init__(self, width=64, layers=2, heads=4):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        h = self.token(x) + self.place(torch.arange(length))
        return self.head(self.norm(self.blocks(h, mask=mask, is_causal=True)))


def batches(data, size, generator):
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=generator)
        rows = torch.stack([data[s : s + CONTEXT + 1] for s in starts])
        yield rows[:, :-1], rows[:, 1:]


def bits_per_byte(model, data):
    rows = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    rows = rows[:: max(1, len(rows) // 256)]
    with torch.no_grad():
        loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    return loss.item() / math.log(2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32, help="over all workers")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of source text")
    args = parser.parse_args()

    paceline.init()
    torch.manual_seed(0)
    train, test = load_data(args.megabytes)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer := paceline.distribute(model, optimizer),
        max_lr=3e-3,
        total_steps=args.train_steps,
    )
    share = max(1, args.batch // paceline.world_size())
    own = torch.Generator().manual_seed(1 + paceline.rank())
    for step, (x, y) in enumerate(batches(train, share, own), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        paceline.log(loss=loss)
        if step % 50 == 0 or step == args.train_steps:
            with optimizer.consolidated():
                bits = bits_per_byte(model, test)
            paceline.log(bits_per_byte=bits)
            if paceline.rank() == 0:
                print(f"step {step}: {bits:.2f} bits per byte")
        if step == args.train_steps:
            break
    optimizer.finish()


if __name__ == "__main__":
    main()
