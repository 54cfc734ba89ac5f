"""What compression loses against bsp, seed by seed (see `accuracy`).

    python -m benchmarks.measure.compression_accuracy --task digits --seeds 5 --workers 4
    python -m benchmarks.measure.compression_accuracy --task digits --only top-k
    python -m benchmarks.measure.compression_accuracy --no-training

Each compressor with its own settings under bsp, and with settings that send about a tenth of that;
or the least, where none go so far: casts, whole numbers and signs have none. Then some that send more. Start, batches, steps and learning rates are bsp's. First steps that are sent densely are
few here, as trainings are short: `dgc` warms up in a tenth of them, and `gd-top-k` in four epochs of digits' sampler.
`dgc` does the momentum itself, so on digits its SGD has none; on bytes_lm its own is 0.

Controls are to be outside: signs without a scale, and top-k that keeps no residuals.

The second part is of what parameters have moved: means of differences every 16 steps, with a code
and without, so that the loss is that of local updates and of the code, and the difference between
two rows that of the code.

Rows are printed as they are done. Trainings that are done are lines of a file, and are not done
again: remove those of a compressor that has changed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.measure.accuracy import (
    BASE,
    RACKS,
    SEEDS,
    Results,
    Table,
    Training,
    train,
)
from benchmarks.measure.accuracy_tasks import TASKS, Task
from paceline.compression import (
    COMPRESSORS,
    Compressor,
    RankInfo,
    Rounds,
    State,
)
from paceline.compression.base import dense, reals, sum_uncompressed
from paceline.spec import parse

RESULTS = Path(__file__).parents[1] / "results" / "compression_accuracy.jsonl"
BOUND = 0.5
"""Points of accuracy, or per cent of bits: what a default may lose."""
LENGTH = 16
"""Steps from one mean of differences to the next one."""
SOON = 19
"""A tenth of the steps."""
EPOCH = 22
"""Steps of an epoch of digits' sampler, with 4 workers; bytes_lm has none, and takes the same."""
MILD = "outer_learning_rate=0.7,outer_momentum=0.3"


@dataclass(frozen=True, kw_only=True)
class Signs(Compressor):
    """The control: the sum of signs, divided by the number of workers, without a scale."""

    name: ClassVar[str] = "signs"
    linear: ClassVar[bool] = True

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 2.0, 0.0

    def wire_bytes(self, shapes, dtype, workers):
        return dense(shapes, dtype)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        for part in parts:
            part.sign_().div_(place.workers)
        yield from sum_uncompressed(reals(parts), sent)


# ---- rows ----

DEFAULTS = {
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "int4": "int4",
    "qsgd": "qsgd",
    "ef-sign": "ef-sign",
    "top-k": "top-k",
    "dgc": f"dgc:warmup_steps={SOON}",
    "gd-top-k": f"gd-top-k:epoch_steps={EPOCH}",
    "ef21": "ef21",
    "powersgd": "powersgd",
}
TENTHS = {
    "top-k, a tenth": "top-k:density=0.001",
    "dgc, a tenth": f"dgc:warmup_steps={SOON},density=0.0001",
    "ef21, a tenth": "ef21:density=0.001",
    "powersgd, a quarter (rank 1)": "powersgd:rank=1",
}
MORE = {
    "int4 with residuals": "int4:error_feedback=true",
    "top-k, ten times": "top-k:density=0.1",
    "powersgd, four times (rank 16)": "powersgd:rank=16",
}
CONTROLS = {
    "signs without a scale (control)": "signs",
    "top-k without residuals (control)": "top-k:error_feedback=false",
}
OF_DIFFERENCES = {
    f"local-sgd, H = {LENGTH}": f"local-sgd:sync_every={LENGTH}",
    f"sparse-loco, H = {LENGTH}": f"sparse-loco:sync_every={LENGTH}",
    f"diloco, H = {LENGTH}": f"diloco:sync_every={LENGTH},{MILD}",
    f"diloco, H = {LENGTH}, int8": f"diloco:sync_every={LENGTH},{MILD},compression=int8",
    f"diloco, H = {LENGTH}, int4": f"diloco:sync_every={LENGTH},{MILD},compression=int4",
}


def under_bsp(code: str) -> str:
    """The spec of a method with the compression of a spec."""
    told = parse(code)
    keys = {"compression": told.name}
    keys |= {f"compression.{key}": value for key, value in told.values.items()}
    return f"{BASE}:" + ",".join(f"{key}={value}" for key, value in keys.items())


def rows(task: Task) -> dict[str, str]:
    """The spec of each row."""
    codes = DEFAULTS | TENTHS | MORE
    if task.name == "bytes_lm":
        for name, code in codes.items():
            if code.startswith("dgc"):
                codes[name] = f"{code},momentum=0"
    codes |= CONTROLS
    return {name: under_bsp(code) for name, code in codes.items()} | OF_DIFFERENCES


def task_of(training: Training) -> Task:
    """What is trained: without momentum, where the code has it."""
    task = TASKS[training.task]
    if "compression=dgc" in training.spec and training.task == "digits":
        return replace(task, optimizer=plain_sgd)
    return task


def plain_sgd(parameters, rate):
    return torch.optim.SGD(parameters, lr=rate, fused=True)


def figures_of(training: Training) -> dict[str, float]:
    # Registered where it trains: an import of this module leaves the registry as it is.
    COMPRESSORS[Signs.name] = Signs
    return train(training, task_of(training))


# ---- the table ----


def differs(found: dict[str, Any]) -> tuple[str, str]:
    """A row's mean paired difference to bsp with two standard errors, and what it is held to
    be."""
    task, judged = TASKS[found["task"]], found["judged"]
    if found["method"] == BASE:
        return f"{found[judged]:.3f} {judged}", ""
    off, two = found[f"{judged}, difference"], 2 * found[f"{judged}, standard error"]
    worse = off if task.relative else -off
    verdict = "inside"
    if not worse <= BOUND:  # also where it is no number
        verdict = "outside"
    elif worse > two:
        verdict = "worse, within the bound"
    seeds = "" if found["seeds"] == SEEDS else f" ({found['seeds']} seeds)"
    unit = " %" if task.relative else " points"
    return f"{off:+.2f} ± {two:.2f}{unit}{seeds}", verdict


MARKS = {"outside": "**", "worse, within the bound": "*"}


def lines(tables: Sequence[Table], results: Results, seeds: int) -> list[str]:
    """All of them as one: **outside**, *worse, within the bound*."""
    found = [{row["method"]: row for row in t.found(results, seeds)} for t in tables]
    titles = [f"{table.task}, {table.workers} workers" for table in tables]
    made = [f"| {' | '.join(['compression', 'sends', *titles])} |"]
    made.append("|---" * (len(titles) + 2) + "|")
    for name in dict.fromkeys(name for rows in found for name in rows):
        mine = [rows.get(name) for rows in found]
        sent = next(row["sent"] for row in mine if row)
        cells = []
        for row in mine:
            text, verdict = differs(row) if row else ("", "")
            mark = MARKS.get(verdict, "")
            cells.append(f"{mark}{text}{mark}")
        made.append(f"| {' | '.join([name, f'{sent:.1%}', *cells])} |")
    return made


class Page:
    """The table of a task, which is printed as its rows are done."""

    def __init__(self, table: Table, results: Results, seeds: int) -> None:
        self._table, self._results, self._seeds = table, results, seeds
        self._shown: set[str] = set()
        print(f"\n## {table.task}, {table.workers} workers\n")
        print(
            "| compression | sends | difference to bsp ± 2 standard errors | verdict |"
        )
        print("|---|---|---|---|")
        self.show(None)

    def show(self, training: Training | None) -> None:
        """All rows that are complete now, and were not shown."""
        self._print(self._seeds)

    def end(self) -> None:
        """Those that are not, by the seeds that are there."""
        self._print(2)

    def _print(self, least: int) -> None:
        for row in self._table.found(self._results, self._seeds):
            name = row["method"]
            if row["seeds"] >= least and name not in self._shown:
                self._shown.add(name)
                text, verdict = differs(row)
                cells = [name, f"{row['sent']:.1%}", text, verdict]
                print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), help="else both")
    parser.add_argument("--workers", type=int, choices=sorted(RACKS), default=4)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--no-training", action="store_true", help="one table of what is there"
    )
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("--seeds: a standard error needs 2 or more")
    results = Results(given.results)
    tasks = (TASKS[given.task],) if given.task else TASKS.values()
    tables = [Table(task=t.name, workers=given.workers, rows=rows(t)) for t in tasks]
    if given.no_training:
        print("\n".join(lines(tables, results, given.seeds)))
        return
    for table in tables:
        page = Page(table, results, given.seeds)
        wanted = [
            table.training(spec, seed)
            for name, spec in {BASE: BASE, **table.rows}.items()
            if name == BASE or given.only in name
            for seed in range(given.seeds)
        ]
        results.train(wanted, given.processes, figures_of, page.show)
        page.end()


if __name__ == "__main__":
    main()
