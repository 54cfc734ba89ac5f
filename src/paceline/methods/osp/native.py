"""OSP by all-reduce: both stages among workers that each hold the optimizer.

Exact for every optimizer that can be applied piece by piece: a worker keeps the last exact
values of what is deferred, with the optimizer's state that belongs to them, and the
tentative step is a step of that optimizer whose result is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.errors import UsageError
from paceline.interfaces import Hyperparameters, Pending, UpdatingRun
from paceline.methods.osp.exchange import Exchange
from paceline.methods.osp.layout import Message
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.worker import Worker
from paceline.tensors import Bucket

SECOND = "stage 2"
"""The channel that stage 2 has for itself."""


@dataclass
class Deferral:
    """What of one step travels in stage 2, and what the worker computes with meanwhile."""

    numbers: list[int]  # of the pieces that took part in the step
    means: list[torch.Tensor]  # once `pending_second` was waited for
    how: Hyperparameters
    exact: list[torch.Tensor]  # P(i), and P(i+1) once `applied`
    stamps: list[int]
    applied: bool = False


class NativeWorker(Worker[UpdatingRun]):
    """*deferral*: of the last step, until the end of the next backward pass."""

    def __init__(self, options: OSPOptions, run: UpdatingRun) -> None:
        """Collective."""
        total = sum(bucket.bytes for bucket in run.buckets)
        super().__init__(options, run, run.take_over(options.piece_bytes(total)))
        second = run.comm.channel(SECOND) if options.defer != "nothing" else None
        self.exchange = Exchange(self, run, second)
        self.pending_first: list[Pending] = []
        self.pending_second: list[Pending] = []
        self.messages: list[Message] = []
        self.unused: set[int] = set()
        self.weight = 1.0  # of this worker's gradients in the mean
        self.deferral: Deferral | None = None

    def send(self, run: UpdatingRun, bucket: Bucket) -> None:
        message = self.layout.message(bucket)
        if message.numbers:
            self.messages.append(message)
        flat = message.flat
        if bucket.last and not flat.numel():
            flat = bucket.buffer.new_zeros(
                1
            )  # what all learn in a step travels with it
        if flat.numel():
            self.pending_first.append(run.mean(flat, of=bucket))

    def backward_ended(self, run: UpdatingRun) -> None:
        super().backward_ended(run)
        self._wait()
        self.watch.mark()
        # Kept, since a forward pass before step() would make it the next batch's.
        self.weight = run.weight
        self.unused = self.layout.unused()

    def after_update(self, run: UpdatingRun) -> None:
        self._settle()
        messages, self.messages = self.messages, []
        if run.active:
            how = self.updater.hyperparameters()
            self._update(run, messages, how)
            self._defer(run, how)
        elif run.participants:
            self._send_second(run)
        self.exchange.step_ended(run, self.pending_second)

    def finish(self, run: UpdatingRun) -> None:
        source = run.keep_company_to_the_end()
        self._wait()
        self._settle()
        self.explain(run)
        if source is not None:
            run.take_model(source)

    def consolidate(self, run: UpdatingRun) -> Callable[[], None]:
        """The parameters with all gradients in them that were sent; and the optimizer's
        state that belongs to them."""
        deferral = self.deferral
        if deferral is None:
            return lambda: None
        for pending in self.pending_second:
            pending.wait()
        tentative = self.kept(deferral.numbers)
        self._settle()
        deferral.exact, deferral.applied = self.kept(deferral.numbers), True

        def undo() -> None:
            self.write(deferral.numbers, tentative)
            deferral.stamps = self._stamps(deferral.numbers)
            self.deferral = deferral

        return undo

    def _update(
        self, run: UpdatingRun, messages: Sequence[Message], how: Hyperparameters
    ) -> None:
        """Apply what stage 1 has brought."""
        means = {
            number: part
            for message in messages
            for number, part in zip(message.numbers, message.parts, strict=True)
            if number not in self.unused
        }
        numbers, gradients = list(means), list(means.values())
        run.clip(gradients)
        self.exchange.rate(numbers, gradients)
        start = run.stopwatch.mark()
        self.updater.apply(self.layout.some(numbers), gradients, how)
        size = sum(mean.numel() * mean.element_size() for mean in gradients)
        self.exchange.updated(start, run.stopwatch.mark(), size)

    # ---- stage 2 ----

    def _defer(self, run: UpdatingRun, how: Hyperparameters) -> None:
        """Send what is deferred on its way, and take the tentative step."""
        if not self.layout.deferred:
            return
        numbers = [n for n in self.layout.deferred if n not in self.unused]
        pieces, exact = self.layout.some(numbers), []
        for piece, value in zip(pieces, self.updater.values(pieces), strict=True):
            room = self.layout.room(piece, value.numel(), value)
            exact.append(room.view(value.shape).copy_(value))
        means = self._send_second(run)
        # Its own gradient is the whole of this worker's share.
        self.step_tentatively(numbers, how, 1 / self.weight if self.weight else 0.0)
        mine, stamps = [means[n] for n in numbers], self.updater.stamps(pieces)
        self.deferral = Deferral(numbers, mine, how, exact, stamps)

    def _send_second(self, run: UpdatingRun) -> dict[int, torch.Tensor]:
        """Start the mean of everything deferred; returns where each piece's will be. All
        ranks send as much, used or not."""
        means: dict[int, torch.Tensor] = {}
        for message in self.layout.late_messages():
            if not run.active:
                message.flat.zero_()  # to keep the others company
            means.update(zip(message.numbers, message.parts, strict=True))
            self.pending_second.append(run.mean(message.flat, channel=SECOND))
        return means

    def _settle(self) -> None:
        """Put the exact values of what was deferred in the place of the tentative ones: their
        means have arrived."""
        deferral, self.deferral = self.deferral, None
        if deferral is None:
            return
        self._require_untouched(deferral)
        self.write(deferral.numbers, deferral.exact)
        if not deferral.applied:
            pieces = self.layout.some(deferral.numbers)
            self.exchange.rate(deferral.numbers, deferral.means)
            self.correction.arrived(pieces, deferral.means)
            self.updater.apply(pieces, deferral.means, deferral.how)

    def _wait(self) -> None:
        for pending in (*self.pending_second, *self.pending_first):
            pending.wait()
        self.pending_second.clear()
        self.pending_first.clear()

    def _stamps(self, numbers: Sequence[int]) -> list[int]:
        return self.updater.stamps(self.layout.some(numbers))

    def _require_untouched(self, deferral: Deferral) -> None:
        now = self._stamps(deferral.numbers)
        for number, before, after in zip(
            deferral.numbers, deferral.stamps, now, strict=True
        ):
            if before != after:
                raise UsageError(
                    f"parameter {self.layout.name_of(number)!r} was written to since step(), "
                    "while a part of its update was under way (osp, stage 2): what was "
                    "written would be lost. Load and change parameters before training, or "
                    "call finish(), change them, and distribute again"
                )
