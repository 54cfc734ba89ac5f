"""The algorithm of all local-update methods: rounds of inner steps, each followed by an outer step.

    round:  H inner steps of each worker;  D_i = x - x_i;  D = sum w_i D_i / sum w_i
    outer:  u <- b*u + D;   x <- x - eta*(D + b*u) (Nesterov), or x - eta*u
    start:  x_i <- x;  or, tau steps later,  x_i <- alpha*x_i + (1 - alpha)*x

Theory of operation
-------------------
All work happens after the optimizer's update:

1. Every step adds this worker's samples to the counts (`TrainedSince`).
2. At the end of a round, workers send a fragment of the model (`_send`).
3. They apply its average (`_apply`), at once or `delay` steps later.

The step number determines the fragment, so workers need no agreement.

A worker that is out of data continues to take part in rounds. Its weight in the next round is the
number of samples it has trained on since the last one. If no worker trains any more, workers take
the plain average, without outer momentum. The same holds for changes after the last round
(`_finish_fragments`).

Only differences are compressed. The compression error grows with the compressed values. Parameters
stay large however little they change, so their compression error would exceed the change.
Compression may defer much of a change to a later round, so the last round is repeated uncompressed.
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
"""The channel of delayed averages, so that the script's own collectives never wait for them."""


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Options):
    """The base of all presets: workers train alone, and average their models every `sync_every` steps."""

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
        """Whether `consolidate` is collective: without anchors it averages all models."""
        return not self.keeps_anchor

    def compressed_by(self, compressor: str) -> Self:
        """Return options in which workers send differences, since only differences are compressed."""
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
    """Runs the algorithm on one worker, as hooks of a training.

    Args:
        run: The training.
        options: The method's options.
        group: The communicator of this worker's group, which also averages between two averages of
            all workers. None: there are no groups.
    """

    def __init__(self, run: Run, options: Options, group: Comm | None = None) -> None:
        self.run, self.options, self.group = run, options, group
        self.fragments = make_fragments(options, run)
        self.pending: list[PendingAverage] = []
        """Averages in flight, in the order in which they are applied."""
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
        """Add this step's samples to all counts."""
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
        # Fragments take turns. All workers have had equally many rounds, so they pick the same one.
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
        """Start to average fragment *number* over all workers, or over the group *among*. Collective.

        Workers also send their weights w, so the averages of w*D and of w arrive. With an anchor and all
        workers, D is the change since the anchor. Otherwise D is the parameters, which `_apply` assigns
        unchanged, since x - (x - x_i) would add rounding errors.
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
        """Wait for an average, and apply it to the model. If no worker has trained, nothing changes."""
        sent.wait()
        options, fragment = self.options, self.fragments[sent.fragment]
        model = fragment.model
        total, active = sent.weights.tolist()
        model.scatter_counters()
        if not total:
            return
        # All workers are out of data: the rest of the last round is averaged plainly.
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
        """Average the changes of the last round again, uncompressed. Collective.

        No later round would correct its compression error. No worker has trained since it was sent, so
        the changes can be computed again.
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
        """Return the inner learning rates as units of the outer momentum; None without `rescale`."""
        if not self.options.rescale:
            return None
        rates = learning_rates(self.run, fragment.parameters)
        if 0 in rates and not self._has_reported_rate_0:
            self._has_reported_rate_0 = True
            self.run.report(
                f"{self.options.name}: a learning rate is 0, and the outer momentum is in units of the "
                "learning rate. These parameters are averaged plainly until it is above 0"
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
        """Average the changes after the last round plainly, and drop the outer momentum. Collective.

        A worker's weight is the number of samples it has trained on since a fragment's last average. If no
        worker has trained since then, no average is formed, and with `keep_local` the anchor is loaded.
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
        """Load the model to evaluate or save: the anchors, or without anchors the average of all models.

        A worker's weight in the average is the number of samples it has trained on since the last average
        of all workers. If no worker has trained since then, all models are already equal.

        Returns:
            A function that restores this worker's own model.
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
        """Return the sum of all workers' weights, for each fragment. Collective."""
        own = [fragment.since.weight for fragment in self.fragments]
        device = self.run.parameters[0].device
        totals = torch.tensor(own, dtype=torch.float64, device=device)
        self.run.comm.all_reduce(totals, "sum").wait()
        summed: list[float] = totals.tolist()
        return summed

    @torch.no_grad()
    def parameters_replaced(self) -> None:
        """Begin a round from parameters that the script has replaced.

        Nothing changes if they equal the anchor. This is so after loading a checkpoint of another number
        of workers.
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
        """Discard averages in flight. Wait for them first, since they still write to their buffers."""
        for sent in self.pending:
            sent.wait()
        self.pending.clear()

    # ---- restarts ----

    @property
    def _layout(self) -> list[Any]:
        """The options that determine which tensors a checkpoint contains."""
        options = self.options
        return [options.fragments, options.keeps_anchor, options.outer_momentum > 0]

    def save_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, after waiting for all averages in flight.

        The wait ends because all workers have sent their parts.
        """
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
                f"{self.options.name}: the checkpoint does not fit the current options. The number of "
                "fragments, the anchors, or the outer momentum differ. Load it with the options with "
                "which it was saved"
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
        """Merge the states of all workers for another number of workers.

        Anchors, momenta and averages in flight are equal on all workers. A new round begins. The changes of
        the unfinished round are in the model; with anchors, they are dropped.

        Args:
            parts: The state of each worker.

        Returns:
            The state for every new worker.
        """
        first = next(iter(parts))
        for fragment in first["fragments"]:
            fragment["since"] = [0, 0.0]
        first["since_group"] = [0, 0.0]
        return first


def _names(run: Run) -> dict[int, str]:
    """Return each parameter's name by the ``id`` of the parameter."""
    return {
        id(parameter): name
        for bucket in run.buckets
        for parameter, name in zip(bucket.parameters, bucket.names, strict=True)
    }


def _multiply(flat: FlatTensors, share: float) -> None:
    if share != 1:
        flat.buffer.mul_(share)


def _scatter_mixed(anchor: FlatTensors, keep_local: float) -> None:
    """Mix the anchor x into the parameters: x_i <- alpha*x_i + (1 - alpha)*x."""
    if not keep_local:
        anchor.scatter_out()
        return
    for tensor, mean in zip(anchor.tensors, anchor.views, strict=True):
        tensor.copy_(torch.lerp(mean, tensor.to(mean.dtype), keep_local))
