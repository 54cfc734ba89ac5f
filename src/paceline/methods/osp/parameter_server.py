"""OSP over servers: the worker's half.

Servers hold the exact parameters and the optimizer's state. For its tentative step a worker
has the exact values of what it defers, and mirrors the momentum from how these moved: SGD
without Nesterov's form moves by -eta v, so v is (P(i-1) - P(i)) / eta, up to rounding, at
no traffic. The state of other optimizers is pulled for what is deferred, meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from paceline.interfaces import Hyperparameters, Remote, ServerRun
from paceline.interfaces.buckets import Bucket, in_strides_of
from paceline.methods.osp.deferral import Rate
from paceline.methods.osp.deferral_policy import looks_in
from paceline.methods.osp.measurement import FADES
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.reports import read_mask, written_report
from paceline.methods.osp.worker import Worker

Found = TypeVar("Found")
Values = dict[int, torch.Tensor]
"""By piece, flat."""


class RemoteWorker(Worker[ServerRun]):
    """The pieces of its layout are the servers' units."""

    def __init__(self, run: ServerRun, options: OSPOptions) -> None:
        """Collective."""
        self.remote = run.remote
        self.step = self.remote.join()
        super().__init__(run, options, self.remote.own_optimizer())
        self.watch.rate = Rate(0.0, 0.0, pulls=True)
        for bucket, inside in enumerate(self.layout.inside):
            for number, size in zip(
                inside, self.remote.unit_bytes(bucket), strict=True
            ):
                self.layout.sizes[number] = size
        # P(i) of what the last step deferred, and of what the one under way defers.
        self.exact: Values = {}
        # What the last second stage has brought, once that was waited for.
        self.late: Values | None = None
        self.rates: list[float] = []  # of the last step, by group
        self._begin_step()

    def _send(self, bucket: Bucket) -> None:
        layout, watch, interval = self.layout, self.watch, self.options.interval
        late, report = set(layout.deferred), b""
        ends = self.step % interval == 0
        if bucket.last and (ends or (late and looks_in(self.step, interval))):
            parts, fades = layout.parts(), FADES if ends else 1.0
            report = written_report(
                watch.measured(watch.times(), parts, layout.deferred, fades)
            )
        inside = enumerate(layout.inside[bucket.index])
        units = [unit for unit, number in inside if number not in late]
        self.remote.push(bucket, self.step, units, report=report)

    def after_update(self) -> None:
        how = self.updater.hyperparameters()
        self._settle()  # now all is P(i)
        arrived = self._by_number(self.remote.arrived())  # P(i+1)
        self.watch.mark()
        deferring = self.layout.deferred
        late = set(deferring)
        both = sorted(late.union(self._told()))
        earlier, self.exact = self.exact, dict(zip(both, self._kept(both), strict=True))
        self._write(arrived, arrived.values())
        for bucket in self.run.buckets:
            inside = enumerate(self.layout.inside[bucket.index])
            if units := [unit for unit, number in inside if number in late]:
                self.remote.push(bucket, self.step, units, late=True)
        if self.options.correction == "local":
            self._mirror(earlier, how)
        self._step_tentatively(deferring, how)
        self.late = None
        self.has_deferred = self.has_deferred or bool(deferring)
        self.rates = [float(group["lr"]) for group in how]
        self.step += 1
        self.steps += 1
        changes = self.layout.changes
        self._begin_step()
        self.watch.step_ended(changes, self.run.loss)
        self.watch.step_begins()

    def finish(self) -> None:
        self._settle()
        self.remote.written()
        self._explain()
        self.remote.leave()

    def consolidate(self) -> Callable[[], None]:
        """The parameters with all gradients in them that were sent."""
        everything = range(len(self.layout.pieces))
        tentative = self._kept(everything)
        self._settle()

        def undo() -> None:
            self._write(everything, tentative)
            self.remote.written()

        return undo

    def parameters_replaced(self) -> None:
        """All parameters are exact, and none of what was known of them is of use."""
        self._wait_late()
        self.remote.states()  # they were asked for before
        self.exact, self.late, self.rates = {}, None, []
        self.layout.changes += 1
        self._begin_step()

    # ---- the second stage ----

    def _begin_step(self) -> None:
        """The next step defers what servers have said. Pull the optimizer's state of that;
        SGD's without Nesterov's form is mirrored."""
        self.remote.written()
        self.layout.defer(self._told())
        groups = self.updater.hyperparameters()
        asked = set()
        for number in self.layout.deferred:
            group = groups[self.updater.group_of(self.layout.pieces[number])]
            if "dampening" not in group or group["nesterov"]:
                asked.add(number)
        if asked and self.options.correction == "local":
            places = [
                (bucket, unit)
                for bucket, inside in enumerate(self.layout.inside)
                for unit, number in enumerate(inside)
                if number in asked
            ]
            self.remote.ask_states(places, self.step)

    def _settle(self) -> None:
        """Put the exact values of what the last step deferred in the place of the tentative
        ones; waits for them."""
        late = self._wait_late()
        self._write(late, late.values())

    def _wait_late(self) -> Values:
        if self.late is None:
            # Copied: the memory in which it lands is used by the next second stage.
            late = self._by_number(self.remote.arrived(late=True))
            self.late = {number: value.clone() for number, value in late.items()}
        return self.late

    def _by_number(self, answers: Iterable[tuple[int, int, Found]]) -> dict[int, Found]:
        """By piece, what has come by bucket and unit."""
        inside = self.layout.inside
        return {inside[bucket][unit]: found for bucket, unit, found in answers}

    def _told(self) -> list[int]:
        """What the next step defers."""
        inside = self.layout.inside
        return sorted(
            inside[bucket][unit] for bucket, unit in next_deferred(self.remote)
        )

    def _mirror(self, earlier: Values, how: Hyperparameters) -> None:
        """Give the own optimizer the state that the servers' has for what is deferred: what
        was pulled, or V(i-1) = (P(i-1) - P(i)) / eta, where P(i-1) is known (*earlier*)."""
        pulled = self._by_number(self.remote.states())
        for number in self.layout.deferred:
            piece, exact = self.layout.pieces[number], self.exact[number]
            group, live = self.updater.group_of(piece), self.updater.state([piece])[0]
            live.clear()
            if number in pulled:
                for name, value in pulled[number].items():
                    whole = value.numel() == exact.numel()
                    live[name] = _like(exact, value) if whole else value
            elif how[group]["momentum"] and number in earlier and self.rates[group]:
                live["momentum_buffer"] = (earlier[number] - exact) / self.rates[group]


def _like(exact: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """*value*, which servers have sent flat, with the shape and strides of *exact*."""
    return in_strides_of(exact, value.view(exact.shape))


def next_deferred(remote: Remote) -> list[tuple[int, int]]:
    """Bucket and unit of all that the next step defers, as servers have told with their last
    answers (GIB)."""
    return [
        (bucket, part.units[unit])
        for bucket in range(len(remote.units))
        for part in remote.told(bucket)
        for unit in read_mask(part.words)
    ]
