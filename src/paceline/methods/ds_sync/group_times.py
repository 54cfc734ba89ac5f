"""Groups' times, from every worker to every other: what an adjustment is decided by.

Each worker times the means of its own groups. Every so many steps all add up what they have
seen, on a channel of its own, and use the sum one such interval later: so nobody waits for it,
and all decide by the same numbers, in the same step. A change is seen after one interval to two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.interfaces import Pending, Run
from paceline.methods.ds_sync.adjust import Times
from paceline.methods.ds_sync.plan import Plan

NONE = -1


class GroupTimes:
    """One worker's. *every*: steps from one exchange to the next."""

    def __init__(self, run: Run, every: int) -> None:
        """Collective."""
        self._every = every
        self._channel = run.comm.channel("adjust")
        self._seen: list[tuple[int, list[Any]]] = []
        """Of each mean, the phase; when it was sent, and when it was in."""
        self._timed = NONE
        """The version of the plan that those are of."""
        self._sums = torch.zeros(0, dtype=torch.float64)
        """What all have told, or will have once it is in."""
        self._told = NONE
        """The version of the plan that these are of."""
        self._pending: Pending | None = None

    def sends(self, run: Run, plan: Plan) -> Callable[[], None]:
        """A mean is about to be sent, in this step of the *plan*; what is given back is called
        when it is in."""
        if self._timed != plan.version:
            self._seen.clear()
            self._timed = plan.version
        stopwatch = run.stopwatch
        marks = [stopwatch.mark()]
        self._seen.append(((run.step - plan.begins) % len(plan.phases), marks))
        return lambda: marks.append(stopwatch.mark())

    def exchange(self, run: Run, plan: Plan) -> Times | None:
        """What all have measured of *plan*, where this is the step to say so. Collective, and
        waits for nobody."""
        if run.step % self._every or not run.step:
            return None
        self.wait()
        heard = self._heard(plan) if self._told == plan.version else None
        self._tell(run, plan)
        return heard

    def _heard(self, plan: Plan) -> Times:
        """Of a group's workers the last to arrive waits for the network alone: the least time
        is the group's. 0 where nobody has measured."""
        by_phase = self._sums.view(len(plan.phases), -1).tolist()
        return [
            [
                min((seconds[rank] for rank in group if seconds[rank] > 0), default=0.0)
                for group in groups
            ]
            for groups, seconds in zip(plan.phases, by_phase, strict=True)
        ]

    def _tell(self, run: Run, plan: Plan) -> None:
        own = torch.zeros(len(plan.phases), run.comm.size, dtype=torch.float64)
        seen = self._seen if self._timed == plan.version else []
        for phase in range(len(plan.phases)):
            times = sorted(
                run.stopwatch.seconds(marks[0], marks[1:])[0]
                for of, marks in seen
                if of == phase and len(marks) > 1
            )
            if times:
                # In some steps it waits for slower workers, and not for the network.
                own[phase, run.comm.rank] = times[len(times) // 4]
        self._seen.clear()
        self._sums = own.view(-1).to(run.parameters[0].device)
        self._told = plan.version
        self._pending = self._channel.all_reduce(self._sums, "sum")

    def wait(self) -> None:
        """Return when what is under way is in."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def save(self) -> dict[str, Any]:
        self.wait()
        return {"sums": self._sums, "told": self._told}

    def load(self, saved: dict[str, Any]) -> None:
        self.wait()
        self._seen.clear()
        self._sums = saved["sums"].to(self._sums.device)
        self._told = saved["told"]
