"""The automatic plan against DDP's bucket rule over loopback, 4 processes, in one job.

    python -m benchmarks.measure.planned_buckets
    python -m benchmarks.measure.planned_buckets --model digits --pairs 100

Both sides are paceline: ``buckets="optimal"`` once it has settled (it keeps DDP's rule where
a trial says that this is faster) and ``buckets="ddp"``. Sides take turns as in
``ddp_over_loopback.py``, whose pairing and bounds these are.
"""

import argparse

import torch
import torch.nn.functional as F

from benchmarks.measure import ddp_over_loopback, stored
from benchmarks.measure.harness import SETTLING_STEPS, example, on_processes, ours


def make_bytes_lm():
    module = example("bytes_lm")
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, module.CONTEXT + 1))

    def loss(model):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return module.ByteModel(), loss


def make_many():
    """100 tensors: 50 linear layers."""
    layers = [torch.nn.Linear(96, 96) for _ in range(50)]
    x = torch.randn(32, 96)
    return torch.nn.Sequential(*layers), lambda model: model(x).square().mean()


MODELS = {
    "digits": ddp_over_loopback.make_digits,
    "bytes_lm": make_bytes_lm,
    "many": make_many,
}


def measure(name, pairs, steps):
    return ddp_over_loopback.compare(
        f"{name}, automatic plan against DDP's rule",
        MODELS[name],
        ours(buckets="optimal"),
        ours(buckets="ddp"),
        pairs,
        steps,
        warm_up=SETTLING_STEPS,
        noise="DDP's rule / itself",
    )


TITLES = {"digits": "digits", "bytes_lm": "a byte model", "many": "100 tensors"}


def table():
    """Rows of the table of docs: what, figure, command."""
    figures = stored.Figures("planned_buckets")
    texts = []
    for name in MODELS:
        ratio, bound = (
            figures.text(f"{name}, 4 processes, {what}") for what in ("ratio", "bound")
        )
        texts.append(f"{ratio} ({bound})")
    yield [
        "step with the automatic bucket plan over step with DDP's bucket rule, 4 processes: "
        + "; ".join(TITLES.values()),
        "; ".join(texts),
        "`python -m benchmarks.measure.planned_buckets`",
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--steps", type=int, default=8, help="steps a block")
    stored.add_option(parser)
    args = parser.parse_args()
    with stored.Store("planned_buckets", args.store) as store:
        for name in args.model or MODELS:
            found = on_processes(args.workers, measure, name, args.pairs, args.steps)
            ddp_over_loopback.keep(store, f"{name}, {args.workers} processes", found)


if __name__ == "__main__":
    main()
