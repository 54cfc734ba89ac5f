"""Jobs of emulated hosts or processes of this machine, and sides that take turns in them.

Where sides are trained one after the other, whatever else the machine does then is part of the
difference. So all live in one job and take turns in short blocks of steps; a ratio pairs
neighbouring blocks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline

ROOT = Path(__file__).resolve().parents[2]

# ---- jobs ----


def on_emulated_hosts(
    cluster: Any, function: Callable[..., Any], *arguments: Any
) -> Any:
    """What *function* returns on worker 0, called by every host of an emulated *cluster*.

    Args:
        cluster: The network, a `paceline.cluster.Cluster`.
        function: Of a module's top level. `paceline.init` was called before.
        arguments: JSON values, as what it returns.
    """
    from paceline.run_options import ScriptJob
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork

    with tempfile.TemporaryDirectory() as folder, EmulatedNetwork(cluster) as network:
        output = Path(folder) / "found.json"
        job = ScriptJob(__file__, words_for(function, arguments, output))
        if EmulatedJob(job, network).run():
            sys.exit("the job failed")
        return json.loads(output.read_text())


def on_processes(count: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """The same on *count* processes of this machine, started by torchrun, joined by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={count}", __file__]
        command += words_for(function, arguments, output)
        if subprocess.run(command, check=False).returncode:
            sys.exit("the job failed")
        return json.loads(output.read_text())


def words_for(
    function: Callable[..., Any], arguments: tuple[Any, ...], output: Path
) -> list[str]:
    module = function.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name
    return [f"{module}:{function.__qualname__}", json.dumps(arguments), str(output)]


def work(name: str, arguments: str, output: str) -> None:
    """One worker of a job."""
    # Python puts this file's own folder first, and the package is not found from there.
    sys.path[0] = str(ROOT)
    function = pkgutil.resolve_name(name)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
    paceline.init()
    found = function(*json.loads(arguments))
    if paceline.rank() == 0:
        Path(output).write_text(json.dumps(found))


# ---- sides ----

SETTLING_STEPS = 45
"""In so many ``buckets="optimal"`` has measured, planned, tried its plan, and kept it or not."""


class Side:
    """A way to train, timed in blocks of steps.

    Args:
        name: Of the side.
        make: Makes the model, and a function of the model that gives its loss.
        wrap: Makes of the model and its optimizer those that are trained.
        settling: Steps before those that count.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], tuple[torch.nn.Module, Callable[[Any], torch.Tensor]]],
        wrap: Callable[[Any, Any], tuple[Any, Any]],
        settling: int = 0,
    ) -> None:
        self.name, self.settling = name, settling
        torch.manual_seed(0)
        model, self.loss = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.model, self.optimizer = wrap(model, optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.optimizer.step()

    def block(self, steps: int) -> float:
        """Seconds a step of this rank, from barrier to barrier."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        dist.barrier()
        return (time.perf_counter() - start) / steps


def take_turns(
    sides: list[Side], rounds: int, steps: int, settle: bool = True
) -> dict[str, list[float]]:
    """Seconds a step of each side, round by round; each round begins with another side."""
    for side in sides:
        if settle and side.settling:
            side.block(side.settling)
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(rounds):
        first = turn % len(sides)
        for side in sides[first:] + sides[:first]:
            times[side.name].append(side.block(steps))
    return times


def finish(sides: Iterable[Side]) -> None:
    """The end of those that paceline trains."""
    for side in sides:
        if isinstance(side.optimizer, paceline.DistributedOptimizer):
            side.optimizer.finish()


def alone(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Without synchronization."""
    return model, optimizer


def ddp(cap: float | None = None) -> Callable[[Any, Any], tuple[Any, Any]]:
    """PyTorch DDP with buckets of *cap* MiB (None: its default)."""

    def wrap(model: Any, optimizer: Any) -> tuple[Any, Any]:
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=cap, gradient_as_bucket_view=True
        )
        return wrapped, optimizer

    return wrap


def ours(**options: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """paceline with these arguments of `distribute`."""

    def wrap(model: Any, optimizer: Any) -> tuple[Any, Any]:
        return model, paceline.distribute(model, optimizer, **options)

    return wrap


def example(name: str) -> ModuleType:
    """A script of ``examples/`` as a module."""
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    work(*sys.argv[1:])
