"""What is deferred: decided every few steps, by whoever decides for all workers.

Under ``collective=native`` one worker decides (`exchange`), over servers each server for its
part of the model (`discipline`). A decision is made of one's own arithmetic and clock, and
travels: workers that each decided for themselves could disagree in a last bit, and then wait
for messages that never come.
"""

from __future__ import annotations

from paceline.methods.osp.choice import Parts, choose, fill, levelled
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.trial import Seen, Trial


class Decision:
    """Decides, and remembers what that takes: how important pieces are, how trials ended."""

    def __init__(self, options: OSPOptions) -> None:
        self._options, self._trial = options, Trial()
        self.importance = options.importance_class()

    def after_interval(
        self,
        parts: Parts,
        deferred: list[int],
        growth: float,
        seen: Seen | None,
        step: int,
    ) -> list[int]:
        """What of the model's *parts* to defer in the next interval, where *deferred* was in
        the last one. *growth*: the part of the budget that may be used. *seen*: None where no
        step was seen since buckets have changed; then what is deferred stays so."""
        options, order = self._options, self.order(parts, step)
        budget = options.most * sum(parts.sizes) * growth
        if options.defer == "most":
            return sorted(fill(parts, order, budget))
        if seen is None:
            return deferred
        if self._trial.rests(bool(deferred), seen):
            return []
        if seen.times is None or not seen.rate.per_byte:
            return []
        orders = [order]
        if seen.rate.pulls and options.order == "time":
            orders.append(levelled(parts, order))
        return choose(parts, orders, seen.times, seen.rate, budget, seen.update)

    def order(self, parts: Parts, step: int) -> list[int]:
        """In which order pieces are deferred. Without overlap all are ready together."""
        order = self.importance.order(len(parts.sizes), seed=step)
        if self._options.order == "time" and self._options.overlap:
            order.sort(key=lambda piece: -parts.buckets[piece])  # stable
        return order

    def after_look(self, deferred: list[int], seen: Seen | None) -> list[int]:
        """A trial has begun: what is *deferred* stays so, unless that does not pay."""
        stops = seen is not None and self._trial.stops_early(bool(deferred), seen)
        return [] if stops else deferred
