"""Accuracy against bsp, seed by seed: what benchmarks of it share.

`papers.osp`, `papers.ds_sync_accuracy`, `local_accuracy` and `compression_accuracy` use it; nothing is run from here.

Of each seed all methods have the same initial model, the same batches and as many steps. A
training is of simulated workers: how fast a network is changes nothing in what methods compute
that ask no clock, so links are so fast that they cost nothing. What is judged is the model
that `finish()` leaves.

A row is inside if its mean paired difference to bsp is within 2 standard errors of 0, and within
0.3 points, or 0.5 % of bsp's bits per byte. Two standard errors of 5 seeds are passed by
chance in one row of nine.

*digits*: the CNN of examples/digits.py with half its channels, batches of 64, 192 steps (9
epochs) of SGD with momentum 0.9, the learning rate falling linearly from 0.1 to 0. One of the
360 test images is 0.28 points. *bytes_lm*: the byte model of examples/bytes_lm.py with one
layer of width 32, batches of 16, 192 steps of AdamW, one cycle up to 0.01. Batches are of all
workers together; learning rates are the same for every method.

Trainings that are done are lines of a file, and are not done again: a run that was interrupted
goes on, and rows can be added. Remove the file when a method has changed.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from benchmarks.measure.accuracy_tasks import TASKS, Task
from paceline.cluster import Cluster, Rack
from paceline.runtimes.simulated import Simulation

RESULTS = Path(__file__).parents[1] / "results" / "accuracy.jsonl"
SEEDS = 5
BASE = "bsp"
RACKS = {4: 2, 16: 4}
"""Workers, and in how many racks they are."""
PATIENCE = 900.0
"""Seconds: a busy machine is no hang."""
FOR_A_PROCESS = 20
"""Trainings: threads of one that has ended stay."""


# ---- one training ----


@dataclass(frozen=True, kw_only=True)
class Training:
    """One of a table: by *workers*, under the method of a *spec*."""

    task: str
    workers: int
    spec: str
    seed: int


def train(training: Training, task: Task | None = None) -> dict[str, float]:
    """The figures of the model that it ends with, of another *task* where one is given; *sent*: bytes, a mean over workers;
    *apart*: how far workers are from their mean in the middle of it, just before a round of local
    updates, as a part of the mean's length."""
    task = task or TASKS[training.task]
    workers = training.workers
    middle = task.steps // 2 - 1
    models: dict[int, torch.Tensor] = {}
    figures: dict[str, float] = {}

    def body(rank):
        torch.manual_seed(training.seed)
        model = task.model()
        optimizer = paceline.distribute(
            model,
            task.optimizer(model.parameters(), task.rate),
            method=training.spec,
            buckets="single",
        )
        schedule = task.schedule(optimizer, task.steps, task.rate)
        own = task.batches(task.batch, training.seed, rank, workers)
        for step in range(1, task.steps + 1):
            x, y = next(own)
            optimizer.zero_grad()
            loss = task.loss(model(x), y)
            loss.backward()
            optimizer.step(loss=loss)
            schedule.step()
            if step == middle:
                models[rank] = nn.utils.parameters_to_vector(model.parameters())
        optimizer.finish()
        if rank == 0:
            figures.update(task.evaluate(model))

    racks = RACKS[workers]
    rack = Rack(workers=workers // racks, link=1e12, uplink=2.5e11, latency=1e-6)
    result = Simulation(Cluster((rack,) * racks), patience=PATIENCE).run(body)
    sent = [sum(s.bytes_sent for s in recorder.steps) for recorder in result.recorders]
    with torch.no_grad():
        every = torch.stack([models[rank].double() for rank in range(workers)])
        mean = every.mean(0)
        apart = (every - mean).square().sum(1).mean().sqrt() / mean.norm()
    return figures | {"sent": statistics.fmean(sent), "apart": apart.item()}


def _in_process(
    work: Callable[[Training], dict[str, float]], training: Training
) -> tuple[Training, dict[str, float] | str]:
    """Its figures, or why there are none."""
    torch.set_num_threads(1)
    try:
        return training, work(training)
    except Exception as error:  # one row's mistake is not to end all others
        return training, f"{type(error).__name__}: {error}"


# ---- many ----


class Results:
    """Figures of trainings, in a file of a line each."""

    def __init__(self, path: Path, kind: type[Any] = Training) -> None:
        """*kind*: what is trained, a frozen dataclass."""
        self._path = path
        self._found: dict[Any, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self._found[kind(**row["training"])] = row["figures"]

    def get(self, training: Training) -> dict[str, float] | None:
        return self._found.get(training)

    def add(self, training: Training, figures: dict[str, float]) -> None:
        self._found[training] = figures
        row = {"training": asdict(training), "figures": figures}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def train(
        self,
        wanted: Iterable[Training],
        processes: int,
        work: Callable[[Training], dict[str, float]] = train,
        done: Callable[[Training], None] = lambda training: None,
    ) -> None:
        """All of *wanted* that are not there. One that fails is named, and left out. *work*
        does one, and *done* is told of each."""
        missing = [one for one in dict.fromkeys(wanted) if one not in self._found]
        if not missing:
            return
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("spawn")
        with context.Pool(processes, maxtasksperchild=FOR_A_PROCESS) as pool:
            found = pool.imap_unordered(partial(_in_process, work), missing)
            for number, (training, figures) in enumerate(found, start=1):
                if isinstance(figures, dict):
                    self.add(training, figures)
                said = figures if isinstance(figures, str) else ""
                print(f"{number}/{len(missing)} {training} {said}", file=sys.stderr)
                done(training)


# ---- tables ----


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows by name, each the spec of a method."""

    task: str
    workers: int
    rows: dict[str, str]

    def trainings(self, seed: int) -> list[Training]:
        return [self.training(spec, seed) for spec in (BASE, *self.rows.values())]

    def training(self, spec: str, seed: int) -> Training:
        return Training(
            task=self.task,
            workers=self.workers,
            spec=spec,
            seed=seed,
        )

    def found(self, results: Results, seeds: int) -> Iterator[dict[str, Any]]:
        """bsp's row, and the others' with their paired differences, from the seeds that are
        there for both; none for a row of fewer than two."""
        task = TASKS[self.task]
        base = [results.get(self.training(BASE, seed)) for seed in range(seeds)]
        for name, spec in {BASE: BASE, **self.rows}.items():
            mine = [results.get(self.training(spec, seed)) for seed in range(seeds)]
            pairs = [(m, b) for m, b in zip(mine, base, strict=True) if m and b]
            if len(pairs) > 1:
                yield row_of(task, name, spec, pairs) | {
                    "task": self.task,
                    "workers": self.workers,
                }


def row_of(task, name, spec, pairs) -> dict[str, Any]:
    """*pairs*: figures of a method and of bsp, seed by seed."""
    row: dict[str, Any] = {"method": name, "spec": spec, "seeds": len(pairs)}
    row["sent"] = statistics.fmean(m["sent"] / b["sent"] for m, b in pairs)
    row["apart"] = statistics.fmean(m["apart"] for m, _ in pairs)
    figures = [figure for figure in pairs[0][0] if figure not in ("sent", "apart")]
    for number, figure in enumerate(figures):
        differences = [m[figure] - b[figure] for m, b in pairs]
        if task.relative:
            mean = statistics.fmean(b[figure] for _, b in pairs)
            differences = [100 * d / mean for d in differences]
        row[figure] = statistics.fmean(m[figure] for m, _ in pairs)
        row[f"{figure}, by seed"] = [m[figure] for m, _ in pairs]
        row[f"{figure}, difference"] = off = statistics.fmean(differences)
        row[f"{figure}, standard error"] = error = standard_error(differences)
        if number == 0:
            row["judged"] = figure
            row["verdict"] = verdict(task, off, error) if spec != BASE else ""
    return row


def standard_error(values):
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def verdict(task, difference, error):
    if math.isnan(difference):
        return ""
    if abs(difference) <= min(2 * error, task.bound):
        return "inside"
    if (difference < 0) == task.relative and difference:
        return "outside, better"
    return "outside, below the bound" if abs(difference) <= task.bound else "outside"


def lines(tables: list[list[dict[str, Any]]]) -> list[str]:
    """All of them as one in Markdown, a column each. *Italic*: worse than bsp by more than 2 standard
    errors or than the bound; **bold**: than both. "sends": bytes over bsp's, in the first
    column that has the row."""
    columns = [rows for rows in tables if rows]
    names = list(dict.fromkeys(row["method"] for rows in columns for row in rows))
    titles = [f"{rows[0]['task']}, {rows[0]['workers']} workers" for rows in columns]
    made = [f"| {' | '.join(['method', 'sends', *titles])} |"]
    made.append("|---" * (len(titles) + 2) + "|")
    for name in names:
        found = [
            next((row for row in rows if row["method"] == name), None)
            for rows in columns
        ]
        sent = next(row["sent"] for row in found if row)
        cells = ["" if row is None else cell(row) for row in found]
        made.append(f"| {' | '.join([name, f'{sent:.1%}', *cells])} |")
    return made


def cell(row: dict[str, Any]) -> str:
    task, judged = TASKS[row["task"]], row["judged"]
    if row["spec"] == BASE:
        return f"{row[judged]:.{3 if task.relative else 2}f}"
    off, error = row[f"{judged}, difference"], row[f"{judged}, standard error"]
    fewer = f" ({row['seeds']} seeds)" if row["seeds"] < SEEDS else ""
    return marked(task, off, error) + fewer


def marked(task: Task, off: float, error: float) -> str:
    """A difference to bsp. *Italic*: worse by more than 2 standard errors or than the bound; **bold**:
    than both."""
    unit = " %" if task.relative else ""
    worse = off if task.relative else -off
    mark = "*" * ((worse > 2 * error) + (worse > task.bound))
    return f"{mark}{off:+.2f} ± {error:.2f}{unit}{mark}"


def draw_means(axes, across, up, *, label, color, **errors) -> None:
    """Dots, and their standard *errors* (``xerr`` or ``yerr``) as bars."""
    axes.errorbar(
        across,
        up,
        label=label,
        color=color,
        marker="o",
        markersize=6,
        linestyle="none",
        capsize=3,
        elinewidth=1.5,
        **errors,
    )


# ---- the command line ----


def run(
    tables: list[Table], draw: Callable[[list[dict[str, Any]], Path], None], about: str
) -> None:
    """Train what is missing, and show it. *draw* makes the picture of all rows."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS))
    parser.add_argument("--workers", type=int, choices=sorted(RACKS))
    parser.add_argument("--row", default="", help="only rows whose spec begins so")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw the picture here")
    parser.add_argument("--no-training", action="store_true", help="show what is there")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("--seeds: a standard error needs 2 or more")
    results = Results(given.results)
    tables = [
        table
        for table in tables
        if given.task in (None, table.task) and given.workers in (None, table.workers)
    ]
    if not given.no_training:
        wanted = [
            training
            for table in tables
            for seed in range(given.seeds)
            for training in table.trainings(seed)
            if training.spec == BASE or training.spec.startswith(given.row)
        ]
        results.train(wanted, given.processes)
    rows = [list(table.found(results, given.seeds)) for table in tables]
    found = [row for table in rows for row in table]
    if not given.json:
        print("\n".join(lines(rows)))
    if given.plot:
        draw(found, given.plot)
    if given.json:
        print(json.dumps(found))
