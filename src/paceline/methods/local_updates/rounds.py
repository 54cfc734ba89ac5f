"""The program of all local updates: rounds of inner steps, and an outer step after each.

    round:  H inner steps of each worker;  D_i = x - x_i;  D = sum w_i D_i / sum w_i
    outer:  u <- b*u + D;   x <- x - eta*(D + b*u) (Nesterov), or x - eta*u
    start:  x_i <- x;  or, tau steps later,  x_i <- alpha*x_i + (1 - alpha)*x

Theory of operation
-------------------
Everything happens after the update. Each step counts what was trained (`TrainedSince`). In the
steps of a round a fragment of the model is sent (`_send`) and its average is applied (`_apply`), at
once or `delay` steps later. The step's number alone says which fragment: workers agree on nothing.

A worker that is out of data goes on through the rounds. Its weight in the next one is what it has
trained since the last. In a round in which no worker trains any more the average is taken
plainly, without outer momentum, and so is what is left after it (`_finish_fragments`).

Only differences are compressed. The parameters themselves are as large as they are whatever has
moved, so their compression error would be larger than the change. Compression may leave much of a
change to a later round, so the last round is formed once more without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    Clips,
    Comm,
    Consistency,
    GradientSeen,
    Rounds,
    Run,
    UpdatesOn,
)
from paceline.methods.local_updates.fragments import (
    Fragment,
    PendingAverage,
    TrainedSince,
    copy_into,
    flatten_moments,
    learning_rates,
    make_fragments,
    message_tensors,
    require_moments,
)
from paceline.methods.local_updates.options import Options, own_group
from paceline.methods.model_averaging import FlatTensors

DELAYED = "outer"
"""The channel of delayed averages: what the script sends meanwhile never waits for them."""


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Options):
    """Workers step by themselves, and average their models every so many steps."""

    consistency: ClassVar[Consistency] = "local"
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "local"
    clips: ClassVar[Clips] = "own"
    averages_buffers: ClassVar[bool] = True

    @property
    def rounds(self) -> Rounds:
        if self.has_groups:
            return Rounds(
                every=self.group_every,
                groups=True,
                agree_every=self.sync_every // self.group_every,
            )
        if self.delay or self.fragments > 1:
            return Rounds(every=self.fragment_interval, agree_every=1)
        return Rounds(
            every=self.fragment_interval,
            each_until=self.sync_each_step_until,
            after_update=True,
        )

    @property
    def consolidates_together(self) -> bool:
        """Without an anchor the result is the average of all models."""
        return not self.keeps_anchor

    def compressed_by(self, compressor: str) -> Self:
        """With differences, which alone are compressed."""
        return self.with_differences()

    def start(self, run: Run) -> LocalUpdatesWorker:
        if self.state == "average":
            require_moments(self, run)
        run.set_period(self.sync_every)
        sentence = self.describe_gain()
        if sentence is not None:
            run.report(sentence)
        return LocalUpdatesWorker(run, self, own_group(self, run))


class LocalUpdatesWorker:
    """One worker's hooks. *group*: the workers that average between two averages of all; None: none do."""

    def __init__(self, run: Run, options: Options, group: Comm | None = None) -> None:
        self.run, self.options, self.group = run, options, group
        self.fragments = make_fragments(options, run)
        self.pending: list[PendingAverage] = []
        """In the order in which they are applied."""
        self.since_group = TrainedSince()
        self._has_reported_rate_0 = False

    # ---- steps ----

    @torch.no_grad()
    def after_update(self) -> None:
        if self.run.active:
            self._count()
        while self.pending and self.run.step >= self.pending[0].due:
            self._apply(self.pending.pop(0))
        if self.run.is_round:
            self._hold_round()

    def _count(self) -> None:
        """Count the samples of a step."""
        weight = self.run.weight * self.run.comm.size
        for fragment in self.fragments:
            fragment.since.weight += weight
        self.since_group.weight += weight

    def _hold_round(self) -> None:
        done = self.run.step + 1
        if self.group is not None and done % self.options.sync_every:
            sent = self._send(0, since=self.since_group, among=self.group)
            self._apply(sent, in_group=True)
            return
        # One fragment a round, in turn: all workers have had as many rounds.
        rounds = sum(fragment.rounds for fragment in self.fragments)
        number = rounds % self.options.fragments
        sent = self._send(number, since=self.fragments[number].since)
        self.since_group.begin(done)
        if self.options.delay:
            self.pending.append(sent)
        else:
            self._apply(sent)

    # ---- one average of the workers' models ----

    def _send(
        self, number: int, *, since: TrainedSince, among: Comm | None = None
    ) -> PendingAverage:
        """Send fragment *number*, to be averaged among all or in a group. Collective.

        Each worker's weight w travels beside it: the averages of w*D and of w arrive. If there is an anchor,
        and the average is of all workers, D is the change since the anchor. Else it is the parameters
        themselves, which are assigned as they are: x - (x - x_i) would be rounded.
        """
        run, options = self.run, self.options
        fragment = self.fragments[number]
        model = fragment.model
        share = since.share(run.step)
        device = model.parameters[0].buffer.device
        sent = PendingAverage(
            number,
            run.step + options.delay,
            torch.tensor([share, run.active], dtype=torch.float64, device=device),
            share=share,
        )
        channel = DELAYED if options.delay else ""

        def average(
            tensor: torch.Tensor, parts: dict[str, torch.Tensor] | None = None
        ) -> None:
            pending = run.average(tensor, among=among, channel=channel, parts=parts)
            sent.pending.append(pending)

        average(sent.weights)
        differences = options.keeps_anchor and among is None
        names = _names(run) if differences else {}
        for index, flat in enumerate(model.parameters):
            flat.gather_in()
            if differences:
                fragment.subtract_from_anchor(index)
            _multiply(flat, share)
            rows = zip(flat.of, flat.views, strict=True)
            average(flat.buffer, {names[id(p)]: v for p, v in rows} if names else None)
        if among is None:
            if options.state == "average":
                sent.moments = flatten_moments(model, run)
            fragment.rounds += 1
        for flat in (*model.statistics, *sent.moments):
            flat.gather_in()
            _multiply(flat, share)
            average(flat.buffer)
        comm = run.comm if among is None else among
        comm = comm.channel(channel) if channel else comm
        for flat in model.counters:
            flat.gather_in()
            sent.pending.append(comm.all_reduce(flat.buffer, "max"))
        since.begin(run.step + 1)
        return sent

    def _apply(self, sent: PendingAverage, *, in_group: bool = False) -> None:
        """Wait for an average, and continue from it. If no worker has trained, nothing changes."""
        sent.wait()
        options, fragment = self.options, self.fragments[sent.fragment]
        model = fragment.model
        total, active = sent.weights.tolist()
        model.scatter_counters()
        if not total:
            return
        # The last round, of what is left when all are out of data, is a plain mean.
        plain = not active
        if plain and options.differences and not in_group:
            self._send_uncompressed(fragment, sent.share)
        for flat in (*model.parameters, *model.statistics, *sent.moments):
            if total != 1:
                flat.buffer.div_(total)
        for flat in (*model.statistics, *sent.moments):
            flat.scatter_out()
        if in_group or not options.keeps_anchor:
            for flat in model.parameters:
                flat.scatter_out()
            return
        for flat, last in zip(model.statistics, fragment.averaged, strict=True):
            last.buffer.copy_(flat.buffer)
        if plain:
            fragment.plain_step()
        else:
            fragment.outer_step(self._rates(fragment))
        for anchor in fragment.anchors:
            _scatter_mixed(anchor, 0.0 if plain else options.keep_local)

    def _send_uncompressed(self, fragment: Fragment, share: float) -> None:
        """Form the last round once more, with the compression error of it: no later round brings that.

        No worker has trained since it was sent. Collective.
        """
        pending = []
        for index, flat in enumerate(fragment.model.parameters):
            flat.gather_in()
            fragment.subtract_from_anchor(index)
            _multiply(flat, share)
            pending.append(self.run.average(flat.buffer))
        for one in pending:
            one.wait()

    def _rates(self, fragment: Fragment) -> list[float] | None:
        """The inner learning rates, in units of which the outer momentum is kept; or None."""
        if not self.options.rescale:
            return None
        rates = learning_rates(self.run, fragment.parameters)
        if 0 in rates and not self._has_reported_rate_0:
            self._has_reported_rate_0 = True
            self.run.report(
                f"{self.options.name}: a learning rate is 0, in whose units the outer momentum is "
                "kept: until it is above 0 these parameters are averaged plainly"
            )
        return rates

    # ---- the end, and evaluations ----

    @torch.no_grad()
    def finish(self) -> None:
        source = self.run.participate_until_all_finish()
        while self.pending:
            self._apply(self.pending.pop(0))
        self._finish_fragments()
        if source is not None:
            self.run.broadcast_model(source)

    def _finish_fragments(self) -> None:
        """Average the changes after the last round plainly, and drop the outer momentum.

        Workers weigh the samples that they have trained on since a fragment's last average. If no worker has
        trained since then, nothing changes. Collective.
        """
        for fragment, total in zip(self.fragments, self._totals(), strict=True):
            if total:
                fragment.model.mean(self.run.comm, fragment.since.weight / total)
                if self.options.keeps_anchor:
                    fragment.take_anchor()
            elif self.options.keep_local:
                fragment.put_anchor()
            fragment.drop_momentum()
            fragment.since.begin(self.run.step)
        self.since_group.begin(self.run.step)

    @torch.no_grad()
    def consolidate(self) -> Callable[[], None]:
        """Put the anchors into the model; without anchors, the average of all workers' models.

        Workers weigh the samples that they have trained on since the last average of all; without any, models
        are equal.
        """
        restores = [fragment.model.snapshot() for fragment in self.fragments]

        def undo() -> None:
            for restore in restores:
                restore()

        if self.options.keeps_anchor:
            for fragment in self.fragments:
                fragment.put_anchor()
        else:
            for fragment, total in zip(self.fragments, self._totals(), strict=True):
                if total:
                    fragment.model.mean(self.run.comm, fragment.since.weight / total)
        return undo

    def _totals(self) -> list[float]:
        """What all workers weigh together, for each fragment. Collective."""
        own = [fragment.since.weight for fragment in self.fragments]
        device = self.run.parameters[0].device
        totals = torch.tensor(own, dtype=torch.float64, device=device)
        self.run.comm.all_reduce(totals, "sum").wait()
        summed: list[float] = totals.tolist()
        return summed

    @torch.no_grad()
    def parameters_replaced(self) -> None:
        """Begin a round from the new parameters.

        Nothing changes where they are the anchor's, as those of a checkpoint are that another
        number of workers goes on from.
        """
        anchored = self.options.keeps_anchor
        if anchored and all(fragment.is_at_anchor() for fragment in self.fragments):
            return
        self._drop_pending()
        for fragment in self.fragments:
            if anchored:
                fragment.take_anchor()
            fragment.since.begin(self.run.step)
        self.since_group.begin(self.run.step)

    def _drop_pending(self) -> None:
        """Averages under way are of another model; their buffers are written to until the end."""
        for sent in self.pending:
            sent.wait()
        self.pending.clear()

    # ---- restarts ----

    @property
    def _layout(self) -> list[Any]:
        """The options that decide which tensors a checkpoint has."""
        options = self.options
        return [options.fragments, options.keeps_anchor, options.outer_momentum > 0]

    def save_state(self) -> dict[str, Any]:
        """Wait for averages under way: all workers have sent their part."""
        run = self.run
        for sent in self.pending:
            sent.wait()
        return {
            "layout": self._layout,
            "fragments": [fragment.save(run.step) for fragment in self.fragments],
            "pending": [
                {
                    "fragment": sent.fragment,
                    "due": sent.due - run.step,
                    "weights": sent.weights,
                    "means": message_tensors(run, self.fragments[sent.fragment].model),
                }
                for sent in self.pending
            ],
            "since_group": self.since_group.save(run.step),
        }

    @torch.no_grad()
    def load_state(self, saved: dict[str, Any]) -> None:
        run = self.run
        if saved["layout"] != self._layout:
            raise UsageError(
                f"{self.options.name}: the checkpoint was saved with another number of "
                "fragments, or with an outer optimizer where there is none now, or the "
                "other way round: load it with the options with which it was saved"
            )
        self._drop_pending()
        for fragment, state in zip(self.fragments, saved["fragments"], strict=True):
            fragment.load(run.step, state)
        for state in saved["pending"]:
            model = self.fragments[state["fragment"]].model
            copy_into(message_tensors(run, model), state["means"])
            weights = state["weights"].to(model.parameters[0].buffer.device)
            due = run.step + state["due"]
            self.pending.append(PendingAverage(state["fragment"], due, weights))
        self.since_group = TrainedSince.load(run.step, saved["since_group"])

    def redistribute_state(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Anchors, momenta and averages under way are equal on all workers.

        A round begins: what each worker has trained since is in the model, or, where there is an
        anchor, gone.
        """
        first = next(iter(parts))
        for fragment in first["fragments"]:
            fragment["since"] = [0, 0.0]
        first["since_group"] = [0, 0.0]
        return first


def _names(run: Run) -> dict[int, str]:
    """Each parameter's name, by its identity."""
    return {
        id(parameter): name
        for bucket in run.buckets
        for parameter, name in zip(bucket.parameters, bucket.names, strict=True)
    }


def _multiply(flat: FlatTensors, share: float) -> None:
    if share != 1:
        flat.buffer.mul_(share)


def _scatter_mixed(anchor: FlatTensors, keep_local: float) -> None:
    """x_i <- alpha*x_i + (1 - alpha)*x, with x in the anchor."""
    if not keep_local:
        anchor.scatter_out()
        return
    for tensor, mean in zip(anchor.tensors, anchor.views, strict=True):
        tensor.copy_(torch.lerp(mean, tensor.to(mean.dtype), keep_local))
