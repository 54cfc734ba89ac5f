"""A cluster's rules on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from paceline.cluster.links import Links
from paceline.cluster.network_rules import Rule
from paceline.errors import WorkerFailedError
from paceline.records import Span
from paceline.runtimes.simulated.clock import QUESTION, Clock
from paceline.units import show_seconds


class Conditions:
    """Lets each rule happen once, when worker 0's training has come so far."""

    def __init__(
        self,
        rules: Sequence[Rule],
        clock: Clock,
        links: Links,
        observe: Callable[[Span], None],
    ) -> None:
        self._rules = rules
        self._clock = clock
        self._links = links
        self._observe = observe
        self._cut: set[int] = set()
        clock.explain = self._explain

    def reached(self, step: int) -> None:
        """Worker 0 has ended a step (0: training begins), at its own time."""
        now = self._clock.current.time
        for rule in self._rules:
            if rule.at is not None and step == 0:
                self._clock.at(now + rule.at, partial(self._apply, rule))
            elif rule.step == step and step:
                self._clock.at(now, partial(self._apply, rule))

    def _apply(self, rule: Rule) -> None:
        now = self._clock.now
        self._observe(Span(0, "rules", rule.describe(), now, now))
        if isinstance(rule.target, int):
            self._clock.fail(
                WorkerFailedError(
                    f"worker {rule.target} was killed by a rule at virtual time "
                    f"{show_seconds(now)}",
                    rule.target,
                )
            )
            return
        cluster = self._links.cluster
        for link in cluster.links_named(rule.target):
            if rule.action == "cut":
                self._cut.add(link)
                self._links.set_capacity(link, 0.0)
                continue
            rate = cluster.capacities[link] if rule.rate is None else rule.rate
            self._cut.discard(link)
            self._links.set_capacity(link, rate)

    def _explain(self) -> str:
        """A deadlock may be nothing but a link that stays cut."""
        if not self._cut:
            return QUESTION
        names = ", ".join(self._links.cluster.link_name(i) for i in sorted(self._cut))
        return f"A rule has cut {names}, and none repairs it."
