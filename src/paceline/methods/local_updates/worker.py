"""One worker of a program of local updates: its rounds, their end, and what it keeps.

Theory of operation
-------------------
All is done after the update. What has been trained is counted in each step (`Since`), and in
the steps of a round a part of the model leaves (`_send`) and comes back as a mean (`_land`), at
once or `delay` steps later. Which part leaves is a function of the step's number alone, which
is equal on all workers: nobody has to agree on it.

A worker that is out of data goes on through the rounds, and weighs in the next one what it
has trained since the last. In the round in which nobody trains any more the mean is taken
plainly, without outer momentum, and so is what is left when that is over (`_settle`).

Codes are of differences alone: parameters are as large as they are whatever has moved, so a code
of them would be off by more than that. A code may leave much of them to a later round, so the
round that none follows is formed once more without one.

Anchors and momenta are saved by parameter, in the model's order: a restart may send them in
other buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Comm, Run
from paceline.methods.flat_tensors import Flat
from paceline.methods.local_updates.fragments import (
    Flight,
    Part,
    Since,
    beginning,
    by_parameter,
    make_parts,
    means,
    put,
)
from paceline.methods.local_updates.optimizer_state import flats_of_moments
from paceline.methods.local_updates.options import Options
from paceline.methods.local_updates.outer_optimizer import outer_step, rescaled_step

LATE = "outer"
"""The queue of means that are used later: what the script sends meanwhile never waits for
them."""


class LocalWorker:
    """One worker. *group*: who averages between two means of all, where anybody does."""

    def __init__(self, run: Run, options: Options, group: Comm | None = None) -> None:
        self.run, self.options, self.group = run, options, group
        self.parts = make_parts(options, run)
        self.flights: list[Flight] = []
        """Means under way, in the order in which they are used."""
        self.since_group = Since()
        self._said: set[str] = set()

    # ---- steps ----

    @torch.no_grad()
    def after_update(self) -> None:
        if self.run.active:
            self._count()
        while self.flights and self.run.step >= self.flights[0].due:
            self._land(self.flights.pop(0))
        if self.run.is_round:
            self._hold_round()

    def _count(self) -> None:
        """A step was done."""
        weight = self.run.weight * self.run.comm.size
        for part in self.parts:
            part.since.weight += weight
        self.since_group.weight += weight

    def _hold_round(self) -> None:
        done = self.run.step + 1
        if self.group is not None and done % self.options.every:
            flight = self._send(0, since=self.since_group, among=self.group)
            self._land(flight, in_group=True)
            return
        # One fragment a round, each in its turn: all workers have had as many rounds.
        number = sum(part.rounds for part in self.parts) % self.options.fragments
        flight = self._send(number, since=self.parts[number].since)
        self.since_group.begin(done)
        if self.options.delay:
            self.flights.append(flight)
        else:
            self._land(flight)

    # ---- one mean of the workers' models ----

    def _send(self, number: int, *, since: Since, among: Comm | None = None) -> Flight:
        """The mean of part *number* goes on its way, among all or in a group. Collective.

        Each worker's weight travels beside it: what arrives is the mean of w*D, and of w. Where
        there is an anchor (and all workers meet) D is what has been moved since; else the
        parameters themselves, which are assigned as they are: x - (x - x_i) would be rounded.
        """
        run, options, part = self.run, self.options, self.parts[number]
        share = since.share(run.step)
        device = part.parameters[0].buffer.device
        flight = Flight(
            number,
            run.step + options.delay,
            torch.tensor([share, run.active], dtype=torch.float64, device=device),
            share=share,
        )
        channel = LATE if options.delay else ""

        def average(
            tensor: torch.Tensor, parts: dict[str, torch.Tensor] | None = None
        ) -> None:
            pending = run.average(tensor, among=among, channel=channel, parts=parts)
            flight.pending.append(pending)

        average(flight.weights)
        differences = options.keeps_anchor and among is None
        names = _names(run) if differences else {}
        for index, flat in enumerate(part.parameters):
            flat.take()
            if differences:
                _subtract(flat, part.anchors[index])
            _weigh(flat, share)
            rows = zip(flat.of, flat.views, strict=True)
            average(flat.buffer, {names[id(p)]: v for p, v in rows} if names else None)
        if among is None:
            if options.state == "average":
                flight.moments = flats_of_moments(part, run)
            part.rounds += 1
        for flat in (*part.statistics, *flight.moments):
            flat.take()
            _weigh(flat, share)
            average(flat.buffer)
        comm = run.comm if among is None else among
        comm = comm.channel(channel) if channel else comm
        for flat in part.counters:
            flat.take()
            flight.pending.append(comm.all_reduce(flat.buffer, "max"))
        since.begin(run.step + 1)
        return flight

    def _land(self, flight: Flight, *, in_group: bool = False) -> None:
        """Wait for a mean, and go on from it. Where nobody has trained nothing moves."""
        flight.wait()
        options, part = self.options, self.parts[flight.part]
        total, active = flight.weights.tolist()
        part.put_counters()
        if not total:
            return
        # The last round, of what is left when all are out of data, is a plain mean.
        plain = not active
        if plain and options.differences and not in_group:
            self._send_without_code(part, flight.share)
        for flat in (*part.parameters, *part.statistics, *flight.moments):
            if total != 1:
                flat.buffer.div_(total)
        for flat in (*part.statistics, *flight.moments):
            flat.put()
        if in_group or not options.keeps_anchor:
            for flat in part.parameters:
                flat.put()
            return
        for flat, last in zip(part.statistics, part.averaged, strict=True):
            last.copy_(flat.buffer)
        for index in range(len(part.parameters)):
            if plain:
                _plain_step(part, index)
            else:
                self._outer_step(part, index)
            flat = part.parameters[index]
            flat.buffer.copy_(part.anchors[index])
            _put_mixed(flat, 0.0 if plain else options.keep_local)

    def _send_without_code(self, part: Part, share: float) -> None:
        """The last round once more: what a code has left out of it no other round would bring.
        Nobody has trained since it was sent. Collective."""
        pending = []
        for flat, anchor in zip(part.parameters, part.anchors, strict=True):
            flat.take()
            _subtract(flat, anchor)
            _weigh(flat, share)
            pending.append(self.run.average(flat.buffer))
        for one in pending:
            one.wait()

    def _outer_step(self, part: Part, index: int) -> None:
        options = self.options
        flat, anchor = part.parameters[index], part.anchors[index]
        momentum = part.momenta[index] if part.momenta else None
        if not options.rescale:
            outer_step(
                anchor,
                momentum,
                flat.buffer,
                learning_rate=options.outer_learning_rate,
                factor=options.outer_momentum,
                nesterov=options.nesterov,
            )
            return
        assert momentum is not None, "checked where options are made"
        rates = rates_of(self.run, flat)
        if 0 in rates and "rate 0" not in self._said:
            self._said.add("rate 0")
            self.run.report(
                f"{options.name}: a learning rate is 0, in whose units the outer momentum is "
                "kept: until it is above 0 these parameters are averaged plainly"
            )
        rescaled_step(
            anchor,
            momentum,
            flat.buffer,
            [tensor.numel() for tensor in flat.of],
            rates,
            learning_rate=options.outer_learning_rate,
            factor=options.outer_momentum,
            nesterov=options.nesterov,
        )

    # ---- the end, and what is shown in between ----

    @torch.no_grad()
    def finish(self) -> None:
        source = self.run.participate_until_all_finish()
        while self.flights:
            self._land(self.flights.pop(0))
        self._settle()
        if source is not None:
            self.run.broadcast_model(source)

    def _settle(self) -> None:
        """After the last round: what is left of each part becomes the plain mean, weighed by what
        workers have trained on since its last mean, and the outer momentum is dropped. Where
        nobody has trained since then nothing moves. Collective."""
        for part, total in zip(self.parts, self._totals(), strict=True):
            if total:
                self._put_mean(part, total)
                if self.options.keeps_anchor:
                    part.take_anchor()
            elif self.options.keep_local:
                part.put_anchor()
            for momentum in part.momenta:
                momentum.zero_()
            part.since.begin(self.run.step)
        self.since_group.begin(self.run.step)

    @torch.no_grad()
    def consolidate(self) -> Callable[[], None]:
        """The anchors become the model; without, the mean of all workers' models does, in which
        they weigh what they have trained on since the last mean of all: where nobody has,
        models are equal."""
        kept = [pair for part in self.parts for pair in part.copies()]

        @torch.no_grad()
        def undo() -> None:
            for tensor, own in kept:
                tensor.copy_(own)

        if self.options.keeps_anchor:
            for part in self.parts:
                part.put_anchor()
        else:
            for part, total in zip(self.parts, self._totals(), strict=True):
                if total:
                    self._put_mean(part, total)
        return undo

    def _totals(self) -> list[float]:
        """What all workers weigh together, for each part. Collective."""
        own = [part.since.weight for part in self.parts]
        device = self.run.parameters[0].device
        totals = torch.tensor(own, dtype=torch.float64, device=device)
        self.run.comm.all_reduce(totals, "sum").wait()
        summed: list[float] = totals.tolist()
        return summed

    def _put_mean(self, part: Part, total: float) -> None:
        """The part becomes the weighed mean of all workers'. Collective."""
        share, comm = part.since.weight / total, self.run.comm
        pending = []
        for flat in (*part.parameters, *part.statistics):
            flat.take()
            flat.buffer.mul_(share)
            pending.append(comm.all_reduce(flat.buffer, "sum"))
        for flat in part.counters:
            flat.take()
            pending.append(comm.all_reduce(flat.buffer, "max"))
        for one in pending:
            one.wait()
        for flat in part.flats:
            flat.put()

    @torch.no_grad()
    def parameters_replaced(self) -> None:
        """A round begins with them. If they are those of the anchor, as those of a checkpoint are
        that another number of workers goes on from, all goes on."""
        anchored = self.options.keeps_anchor
        if anchored and all(part.is_at_anchor() for part in self.parts):
            return
        self._drop_flights()
        for part in self.parts:
            if anchored:
                part.take_anchor()
            part.since.begin(self.run.step)
        self.since_group.begin(self.run.step)

    def _drop_flights(self) -> None:
        """What is under way is of another model."""
        for flight in self.flights:
            flight.wait()
        self.flights.clear()

    # ---- restarts ----

    def save_state(self) -> dict[str, Any]:
        """Means under way are waited for: all workers have sent their part."""
        run = self.run
        for flight in self.flights:
            flight.wait()
        return {
            "parts": [
                {
                    "anchors": by_parameter(run, part.parameters, part.anchors),
                    "momenta": by_parameter(run, part.parameters, part.momenta),
                    "averaged": part.averaged,
                    "since": part.since.saved(run.step),
                    "rounds": part.rounds,
                }
                for part in self.parts
            ],
            "flights": [
                {
                    "part": flight.part,
                    "due": flight.due - run.step,
                    "weights": flight.weights,
                    "means": means(run, self.parts[flight.part]),
                }
                for flight in self.flights
            ],
            "since_group": self.since_group.saved(run.step),
        }

    @torch.no_grad()
    def load_state(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved, before the same step. Raises `UsageError` where it is another
        program's."""
        run = self.run
        if not self._fits(saved["parts"]):
            raise UsageError(
                f"{self.options.name}: the checkpoint was saved with another number of "
                "fragments, or with an outer optimizer where there is none now, or the "
                "other way round: load it with the options with which it was saved"
            )
        self._drop_flights()  # their buffers are written to until they are in
        for part, kept in zip(self.parts, saved["parts"], strict=True):
            for own, saved_one in (
                (by_parameter(run, part.parameters, part.anchors), kept["anchors"]),
                (by_parameter(run, part.parameters, part.momenta), kept["momenta"]),
                (part.averaged, kept["averaged"]),
            ):
                put(own, saved_one)
            part.since = Since.loaded(run.step, kept["since"])
            part.rounds = kept["rounds"]
        for kept in saved["flights"]:
            part = self.parts[kept["part"]]
            put(means(run, part), kept["means"])
            weights = kept["weights"].to(part.parameters[0].buffer.device)
            self.flights.append(Flight(kept["part"], run.step + kept["due"], weights))
        self.since_group = Since.loaded(run.step, saved["since_group"])

    def _fits(self, saved: Sequence[dict[str, Any]]) -> bool:
        if len(saved) != len(self.parts):
            return False
        return all(
            len(by_parameter(self.run, part.parameters, own)) == len(kept[name])
            for part, kept in zip(self.parts, saved, strict=True)
            for name, own in (("anchors", part.anchors), ("momenta", part.momenta))
        )

    def redistribute_state(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Anchors, momenta and means under way are equal on all. What each one has trained by
        itself since is gone where there is an anchor, else it is in the model: a round
        begins."""
        first = next(iter(parts))
        for part in first["parts"]:
            part["since"] = [0, 0.0]
        first["since_group"] = [0, 0.0]
        return first


def _subtract(flat: Flat, anchor: torch.Tensor) -> None:
    """The buffer, where workers are, becomes what they have moved: D_i = x - x_i."""
    flat.buffer.neg_().add_(beginning(flat, anchor))


def _names(run: Run) -> dict[int, str]:
    """Each parameter's, by its identity."""
    return {
        id(parameter): name
        for bucket in run.buckets
        for parameter, name in zip(bucket.parameters, bucket.names, strict=True)
    }


def _weigh(flat: Flat, share: float) -> None:
    if share != 1:
        flat.buffer.mul_(share)


def _plain_step(part: Part, index: int) -> None:
    """x <- x - D, and u is dropped: a round of few steps must not be followed by a step of
    the momentum of many."""
    part.anchors[index].sub_(part.parameters[index].buffer)
    if part.momenta:
        part.momenta[index].zero_()


def rates_of(run: Run, flat: Flat) -> list[float]:
    """The inner learning rate of each tensor, as of now; 1 where the optimizer does not have
    it, and it does not move."""
    assert run.optimizer is not None, "workers update"
    rates = {
        id(tensor): float(group["lr"])
        for group in run.optimizer.param_groups
        for tensor in group["params"]
    }
    return [rates.get(id(tensor), 1.0) for tensor in flat.of]


def _put_mixed(flat: Flat, mixing: float) -> None:
    """x_i <- alpha*x_i + (1 - alpha)*x, where x is in the buffer."""
    if not mixing:
        flat.put()
        return
    for tensor, mean in zip(flat.tensors, flat.views, strict=True):
        tensor.copy_(torch.lerp(mean, tensor.to(mean.dtype), mixing))
