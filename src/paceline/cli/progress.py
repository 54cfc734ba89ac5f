"""What long work of this process is doing, for people who wait at a terminal.

What is launched has `paceline.cli.live`. Both are quiet under ``--json``, and where standard error
is no terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

from paceline.cli.live import is_shown


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
