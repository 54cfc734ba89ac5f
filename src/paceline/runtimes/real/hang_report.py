"""Names the rank that the other ranks wait for, if no rank has died.

The liveness thread of each rank regularly checks its script. A rank reports to rank 0's hub if it
has waited for other ranks for `Timeouts.rank_hang`, and has sent nothing meanwhile. The hub then
asks all ranks for their position. Their liveness threads answer, even if their scripts are stuck. A
rank hangs if it does not wait and has sent nothing for as long, or if it does not answer. There is
no report while all ranks are equally slow, as none waits, or while all of them wait, as no rank is
to blame.

Rank 0 prints the rank, its process and its script's stack, once: again only after the rank has
continued. No process is ended: the rank may be compiling, or evaluating alone. This module cannot
see waits of NCCL on a device, since the host continues meanwhile.
"""

from __future__ import annotations

import os
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.collectives import process_groups
from paceline.records import StepRecorder
from paceline.runtimes.python_internals import Frame, file_of, frames_of
from paceline.timeouts import timeouts
from paceline.torch_internals import AUTOGRAD, COLLECTIVES, collectives_begun

LOOKS = 10
"""How often a rank checks itself within `Timeouts.rank_hang`."""
MOST_NAMED = 4
MOST_WAITING = 16
"""The most ranks in a message."""
MOST_FRAMES = 8
PLACE_CHARACTERS, NAME_CHARACTERS = 80, 30
"""The most characters of a frame's parts. With them, all frames in UTF-8 fit into one line of the
hub."""

_WAIT_IN = (file_of(COLLECTIVES), process_groups.__file__)
"""Modules in which a script waits for other ranks."""
_AUTOGRAD_FILE = file_of(AUTOGRAD)
_NOT_THE_SCRIPT = (
    "<",
    f"{Path(__file__).parents[2]}{os.sep}",
    *(
        f"{sysconfig.get_path(name)}{os.sep}"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
)


class Whereabouts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The position of a rank's script.

    Attributes:
        step: The job's current step.
        waits: Whether the script waits for other ranks or for a server.
        still: Seconds without a change, a completed step or a sent message.
        changes: Number of changes so far.
        stack: Frames of a script that does not wait, the innermost one last.
    """

    step: int
    waits: bool = False
    still: float = 0.0
    changes: int = 0
    stack: list[str] = []


class HangWatch:
    """Observes a rank's own script, which runs on the thread that constructs this object.

    *step* returns the number of the script's current step.
    """

    def __init__(self, recorder: StepRecorder, step: Callable[[], int]) -> None:
        self._recorder, self._step = recorder, step
        self._thread = threading.get_ident()
        self._mark: object = None
        self._since = time.monotonic()
        self._changes = 0

    def look(self) -> Whereabouts:
        """Return the script's position. Call this often: it detects changes between two calls."""
        frames = frames_of(self._thread)
        wait = self._wait(frames)
        sent = self._recorder.messages, collectives_begun()
        mark = (self._recorder.step_count, sent, wait)
        now = time.monotonic()
        if mark != self._mark:
            self._mark, self._since = mark, now
            self._changes += 1
        return Whereabouts(
            step=self._step(),
            waits=wait is not None,
            still=now - self._since,
            changes=self._changes,
            stack=[] if wait is not None else stack_of(frames),
        )

    def _wait(self, frames: Sequence[Frame]) -> object:
        """Return a value that identifies the script's present wait; None: it does not wait."""
        blocked = self._recorder.blocked
        own = blocked.get(self._thread)
        if own is not None:
            return own
        for frame in frames:
            if frame.file in _WAIT_IN:
                return frame
        if frames and frames[0].file == _AUTOGRAD_FILE:
            # On a device, hooks run on a thread of autograd, and may wait there.
            return next(iter(list(blocked.values())), None)
        return None


class Hangs:
    """Decides on the hub when to ask the ranks, and which of them hang.

    It has no clock: each call gets *now*, in seconds.
    """

    def __init__(self) -> None:
        self._answers: dict[int, Whereabouts] = {}
        self._until: float | None = None
        """When the current inquiry ends; None: there is none."""
        self._not_before = 0.0
        self._named: dict[int, int | None] = {}
        """By rank that was already reported: its `Whereabouts.changes` at that time."""

    def receive_report(self, rank: int, where: Whereabouts, now: float) -> bool:
        """Handle a report, or an answer. Returns whether the hub must ask all other ranks now."""
        if self._until is not None:
            self._answers[rank] = where
            return False
        waits_long = where.waits and where.still >= timeouts.rank_hang
        if not waits_long or now < self._not_before:
            return False
        self._answers = {rank: where}
        self._until = now + timeouts.hang_answer
        self._not_before = now + timeouts.rank_hang / 3
        return True

    def milliseconds(self, now: float) -> int | None:
        """Return the time until `conclude` is due at the latest; None: there is no inquiry."""
        return (
            None if self._until is None else max(0, int(1000 * (self._until - now)) + 1)
        )

    def is_due(self, present: int, now: float) -> bool:
        """Return whether `conclude` may have a result, if *present* ranks are connected."""
        if self._until is None:
            return False
        return len(self._answers) >= present or now >= self._until

    def conclude(self, present: Mapping[int, str], now: float) -> str:
        """Return the message on the hanging rank, or an empty one.

        It is empty until all ranks in *present* have answered or their time is up. The values of
        *present* are hosts and processes.
        """
        if self._until is None:
            return ""
        silent = present.keys() - self._answers.keys()
        if silent and now < self._until:
            return ""
        self._until = None
        answers = {r: at for r, at in self._answers.items() if r in present}
        # A rank's last message may have arrived after other ranks had begun to wait.
        hang = {
            rank: at.changes
            for rank, at in answers.items()
            if not at.waits and at.still >= timeouts.rank_hang / 2
        }
        found: dict[int, int | None] = hang | dict.fromkeys(silent)
        fresh = [r for r in sorted(found) if found[r] != self._named.get(r, -1)]
        waiting = {rank: at for rank, at in answers.items() if at.waits}
        if not waiting:
            # The waiting ranks have continued meanwhile.
            return ""
        self._named = found
        if not fresh:
            return ""
        lines = [
            self._sentence(rank, present[rank], answers.get(rank), waiting)
            for rank in fresh[:MOST_NAMED]
        ]
        if len(fresh) > MOST_NAMED:
            lines.append(f"paceline: so have {len(fresh) - MOST_NAMED} more ranks")
        return "\n".join(lines)

    @staticmethod
    def _sentence(
        rank: int,
        process: str,
        at: Whereabouts | None,
        waiting: Mapping[int, Whereabouts],
    ) -> str:
        step = max(other.step for other in waiting.values())
        seconds = max(other.still for other in waiting.values())
        ranks = ", ".join(str(other) for other in sorted(waiting)[:MOST_WAITING])
        if len(waiting) > MOST_WAITING:
            ranks += f" and {len(waiting) - MOST_WAITING} more"
        one = len(waiting) == 1
        sentence = (
            f"paceline: rank {rank} {process} has held up step {step} for {seconds:.0f} s; "
            f"rank{'' if one else 's'} {ranks} wait{'s' if one else ''} for it. "
        )
        if at is None:
            return (
                f"{sentence}It does not answer: its process is stopped, or its code holds "
                "the interpreter's lock"
            )
        if not at.stack:
            return f"{sentence}It is in step {at.step}"
        frames = "".join(f"\n    {frame}" for frame in at.stack)
        return f"{sentence}It is in step {at.step}, at {at.stack[-1]}:{frames}"


def stack_of(frames: Sequence[Frame]) -> list[str]:
    """Return the script's own frames as lines, or those of libraries if it has none.

    *frames* begins with the innermost one; in the result it is the last.
    """
    own = [frame for frame in frames if not frame.file.startswith(_NOT_THE_SCRIPT)]
    return [_line_of(frame) for frame in (own or frames)[MOST_FRAMES - 1 :: -1]]


def _line_of(frame: Frame) -> str:
    place = f"{frame.file}:{frame.line}"[-PLACE_CHARACTERS:]
    line = f"{place} in {frame.function[:NAME_CHARACTERS]}"
    return "".join(letter if letter.isprintable() else "?" for letter in line)
