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
from paceline.methods.push_pull import PushPull, PushPullState


@dataclass
class GroupState(PushPullState):
    """*version* and *words* of the groups that this worker was told last: it tells them to its
    server, which may have been away. *steps_of_all*: how many there are in this worker's model,
    counted in gradients divided by workers."""

    version: int = 0
    words: bytes = b""
    steps_of_all: float = 0.0


@dataclass(frozen=True, kw_only=True)
class InGroups(PushPull):
    """Pushes to its group's server, and pulls from it; to another one when it is told that its
    group has changed. *members*: groups by hand, as ``0-3+4-7``."""

    members: str = ""

    def groups(self, workers: int) -> Groups:
        return read_members(self.members, workers)

    def init(self, run: ServerRun) -> GroupState:
        state = GroupState(step=run.remote.join())
        self._hear(state, run)
        return state

    def after_update(self, state: PushPullState, run: ServerRun) -> None:
        state.step = run.remote.wait()
        self._hear(state, run)

    def _report(self, state: PushPullState, bucket: Bucket) -> bytes:
        """With the first bucket."""
        assert isinstance(state, GroupState)
        if bucket.index:
            return b""
        return written(Report(state.words, state.steps_of_all))

    def _hear(self, state: PushPullState, run: ServerRun) -> None:
        """What the server has told of groups."""
        assert isinstance(state, GroupState)
        for told in run.remote.told(0):
            if not told.words:
                continue
            news = read_news(told.words)
            state.steps_of_all = max(state.steps_of_all, news.steps)
            groups = read_groups(news.groups) if news.groups else None
            if groups is None or groups.version <= state.version:
                continue
            state.version, state.words = groups.version, news.groups
            mine = groups.of[run.comm.rank]
            if mine != run.remote.group:
                run.remote.move(mine, state.step)
            if groups.speeds:
                run.remote.has_speed(groups.speeds[mine])
            self._has_changed(groups, run)

    def figures(self, state: PushPullState, run: ServerRun) -> dict[str, float]:
        """*group*: this worker's."""
        return {"group": run.remote.group}

    # ---- what a checkpoint holds ----

    def save_state(self, state: PushPullState, run: ServerRun) -> dict[str, Any]:
        assert isinstance(state, GroupState)
        return {"steps_of_all": state.steps_of_all}

    def load_state(
        self, state: PushPullState, run: ServerRun, saved: dict[str, Any]
    ) -> None:
        assert isinstance(state, GroupState)
        state.steps_of_all = max(state.steps_of_all, saved["steps_of_all"])

    def redistribute_state(
        self, state: PushPullState, run: ServerRun, parts: Iterable[dict[str, Any]]
    ) -> dict[str, Any]:
        return {"steps_of_all": max(part["steps_of_all"] for part in parts)}

    def _has_changed(self, groups: Groups, run: ServerRun) -> None:
        """This worker was told of other groups, or of other speeds."""
