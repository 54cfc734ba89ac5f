"""Bars and status lines on standard error.

- `progress` shows the progress of this process: a bar on a terminal, else a line every ten seconds.
- `task_rows` shows a row for each of several child processes; without a terminal, a line when each
  begins and ends.
- `status_lines` shows the progress of launched workers: a line every ten seconds on a terminal too, as workers
  also print there.

All are quiet under ``--json``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import rich.progress
from rich.console import Console
from rich.text import Text

from paceline.runtimes.progress import FILE_VARIABLE, WorkerProgress, read
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.units import show_count, show_seconds

Look = Callable[[], WorkerProgress | None]

EVERY_SECONDS = 10.0


def is_shown(json: bool) -> bool:
    """Return whether standard error is a terminal on which bars and lines may move."""
    return (
        not json and sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
    )


@contextmanager
def status_lines(
    json: bool, doing: str, steps: int | None = None, look: Look | None = None
) -> Iterator[None]:
    """While the context is open, print the progress of the launched workers.

    Args:
        json: Whether the command prints JSON: then this prints nothing.
        doing: The activity before the first step.
        steps: The largest number of steps, if it is known.
        look: Returns the workers' progress; None: read it from the file that worker 0 writes.
    """
    is_launched = FILE_VARIABLE in os.environ  # Then the launcher prints the progress.
    if not is_shown(json) or (is_launched and look is None):
        yield
        return
    over = threading.Event()
    with scratch_folder() as folder:
        file = Path(folder) / "progress"
        if look is None:
            os.environ[FILE_VARIABLE] = str(file)
        arguments = (look or partial(read, file), doing, steps, over)
        thread = threading.Thread(target=_print_until, args=arguments)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if look is None:
                del os.environ[FILE_VARIABLE]


def _print_until(
    look: Look, doing: str, steps: int | None, over: threading.Event
) -> None:
    began = time.monotonic()
    while not over.wait(EVERY_SECONDS):
        found = look()
        _print_line(doing if found is None else describe(found, steps), began)


def _print_line(text: str, began: float) -> None:
    elapsed = timedelta(seconds=int(time.monotonic() - began))
    with suppress(OSError):  # The terminal may be closed.
        sys.stderr.write(f"paceline: {text} · {elapsed}\n")
        sys.stderr.flush()


def describe(found: WorkerProgress, steps: int | None = None) -> str:
    """Return a training's progress, step time and buckets in one line."""
    parts = [
        f"step {found.step}" + f" of {steps}" * bool(steps)
        if found.step
        else "no step yet"
    ]
    if found.step_seconds:
        parts.append(
            f"{show_seconds(found.step_seconds)} per step, "
            f"{show_seconds(found.exposed_seconds)} exposed"
        )
    if found.method:
        phase = ""
        if found.phase == "selecting":
            phase = ", choosing a method"
        elif found.phase == "tuning":
            phase = ", planning buckets"
        elif found.buckets:
            phase = f", {show_count(found.buckets, 'bucket')}"
        parts.append(found.method + phase)
    parts += [f"{name} {value:.4g}" for name, value in found.metrics.items()]
    return " · ".join(parts)


class Progress:
    """The current activity of this process; made by `progress`."""

    def __init__(self, bar: rich.progress.Progress, prints_lines: bool) -> None:
        self._bar, self._prints_lines = bar, prints_lines
        self._began = self._printed = time.monotonic()

    def __call__(
        self, what: str, number: int | None = None, count: int | None = None
    ) -> None:
        """Show the activity *what*, of which *number* of *count* are done; no bar if neither is known."""
        if self._prints_lines:
            if time.monotonic() >= self._printed + EVERY_SECONDS:
                part = f" ({number} of {count})" if count else ""
                _print_line(what + part, self._began)
                self._printed = time.monotonic()
            return
        (task,) = self._bar.task_ids
        self._bar.update(
            task, description=what, completed=number or 0, total=count or None
        )

    def report(self, text: str) -> None:
        """Print a permanent line."""
        self._bar.console.print(Text(text), soft_wrap=True)


@contextmanager
def progress(json: bool, what: str = "", *, prints: bool = False) -> Iterator[Progress]:
    """Yield a `Progress`; its bar disappears at the end. *prints*: this process prints meanwhile, above the bar."""
    shown = is_shown(json)
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not shown,
        # If standard output is redirected, printed lines must follow it.
        redirect_stdout=prints and sys.stdout.isatty(),
        redirect_stderr=prints,
    )
    with bar:
        bar.add_task(what, total=None)
        yield Progress(bar, prints_lines=not json and not shown)


class _Now(rich.progress.ProgressColumn):
    """Shows the result of a task's own function, twice a second."""

    max_refresh = 0.5

    def render(self, task: rich.progress.Task) -> Text:
        now: Callable[[], str] = task.fields["now"]
        return Text("" if task.finished else now(), style="dim", overflow="ellipsis")


@dataclass(frozen=True)
class TaskRows:
    """A row for each of several running tasks; rows stay until the end."""

    bars: rich.progress.Progress
    prints_lines: bool
    """Without a terminal: a line when a task begins, and one when it ends."""

    def begin(self, what: str, now: Callable[[], str] = str) -> Callable[[], None]:
        """Add a row; *now* returns its task's progress. Returns a function that ends the row."""
        task = self.bars.add_task(what, total=1, now=now)
        began = time.monotonic()
        if self.prints_lines:
            _print_line(f"{what} begins", began)

        def end() -> None:
            self.bars.update(task, completed=1)
            if self.prints_lines:
                _print_line(f"{what} ended", began)

        return end

    def report(self, text: str) -> None:
        """Print a permanent line."""
        self.bars.console.print(Text(text), soft_wrap=True)


@contextmanager
def task_rows(json: bool) -> Iterator[TaskRows]:
    """Yield `TaskRows`."""
    shown = is_shown(json)
    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.TimeElapsedColumn(),
        _Now(),
    )
    console = Console(file=sys.stderr)
    with rich.progress.Progress(*columns, console=console, disable=not shown) as bars:
        yield TaskRows(bars, prints_lines=not json and not shown)
