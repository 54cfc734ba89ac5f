"""Seconds on one core that codes take for a gradient of ResNet-50's shapes (102 MB), beside
what else could be done with it.

    python benchmarks/compression_encode.py
    python benchmarks/compression_encode.py --only powersgd --times 15

A mean is formed by one worker alone, in one bucket: coded, "sent", and decoded. Each row pairs
it with a yardstick; both take turns, and the ratio is the median of neighbours' ratios. A new
section is a function in `SECTIONS` that yields rows.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from paceline.compression import make
from paceline.interfaces import Gather, Place

sys.path.insert(0, str(Path(__file__).parent / "workloads"))
from models import ResNet50


class Gradient:
    """In one buffer, as a bucket's is; *fill* goes before whatever is timed."""

    def __init__(self) -> None:
        with torch.device("meta"):
            self.shapes = [parameter.shape for parameter in ResNet50().parameters()]
        sizes = [shape.numel() for shape in self.shapes]
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randn(sum(sizes), generator=generator)
        self.buffer = torch.empty_like(self.values)
        pieces = self.buffer.split(sizes)
        self.parts = [p.view(s) for p, s in zip(pieces, self.shapes, strict=True)]

    def fill(self) -> None:
        self.buffer.copy_(self.values)


@dataclass(frozen=True)
class Row:
    """*run* is timed beside *yardstick*."""

    name: str
    run: Callable[[], object]
    yardstick_name: str
    yardstick: Callable[[], object]


def mean_of(spec: str, gradient: Gradient) -> Callable[[], None]:
    """Form the mean of *gradient* as a worker alone, with the compressor that *spec* names."""
    compressor = make(spec).settled()
    names = enumerate(gradient.parts)
    states = [compressor.init(part, str(number), 0) for number, part in names]

    def run() -> None:
        coding = compressor.average(gradient.parts, states, Place(0, 1))
        answer = None
        while True:
            try:
                asked = next(coding) if answer is None else coding.send(answer)
            except StopIteration:
                return
            answer = asked.code
            if isinstance(asked, Gather):
                answer = answer.unsqueeze(0)

    return run


# ---- powersgd: torch's hook, all but its communication ----


def powersgd(gradient: Gradient) -> Iterator[Row]:
    for residuals in (True, False):
        for sides in ("one", "both"):
            spec = f"powersgd:rank=4,sides={sides}"
            spec += "" if residuals else ",residuals=false"
            name = "torch's hook, rank 4" + ("" if residuals else ", no error feedback")
            hook = torch_hook(gradient, 4, residuals)
            yield Row(spec, mean_of(spec, gradient), name, hook)


def torch_hook(gradient: Gradient, rank: int, feedback: bool) -> Callable[[], None]:
    """`powerSGD_hook` itself, on one bucket, where sums are done at once."""
    state = power_sgd.PowerSGDState(
        process_group=SimpleNamespace(size=lambda: 1),
        matrix_approximation_rank=rank,
        start_powerSGD_iter=2,
        use_error_feedback=feedback,
    )
    state.iter = 2
    bucket = SimpleNamespace(
        buffer=lambda: gradient.buffer,
        gradients=lambda: gradient.parts,
        index=lambda: 0,
        is_last=lambda: True,
    )

    def all_reduce(tensor, group, async_op):
        future = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)

    def run() -> None:
        real, power_sgd.dist = power_sgd.dist, SimpleNamespace(all_reduce=all_reduce)
        try:
            power_sgd.powerSGD_hook(state, bucket).wait()
        finally:
            power_sgd.dist = real

    return run


SECTIONS: dict[str, Callable[[Gradient], Iterator[Row]]] = {"powersgd": powersgd}


def timed(run: Callable[[], object], gradient: Gradient) -> float:
    gradient.fill()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured(row: Row, gradient: Gradient, times: int) -> str:
    """A line of the table."""
    pairs = []
    for _ in range(times + 2):
        pairs.append((timed(row.run, gradient), timed(row.yardstick, gradient)))
    pairs = pairs[2:]  # codes that take turns have had theirs, memory is warm
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    cells = f"`{row.name}`", f"{ours:.4f}", row.yardstick_name, f"{theirs:.4f}"
    return "| " + " | ".join([*cells, f"{ratio:.2f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--times", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gradient = Gradient()
    print(
        "| compressor | seconds | yardstick | seconds | ratio |\n|---|---|---|---|---|"
    )
    for name, section in SECTIONS.items():
        if options.only in (None, name):
            for row in section(gradient):
                print(measured(row, gradient, options.times), flush=True)


if __name__ == "__main__":
    main()
