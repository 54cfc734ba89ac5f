"""What long work is doing, for people who wait at a terminal.

`telling` and `rows` show bars of this process's own work. `status_lines` prints how far the training
is that a launcher waits for: a line every ten seconds, as workers write to the same terminal. All are quiet
under ``--json``, and where standard error is no terminal.
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

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from paceline.runtimes.progress import FILE_VARIABLE, WorkerProgress, read
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.units import show_seconds

Look = Callable[[], WorkerProgress | None]

_EVERY_SECONDS = 10.0


def is_shown(json: bool) -> bool:
    """Whether people look at standard error, and may be shown what moves."""
    return (
        not json and sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
    )


@contextmanager
def status_lines(
    json: bool, doing: str, steps: int | None = None, look: Look | None = None
) -> Iterator[None]:
    """Within it, print on standard error how far what is launched has come. *doing* says what that is
    before its first step; *steps*: how many it has at most, if that is known. *look*: how far it
    is; None: what worker 0 writes."""
    is_launched = FILE_VARIABLE in os.environ  # whoever has launched this prints it
    if not is_shown(json) or (is_launched and look is None):
        yield
        return
    over = threading.Event()
    with scratch_folder() as folder:
        file = Path(folder) / "progress"
        if look is None:
            os.environ[FILE_VARIABLE] = str(file)
        words = (look or partial(read, file), doing, steps, over)
        thread = threading.Thread(target=_print_until, args=words, name="status lines")
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
    while not over.wait(_EVERY_SECONDS):
        progress = look()
        text = doing if progress is None else describe(progress, steps)
        elapsed = timedelta(seconds=int(time.monotonic() - began))
        with suppress(OSError):  # the terminal may be gone
            sys.stderr.write(f"paceline: {text} · {elapsed}\n")
            sys.stderr.flush()


def describe(progress: WorkerProgress, steps: int | None = None) -> str:
    """In one line how far a training is, what a step takes, and by what plan."""
    words = [
        f"step {progress.step}" + f" of {steps}" * bool(steps)
        if progress.step
        else "no step yet"
    ]
    if progress.step_seconds:
        words.append(
            f"{_three(progress.step_seconds)} a step, "
            f"{_three(progress.exposed_seconds)} exposed"
        )
    if progress.method:
        plan = ""
        if progress.deciding:
            plan = ", still deciding"
        elif not progress.settled:
            plan = ", still planning"
        elif progress.buckets:
            plan = f", {progress.buckets} bucket" + "s" * (progress.buckets > 1)
        words.append(progress.method + plan)
    words += [f"{name} {value:.4g}" for name, value in progress.metrics.items()]
    return " · ".join(words)


def _three(seconds: float) -> str:
    return show_seconds(float(f"{seconds:.3g}"))


@dataclass(frozen=True)
class Telling:
    """Shows what long work is doing, on standard error; a bar only where that is known."""

    progress: Progress

    def __call__(
        self, what: str, number: int | None = None, count: int | None = None
    ) -> None:
        """*number* of *count* are done; neither is known of what has no bar."""
        (task,) = self.progress.task_ids
        self.progress.update(
            task, description=what, completed=number or 0, total=count or None
        )

    def say(self, text: str) -> None:
        """A line that stays."""
        self.progress.console.print(Text(text), soft_wrap=True)


@contextmanager
def telling(json: bool, what: str = "", *, prints: bool = False) -> Iterator[Telling]:
    """A `Telling`, within it; at the end nothing of it stays. *prints*: this process prints
    meanwhile, above it."""
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not is_shown(json),
        # Where standard output goes elsewhere, what is printed must go there too.
        redirect_stdout=prints and sys.stdout.isatty(),
        redirect_stderr=prints,
    )
    with progress:
        progress.add_task(what, total=None)
        yield Telling(progress)


class _Now(ProgressColumn):
    """What a task's own function says, asked twice a second."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        now: Callable[[], str] = task.fields["now"]
        return Text("" if task.finished else now(), style="dim", overflow="ellipsis")


@dataclass(frozen=True)
class Rows:
    """A row for each of several things, as they run; they stay until the end."""

    progress: Progress

    def begin(self, what: str, now: Callable[[], str] = str) -> Callable[[], None]:
        """*now* says how far it is. Returns what ends it."""
        task = self.progress.add_task(what, total=1, now=now)
        return lambda: self.progress.update(task, completed=1)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.progress.console.print(Text(text), soft_wrap=True)


@contextmanager
def rows(json: bool) -> Iterator[Rows]:
    """`Rows`, within it."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        _Now(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not is_shown(json)) as progress:
        yield Rows(progress)
