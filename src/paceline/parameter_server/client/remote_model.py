"""A model's parameters on their servers, from one worker's side: the `Remote`.

`partition` says what lies where, `synchronization` how this worker comes to hold it, and `optimizer_state` has the
optimizer's state. Here is what a step does: pushes, and the wait for their answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from paceline.interfaces import (
    Arrived,
    Endpoint,
    PartialOptimizer,
    Reception,
    ServerJob,
    SpeedClass,
    Told,
    UnitPlace,
)
from paceline.interfaces.buckets import Bucket, stand_alike
from paceline.interfaces.server_messages import (
    DTYPES,
    Decide,
    Join,
    Leave,
    Norm,
    NormPart,
    Note,
    Parameters,
    PullNorm,
    Push,
)
from paceline.parameter_server.client.compression import Charge, Encoding
from paceline.parameter_server.client.optimizer_state import LATE_CHANNEL, States
from paceline.parameter_server.client.partition import HeldPart, Spread, cut
from paceline.parameter_server.client.remote_buffers import Untrained
from paceline.parameter_server.client.synchronization import Joining
from paceline.parameter_server.optim.pieces import check_servers_can_hold
from paceline.timeouts import timeouts

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Sent(NamedTuple):
    """A push under way, of some of a part's *units*; *landing* takes their parameters."""

    reception: Reception
    part: HeldPart
    units: Sequence[int]
    landing: torch.Tensor

    def answer(self) -> Parameters:
        answer = self.reception.wait()
        assert isinstance(answer, Parameters), answer
        return answer


class RemoteParameters:
    """Buckets, spread over *endpoints*; *weight* gives this worker's part in the mean;
    *charge* is told of codes; *most_bytes* is what a unit may have, where the method wants small
    ones.

    *tensors* are a line for each of the model's, as all workers must have them; *rest* those
    that nobody trains, which all begin with as rank 0 has them, where they *meet_here* and
    nowhere else; *mixed* those of them that every step mixes.

    Raises `UsageError` for an optimizer that cannot live on a server.
    """

    def __init__(
        self,
        rank: int,
        optimizer: torch.optim.Optimizer,
        endpoints: Sequence[Endpoint],
        job: ServerJob,
        options: str,
        tensors: Sequence[str],
        rest: Sequence[torch.Tensor],
        mixed: Sequence[torch.Tensor],
        meet_here: bool,
        buckets: Sequence[Bucket],
        weight: Callable[[], float],
        charge: Charge = lambda *_: None,
        most_bytes: int | None = None,
    ) -> None:
        check_servers_can_hold(optimizer)
        self._endpoints, self._weight = endpoints, weight
        self._job, self._options, self._tensors = job, options, list(tensors)
        self._coordinates = job.method is not None and job.method.coordinates
        # Whatever the device, sums of differences are the processor's, as on servers.
        differs = job.replies == "deltas"
        group = None if job.groups is None else job.groups.of[rank]
        self._spread = spread = Spread(
            buckets, optimizer, endpoints, most_bytes, differs, group
        )
        self.encoding: Encoding | None = None
        """Where gradients are compressed."""
        if job.compression:
            self.encoding = Encoding(job.compression, rank, spread, job.replies, charge)
        self._untrained = Untrained(spread, rest, mixed)
        self._states = States(spread)
        self._joining = Joining(
            rank, spread, self._states, self._untrained, self._description, meet_here
        )
        self._main: list[_Sent] = []
        self._late: list[_Sent] = []
        self._pushed_step, self._next_step = 0, 0
        # Of pushes of some units, by bucket. Late ones have memory of their own: backward
        # writes into buckets meanwhile.
        self._some = [torch.empty(0) for _ in buckets]
        self._some_late = [torch.empty(0) for _ in buckets]
        self._noted = -timeouts.progress_note
        self.staleness = 0
        """Updates by others while the last step's gradient was computed and sent: the most of any
        part of the model."""

    def _description(self, server: int) -> Join:
        spread = self._spread
        return Join(
            options=self._options,
            method=self._job.spec,
            shard=server,
            units=[
                [unit for part in parts for unit in part.units]
                for parts in spread.on(server)
            ],
            dtypes=[_NAMES[bucket.buffer.dtype] for bucket in spread.buckets],
            optimizer=type(spread.optimizer).__name__,
            hyperparameters=spread.hyperparameters(),
            clip_norm=self._job.clip_norm,
            servers=len(spread.layout.homes),
            tensors=self._tensors,
            compression=self._job.compression,
            replies=self._job.replies,
        )

    # ---- a step ----

    def push(
        self,
        bucket: Bucket,
        step: int,
        units: Collection[int] | None = None,
        late: bool = False,
        report: bytes = b"",
    ) -> None:
        hyperparameters, weight = self._spread.hyperparameters(), self._weight()
        chosen = None if units is None else set(units)
        self._pushed_step, self._next_step = step, step + 1
        if bucket.last and not late:
            self._untrained.blend(weight)
        # Servers know shapes and no strides.
        gradient = bucket.by_index()
        for part in self._spread.parts[bucket.index]:
            mine = part.own(chosen)
            if late and not mine:
                continue
            payload, landing = self._memory(bucket, gradient, part, mine, late, weight)
            message = Push(
                step=step,
                bucket=bucket.index,
                late=late,
                units=None if len(mine) == len(part.units) else mine,
                weight=weight,
                used=[bucket.used[part.slots[unit]] for unit in mine],
                hyperparameters=hyperparameters,
                report=report,
            )
            reception = self._spread.endpoint(part).request(
                message,
                payload if mine else None,
                landing if mine else None,
                channel=LATE_CHANNEL if late else "",
            )
            under_way = self._late if late else self._main
            under_way.append(_Sent(reception, part, mine, landing))

    def _memory(
        self,
        bucket: Bucket,
        gradient: torch.Tensor,
        part: HeldPart,
        units: Sequence[int],
        late: bool,
        weight: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent of a part, and where its answer lands."""
        if self.encoding is not None:
            code = self.encoding.pushed(bucket, gradient, part, weight)
            return code, self.encoding.room(part)
        landing = self._spread.landing_of(part)
        if len(units) == len(part.units) and not late:
            return cut(gradient, part.start, part.stop), landing
        places = self._spread.places(part, units)
        size = sum(place.stop - place.start for place in places)
        memory = self._some_late if late else self._some
        if memory[bucket.index].numel() < bucket.buffer.numel():
            memory[bucket.index] = torch.empty_like(bucket.buffer)
        payload = memory[bucket.index][part.start : part.start + size]
        start = 0
        for place in places:
            stop = start + place.stop - place.start
            payload[start:stop].copy_(gradient[place.start : place.stop])
            start = stop
        into = payload if late else landing[:size]
        return stand_alike(payload, bucket.buffer), stand_alike(into, bucket.buffer)

    def wait(self) -> int:
        told = self._agree_on_norm() or self._pass_on_decision()
        answers = [sent.answer() for sent in self._main]
        for reception in told:
            reception.wait()
        self._note_staleness(answers)
        for sent, answer in zip(self._main, answers, strict=True):
            self._spread.hear_words(sent.part, answer)
            if self.encoding is not None:
                self.encoding.arrived(sent.part, answer)
        steps = [answer.step for answer in answers]
        step = max(steps)
        if step > self._pushed_step + 1:
            # This step came too late, and servers may have gone on to different ones.
            sent_steps = zip(self._main, steps, strict=True)
            self._joining.take(
                [sent.part for sent, its in sent_steps if its < step], step
            )
        self._untrained.arrived()
        for number in dict.fromkeys(sent.part.bucket for sent in self._main):
            self._spread.put(number)
        self._main.clear()
        self._spread.remember_versions()
        return step

    def arrived(self, late: bool = False) -> list[Arrived]:
        told = [] if late else self._agree_on_norm() or self._pass_on_decision()
        for reception in told:
            reception.wait()
        under_way = self._late if late else self._main
        found = []
        answers = [sent.answer() for sent in under_way]
        if not late:
            self._note_staleness(answers)
        for sent, answer in zip(under_way, answers, strict=True):
            if not late:
                self._spread.hear(sent.part, answer)
            start = 0
            for unit in sent.units:
                stop = start + sent.part.units[unit].elements
                number = sent.part.first + unit
                found.append(
                    Arrived(sent.part.bucket, number, sent.landing[start:stop])
                )
                start = stop
        under_way.clear()
        if not late:
            self._untrained.arrived()
        return found

    def _note_staleness(self, answers: Sequence[Parameters]) -> None:
        """Before they are heard."""
        pairs = zip(self._main, answers, strict=True)
        updates = (
            self._spread.updates_by_others(s.part, answer) for s, answer in pairs
        )
        self.staleness = max(updates, default=0)

    def _pass_on_decision(self) -> list[Reception]:
        """Where server 0 decides who counts, tell the others."""
        if len(self._endpoints) == 1 or not self._coordinates:
            return []
        counted: list[int] = []
        for sent in self._main:
            if sent.part.shard == 0:
                counted = counted or sent.answer().counted
        return self._tell_who_counted(counted)

    def _tell_who_counted(self, counted: list[int]) -> list[Reception]:
        if not counted:
            return []  # all were waited for
        decide = Decide(step=self._pushed_step, workers=counted)
        return [endpoint.request(decide) for endpoint in self._endpoints[1:]]

    def _agree_on_norm(self) -> list[Reception]:
        """Where servers clip, and several hold parts: each is told the norm of all parts.
        They answer no push before that."""
        holding = [self._endpoints[home] for home in self._spread.layout.homes]
        if self._job.clip_norm == math.inf or len(holding) == 1:
            return []
        step, squares = self._pushed_step, []
        told: list[Reception] = []
        asked = [e.request(PullNorm(step=step)) for e in holding]
        for number, reception in enumerate(asked):
            part = reception.wait()
            assert isinstance(part, NormPart), part
            squares.append(part.squares)
            if number == 0 and self._coordinates:
                told = self._tell_who_counted(part.counted)
        norm = Norm(step=step, squares=math.fsum(squares))
        return told + [endpoint.request(norm) for endpoint in holding]

    def note(self, now: float) -> None:
        """Let the servers know that this worker is alive; more than once a second changes
        nothing."""
        if now - self._noted >= timeouts.progress_note:
            self._noted = now
            for endpoint in self._endpoints:
                endpoint.request(Note())  # nobody waits for the answer

    # ---- the model ----

    def join(self) -> int:
        return self._joining.join()

    @property
    def first_step(self) -> int:
        return self._joining.first_step

    @property
    def is_guest(self) -> bool:
        """Whether this worker has joined a training that goes on."""
        return self._joining.is_guest

    @property
    def is_over(self) -> bool:
        """Whether an earlier life of this worker has done all of its steps."""
        return self._joining.is_over

    def leave(self) -> None:
        self._main.clear()
        for reception in [e.request(Leave()) for e in self._endpoints]:
            reception.wait()
        self._joining.take_what_is_final()
        self._untrained.blend(0.0)  # adds nothing: all end with the same
        self._untrained.arrived()

    def consolidate(self) -> Callable[[], None]:
        buckets = self._spread.buckets
        before = [[p.detach().clone() for p in b.parameters] for b in buckets]
        # A pull would count as the model that the next gradient is computed with: its staleness,
        # and the differences that servers send, are from what this worker holds.
        self._joining.look()

        def undo() -> None:
            with torch.no_grad():
                for bucket, mine in zip(buckets, before, strict=True):
                    for parameter, value in zip(bucket.parameters, mine, strict=True):
                        parameter.copy_(value)
            self._spread.remember_versions()

        return undo

    def meet(self) -> bool:
        """See `Joining.meet`."""
        return self._joining.meet(self._next_step)

    def load(
        self, state: dict[torch.Tensor, dict[str, Any]] | None, rest: bool
    ) -> None:
        """See `Joining.load`."""
        self._joining.load(state, rest)

    def take_again(self) -> None:
        """See `Joining.take_again`."""
        self._joining.take_again()

    def check_unwritten(self, method: str) -> None:
        """See `Spread.check_unwritten`."""
        self._spread.check_unwritten(method)

    def written(self) -> None:
        self._spread.remember_versions()

    # ---- groups ----

    @property
    def group(self) -> int:
        return self._spread.layout.homes[0]

    def move(self, group: int, step: int) -> None:
        assert not self._main, "between two steps nothing is under way"
        before = self.group
        self._spread.move(group)
        self._endpoints[before].request(Note(elsewhere=True)).wait()
        self._endpoints[group].request(Note(step=step)).wait()
        self._joining.pull(step)
        self._untrained.pull_buffers()

    def has_speed(self, speed: SpeedClass) -> None:
        if self.encoding is not None:
            self.encoding.has_speed(speed)

    # ---- units, and the optimizer ----

    @property
    def units(self) -> Sequence[Sequence[UnitPlace]]:
        return self._spread.units

    def unit_bytes(self, bucket: int) -> list[int]:
        return self._spread.unit_bytes(bucket)

    def told(self, bucket: int) -> list[Told]:
        return self._spread.told(bucket)

    def own_optimizer(self) -> PartialOptimizer:
        return self._spread.own_optimizer()

    def ask_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        self._states.ask(units, step)

    def states(self) -> list[tuple[int, int, dict[str, Any]]]:
        return self._states.arrived()

    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """See `States.whole`."""
        return self._states.whole()

    def keep_state(self) -> None:
        """See `States.keep`."""
        self._states.keep()
