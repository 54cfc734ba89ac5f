"""The worker's half of methods whose groups have a server each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.interfaces import Bucket, Groups, ServerRun
from paceline.methods.group_members import read_members
from paceline.methods.gssp.group_assignment import (
    Report,
    read_groups,
    read_news,
    written,
)
from paceline.methods.push_pull import PushPull, PushPullWorker


@dataclass(frozen=True, kw_only=True)
class InGroups(PushPull):
    """Pushes to its group's server, and pulls from it; to another one when it is told that its
    group has changed. *members*: groups by hand, as ``0-3+4-7``."""

    members: str = ""

    def groups(self, workers: int) -> Groups:
        return read_members(self.members, workers)

    def start(self, run: ServerRun) -> GroupWorker:
        return GroupWorker(run, self)


class GroupWorker(PushPullWorker):
    """One worker of such a method."""

    def __init__(self, run: ServerRun, method: InGroups) -> None:
        """Collective."""
        super().__init__(run, method)
        self.version, self.words = 0, b""
        """Of the groups that this worker was told last: it tells them to its server, which may
        have been away."""
        self.steps_of_all = 0.0
        """How many there are in this worker's model, counted in gradients divided by workers."""
        self._hear()

    def after_update(self) -> None:
        super().after_update()
        self._hear()

    def _report(self, bucket: Bucket) -> bytes:
        """With the first bucket."""
        if bucket.index:
            return b""
        return written(Report(self.words, self.steps_of_all))

    def _hear(self) -> None:
        """What the server has told of groups."""
        remote = self.run.remote
        for told in remote.told(0):
            if not told.words:
                continue
            news = read_news(told.words)
            self.steps_of_all = max(self.steps_of_all, news.steps)
            groups = read_groups(news.groups) if news.groups else None
            if groups is None or groups.version <= self.version:
                continue
            self.version, self.words = groups.version, news.groups
            mine = groups.of[self.run.comm.rank]
            if mine != remote.group:
                remote.move(mine, self.step)
            if groups.speeds:
                remote.has_speed(groups.speeds[mine])
            self._groups_changed(groups)

    def _groups_changed(self, groups: Groups) -> None:
        """This worker was told of other groups, or of other speeds."""

    def metrics(self) -> dict[str, float]:
        """*group*: this worker's."""
        return {"group": self.run.remote.group}

    # ---- what a checkpoint holds ----

    def save_state(self) -> dict[str, Any]:
        return {"steps_of_all": self.steps_of_all}

    def load_state(self, saved: dict[str, Any]) -> None:
        self.steps_of_all = max(self.steps_of_all, saved["steps_of_all"])

    def redistribute_state(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {"steps_of_all": max(part["steps_of_all"] for part in parts)}
