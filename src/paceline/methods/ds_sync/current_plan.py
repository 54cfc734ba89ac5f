"""The plan that a worker goes by, and when it becomes another one: on all workers in the same
step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from paceline.interfaces import Run
from paceline.methods.ds_sync.adjust import Times, decide, for_members
from paceline.methods.ds_sync.contention import NONE, Contention
from paceline.methods.ds_sync.convergence_rate import describe
from paceline.methods.ds_sync.options import DSSyncOptions
from paceline.methods.ds_sync.plan import Plan, make_plan

_made, _described = lru_cache(16)(make_plan), lru_cache(16)(describe)
"""Simulated workers, who share a process, ask for the same."""


class CurrentPlan:
    """One worker's. *bytes*: what it averages in each step, about."""

    def __init__(self, options: DSSyncOptions, run: Run, bytes: int) -> None:  # noqa: A002 - as in the interfaces
        self._options, self._bytes = options, bytes
        everybody = tuple(range(run.comm.size))
        self.plan = self._make(run, everybody, 0)
        self._say(run, "")

    @property
    def largest(self) -> int:
        """The most members that a group has."""
        return max(len(group) for groups in self.plan.phases for group in groups)

    @property
    def members(self) -> tuple[int, ...]:
        """Who has a part in it."""
        return self.plan.members

    def renew(self, run: Run) -> bool:
        """Where others train than before, as all have agreed, these go on among themselves.
        Returns whether the plan is another one."""
        members = tuple(run.participants)
        if members == self.members or not members:
            return False
        self.plan = for_members(
            self.plan, members, run.cluster, self._bytes, begins=run.step
        )
        self._say(run, f"of those who train, from step {run.step} on, ")
        return True

    def adjust(self, run: Run, times: Times) -> bool:
        """By the *times* that all have seen groups take. Returns whether the plan is another
        one."""
        plan = decide(self.plan, times, run.cluster, self._bytes, begins=run.step)
        if plan is None:
            return False
        self.plan = plan
        self._say(run, f"by the times that groups took, from step {run.step} on, ")
        return True

    def _make(
        self,
        run: Run,
        members: tuple[int, ...],
        version: int,
        contention: Contention = NONE,
    ) -> Plan:
        options = self._options
        # Those who are left may be fewer than a group was asked to have.
        most = max(2, len(members)) if version else options.size
        return _made(
            members,
            shuffle=options.shuffle,
            size=min(options.size, most),
            seed=options.seed,
            cluster=run.cluster,
            bytes=self._bytes,
            cross_rack_every=options.cross_rack_every,
            version=version,
            begins=run.step,
            contention=contention,
        )

    def _say(self, run: Run, why: str) -> None:
        if len(self.members) > 1:
            cluster = run.cluster and self.plan.contention.on(run.cluster)
            told = _described(self.plan, cluster, self._bytes)
            run.report(f"ds-sync: {why}{told}")

    # ---- restarts ----

    @property
    def _asked(self) -> list[Any]:
        options = self._options
        return [options.shuffle, options.size, options.seed, options.cross_rack_every]

    def save(self) -> dict[str, Any]:
        plan, contention = self.plan, self.plan.contention
        return {
            "asked": self._asked,
            "members": list(plan.members),
            "phases": [[list(group) for group in groups] for groups in plan.phases],
            "version": plan.version,
            "begins": plan.begins,
            "size": plan.size,
            "contention": [
                list(map(list, contention.hosts)),
                list(map(list, contention.racks)),
            ],
        }

    def load(self, run: Run, saved: Mapping[str, Any]) -> None:
        """Go on with it; or, where something else is asked for now, with a new one."""
        members, version = tuple(saved["members"]), saved["version"]
        hosts, racks = (tuple(map(tuple, one)) for one in saved["contention"])
        contention = Contention(hosts, racks)
        if saved["asked"] != self._asked:
            self.plan = self._make(run, members, version + 1, contention)
            return
        options = self._options
        self.plan = Plan(
            tuple(tuple(map(tuple, groups)) for groups in saved["phases"]),
            version,
            saved["begins"],
            members,
            options.shuffle,
            saved["size"],
            options.seed,
            options.cross_rack_every,
            contention,
        )
