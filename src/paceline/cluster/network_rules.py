"""What happens to a cluster during a run: links that slow down, break and come back,
workers that die. The same objects in the simulated and, but for paths, in the emulated runtime.

::

    [[rule]]
    step = 20                  # after worker 0's 20th step; or: at = "5 s"
    throttle = "worker 3"      # both directions; "worker 3 out" is one
    rate = "25 Mbit/s"

    [[rule]]
    at = "10 s"                # from the start of training on worker 0
    cut = "rack 1 up"          # packets are lost, nobody is told

    [[rule]]
    at = "15 s"
    repair = "rack 1 up"       # flows again, at the rate that the cluster gives it

    [[rule]]
    at = "0 s"
    throttle = "worker 1 to worker 2"  # this path alone: what no others share, such as a bad
    rate = "25 Mbit/s"         # route; simulated alone

    [[rule]]
    step = 30
    kill = 2                   # a worker
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline import units
from paceline.errors import ClusterError

Action = Literal["throttle", "cut", "repair", "kill"]
ACTIONS: tuple[Action, ...] = ("throttle", "cut", "repair", "kill")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that happens once.

    *target*: a link's name, or a path's, for `throttle`, `cut` and `repair` (without a direction: both),
    a worker's number for `kill`. *at* is seconds from the start of training on worker 0,
    *step* one of its steps; one of the two. *rate*: goodput in bytes per second, for
    `throttle` alone.
    """

    action: Action
    target: str | int
    at: float | None = None
    step: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.at is None) == (self.step is None):
            raise ClusterError("a rule: expected one of 'at' and 'step'")
        if self.at is not None and not (self.at >= 0 and math.isfinite(self.at)):
            raise ClusterError(
                f"key 'at': expected a time of zero or more, got {self.at}"
            )
        if self.step is not None and self.step < 1:
            raise ClusterError(f"key 'step': expected 1 or more, got {self.step}")
        if (self.action == "throttle") != (self.rate is not None):
            raise ClusterError("key 'rate': expected with 'throttle', and only there")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ClusterError(
                f"key 'rate': expected a rate above zero, got {self.rate:g} bytes/s; to "
                "let nothing through, write cut"
            )
        if (self.action == "kill") != isinstance(self.target, int):
            raise ClusterError(
                f"key {self.action!r}: expected "
                + ("a worker's number" if self.action == "kill" else "a link's name")
                + f", got {self.target!r}"
            )

    def describe(self) -> str:
        """One line for people."""
        when = f"step {self.step}" if self.at is None else units.show_seconds(self.at)
        if self.action == "kill":
            return f"{when}: kill worker {self.target}"
        rate = "" if self.rate is None else f" to {units.show_rate(self.rate)}"
        return f"{when}: {self.action} {self.target}{rate}"


def throttle(
    link: str, rate: float, *, at: float | None = None, step: int | None = None
) -> Rule:
    """Give a link another goodput, in bytes per second."""
    return Rule(action="throttle", target=link, rate=rate, at=at, step=step)


def cut(link: str, *, at: float | None = None, step: int | None = None) -> Rule:
    """Lose everything on a link, without a word to anybody."""
    return Rule(action="cut", target=link, at=at, step=step)


def repair(link: str, *, at: float | None = None, step: int | None = None) -> Rule:
    """Give a link back the goodput that the cluster has for it."""
    return Rule(action="repair", target=link, at=at, step=step)


def kill(worker: int, *, at: float | None = None, step: int | None = None) -> Rule:
    """End a worker without notice."""
    return Rule(action="kill", target=worker, at=at, step=step)
