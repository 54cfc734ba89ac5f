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
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks import (
    quantization_hooks as quantization,
)

from paceline.compression import RankInfo, Sum, make
from paceline.compression.base import flat

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


def mean_of(spec: str, gradient: Gradient, workers: int = 1) -> Callable[[], None]:
    """Form the mean of *gradient* with the compressor that *spec* names, as a worker alone; or
    as one of some *workers* whose codes are equal."""
    compressor = make(spec).steady_state()
    names = enumerate(gradient.parts)
    states = [compressor.init_state(part, str(number), 0) for number, part in names]

    def run() -> None:
        coding = compressor.average(gradient.parts, states, RankInfo(0, workers))
        answer = None
        while True:
            try:
                asked = next(coding) if answer is None else coding.send(answer)
            except StopIteration:
                return
            answer = asked.code
            if not isinstance(asked, Sum):
                answer = answer.view(1, -1).expand(workers, -1)

    return run


# ---- powersgd: torch's hook, all but its communication ----


def powersgd(gradient: Gradient) -> Iterator[Row]:
    for residuals in (True, False):
        spec = "powersgd:rank=4" + ("" if residuals else ",error_feedback=false")
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


# ---- codes of every element: a copy, and torch's hooks ----

BUCKET = 25 * 2**20
"""Bytes, as DDP's. A bucket's code has gone when the next one's is made."""
DENSE = ("bf16", "fp16", "int8", "int4", "int8:rounding=stochastic", "qsgd")


def quantisers(gradient: Gradient) -> Iterator[Row]:
    """Codes, beside a copy of the gradient to memory that is there; whole means; and what
    torch's hooks do before they send."""
    copied = torch.empty_like(gradient.values)
    for spec in (*DENSE, "ef-sign:error_feedback=false"):
        run = code_of(spec, gradient)
        yield Row(
            f"{spec} (a code)", run, "a copy", lambda: copied.copy_(gradient.buffer)
        )
    for spec in ("bf16", "int8", "int4", "int8:error_feedback=true"):
        run = mean_of(spec, gradient)
        yield Row(
            f"{spec} (a mean)", run, "a copy", lambda: copied.copy_(gradient.buffer)
        )
    cast, per_block = code_of("bf16", gradient), code_of("int8", gradient)
    yield Row(
        "bf16 (a code)", cast, "bf16_compress_hook's", lambda: torch_cast(gradient)
    )
    yield Row(
        "int8 (a code)",
        per_block,
        "per-tensor hook's",
        lambda: torch_int8(gradient, False),
    )
    yield Row(
        "int8 (a code)",
        per_block,
        "per-channel hook's",
        lambda: torch_int8(gradient, True),
    )


def code_of(spec: str, gradient: Gradient) -> Callable[[], object]:
    """Encode *gradient* as pushes of buckets, with the compressor that *spec* names."""
    compressor = make(spec)
    names = enumerate(gradient.parts)
    states = [compressor.init_state(part, str(number), 0) for number, part in names]
    places = buckets(gradient)

    def run() -> None:
        for place in places:
            compressor.encode(gradient.parts[place], states[place])

    return run


def buckets(gradient: Gradient) -> list[slice]:
    """Which tensors are in which."""
    first, size, found = 0, 0, []
    for number, part in enumerate(gradient.parts):
        size += part.numel() * part.element_size()
        if size >= BUCKET or number == len(gradient.parts) - 1:
            found.append(slice(first, number + 1))
            first, size = number + 1, 0
    return found


def torch_cast(gradient: Gradient) -> None:
    for place in buckets(gradient):
        flat(gradient.parts[place]).to(torch.bfloat16).div_(8)


def torch_int8(gradient: Gradient, per_channel: bool) -> None:
    """What `quantization_hooks` do with their own observers; 512 elements are a channel."""
    for place in buckets(gradient):
        given = flat(gradient.parts[place])
        if per_channel:
            given = torch.nn.functional.pad(given, (0, 512 - given.numel() % 512))
            given, observer = given.view(-1, 512), PerChannelMinMaxObserver()
            quantise = quantization._quantize_per_channel_backend
        else:
            observer = MinMaxObserver()
            quantise = quantization._quantize_per_tensor_backend
        observer(given)
        quantise(given, *observer.calculate_qparams())


# ---- top-k: torch.topk of each tensor ----


def top_k(gradient: Gradient) -> Iterator[Row]:
    """First codes alone, and then whole means with what is kept from step to step."""
    chunks = "top-k:chunk=4096,density=0.015625,error_feedback=false"
    for spec in ("top-k:error_feedback=false", chunks, f"{chunks},bits=2"):
        run = code_of(spec, gradient)
        yield Row(f"{spec} (a code)", run, "torch.topk, 1 %", torch_topk(gradient))
    for spec in ("top-k", "gd-top-k", "dgc:density=0.01", "ef21"):
        run = mean_of(spec, gradient, workers=2)
        yield Row(f"{spec} (a mean)", run, "torch.topk, 1 %", torch_topk(gradient))


def torch_topk(gradient: Gradient) -> Callable[[], object]:
    """Of each matrix's magnitudes; vectors are sent as they are."""
    matrices = [part.view(-1) for part in gradient.parts if part.dim() > 1]
    return lambda: [row.abs().topk(round(row.numel() * 0.01)) for row in matrices]


SECTIONS: dict[str, Callable[[Gradient], Iterator[Row]]] = {
    "powersgd": powersgd,
    "quantisers": quantisers,
    "top-k": top_k,
}


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
