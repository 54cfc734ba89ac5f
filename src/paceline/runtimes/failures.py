"""How a job ended badly, in words: the first cause first."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.runtimes.processes import how_it_ended
from paceline.runtimes.real.exit import LOST_PEER

FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where a worker leaves the error that it ends with, as torchrun asks for it, and our own launchers do."""


class _Extra(msgspec.Struct):
    timestamp: str = "0"
    final: str = ""


class _Message(msgspec.Struct):
    message: str = ""
    extraInfo: _Extra = msgspec.field(default_factory=_Extra)  # noqa: N815 - torchrun's


class _Report(msgspec.Struct):
    message: _Message


@dataclass(frozen=True)
class ReportedError:
    """What a failed worker has left: see `ending.report_to_launcher`. *seconds*: since 1970. *final*: the
    same process, started again, would fail alike."""

    message: str = ""
    seconds: float = 0.0
    final: bool = False


def reported(path: Path) -> ReportedError:
    """The error in that file; an empty one, where a worker has left none."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=_Report).message
        extra = report.extraInfo
        return ReportedError(report.message, float(extra.timestamp), bool(extra.final))
    except (OSError, msgspec.MsgspecError, ValueError):
        return ReportedError()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker's bad end: its exit *status* (negative: the signal), when it ended
    (*seconds* since 1970) and the exception that it reported, if it could."""

    rank: int
    process: int
    status: int
    seconds: float
    message: str = ""

    @property
    def by_launcher(self) -> bool:
        """Whether the launcher ended it, because another one had failed."""
        return self.status == -signal.SIGTERM

    def describe(self) -> str:
        """How it ended."""
        if self.by_launcher:
            return "was ended by the launcher"
        how = f"{how_it_ended(self.status)} (process {self.process})"
        return f"{how}: {self.message}" if self.message else how


def summary(failures: Sequence[Failure]) -> str:
    """A line per failed worker. What is a consequence comes after its cause."""

    def order(failure: Failure) -> tuple[bool, bool, float]:
        consequence = any(words in failure.message for words in LOST_PEER)
        return failure.by_launcher, consequence, failure.seconds

    first, *others = sorted(failures, key=order)
    lines = [f"the job failed: rank {first.rank} {first.describe()}"]
    lines += [f"  then rank {one.rank} {_after(one, first)}" for one in others]
    return "\n".join(lines)


def _after(failure: Failure, first: Failure) -> str:
    """How one ended after the *first*, whose words are not said again; nor are gloo's of a peer that is
    gone, which name no cause."""
    how = replace(failure, message="").describe()
    if failure.by_launcher or not failure.message:
        return how
    if failure.message == first.message:
        return f"{how}: the same error"
    if any(words in failure.message for words in LOST_PEER):
        return f"{how}: it had lost a peer"
    return failure.describe()
