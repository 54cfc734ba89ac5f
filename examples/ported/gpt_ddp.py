"""Train a small GPT on the standard library's source text, in the shape of nanoGPT's train.py."""

import ast
import math
import os
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from gpt_model import GPT, GPTConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

# Every name here is also an option: --batch_size=4
out_dir = "out"
eval_interval = 10
log_interval = 1
eval_iters = 4
always_save_checkpoint = True
init_from = "scratch"  # or "resume"
# data
gradient_accumulation_steps = 4  # micro-batches a step, of all processes together
batch_size = 8
block_size = 64
# model
n_layer = 2
n_head = 2
n_embd = 64
dropout = 0.0
bias = False
# AdamW
learning_rate = 3e-3
max_iters = 20
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.99
grad_clip = 1.0
# the learning rate's schedule
decay_lr = True
warmup_iters = 5
lr_decay_iters = 20
min_lr = 3e-4
# system
backend = "gloo"
device = "cpu"
dtype = "float32"
compile = False
for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    if key not in globals():
        sys.exit(f"unknown option {word}: expected --NAME=VALUE of a name above")
    try:
        globals()[key] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        globals()[key] = value

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        device = f"cuda:{ddp_local_rank}"
        torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset, ddp_world_size = True, 0, 1
tokens_per_iter = gradient_accumulation_steps * ddp_world_size * batch_size * block_size
if master_process:
    print(f"tokens per iteration will be: {tokens_per_iter:,}")
    os.makedirs(out_dir, exist_ok=True)

torch.manual_seed(1337 + seed_offset)
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.autocast(device_type, ptdtype)


def load_text(limit=1_000_000):
    """The first bytes of the standard library's modules, by name."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)[:limit]
    return np.frombuffer(text, dtype=np.uint8)


text = load_text()
data = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def get_batch(split):
    starts = torch.randint(len(data[split]) - block_size - 1, (batch_size,))
    rows = [data[split][i : i + block_size + 1].astype(np.int64) for i in starts]
    rows = torch.from_numpy(np.stack(rows)).to(device)
    return rows[:, :-1], rows[:, 1:]


iter_num = 0
best_val_loss = 1e9
model_args = {
    "n_layer": n_layer,
    "n_head": n_head,
    "n_embd": n_embd,
    "block_size": block_size,
    "bias": bias,
    "dropout": dropout,
}
if init_from == "scratch":
    model = GPT(GPTConfig(**model_args))
else:
    checkpoint = torch.load(
        os.path.join(out_dir, "ckpt.pt"), map_location=device, weights_only=False
    )
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
    best_val_loss = checkpoint["best_val_loss"]
model.to(device)

scaler = torch.amp.GradScaler(device_type, enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
    checkpoint = None  # free its memory
if compile:
    model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank] if "cuda" in device else None)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    """Linear warm-up, then half a cosine, then a constant."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


X, Y = get_batch("train")
t0 = time.time()
raw_model = model.module if ddp else model
while True:
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(
            f"step {iter_num}: train loss {losses['train']:.8f}, "
            f"val loss {losses['val']:.8f}"
        )
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "model_args": model_args,
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                print(f"saving checkpoint to {out_dir}")
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))

    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            # gradients travel in the last micro-batch only
            last = micro_step == gradient_accumulation_steps - 1
            model.require_backward_grad_sync = last
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if iter_num % log_interval == 0 and master_process:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.8f}, time {dt * 1000:.2f}ms")
    iter_num += 1
    if iter_num > max_iters:
        break

if ddp:
    destroy_process_group()
