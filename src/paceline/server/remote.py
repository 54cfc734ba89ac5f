"""A model's parameters on their servers, from one worker's side: the `Remote`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Endpoint, Reception, ServerJob
from paceline.messages import (
    DTYPES,
    FIRST,
    Arrive,
    Decide,
    Hyperparameters,
    Join,
    Joined,
    Leave,
    Load,
    LoadState,
    Met,
    Norm,
    NormPart,
    Note,
    OptimizerState,
    Parameters,
    Pull,
    PullNorm,
    PullState,
    Push,
)
from paceline.pieces import check_servers_can_hold
from paceline.server.shards import Part, split
from paceline.server.store import is_per_element
from paceline.server.untrained import Untrained
from paceline.tensors import Bucket, stand_in_for
from paceline.torch_private import version_of

_HOW = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Entries of ``param_groups`` that say how to compute, or on what: a server decides."""

NOTE_SECONDS = 1.0
"""Between two notes there is at least so much time."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class RemoteParameters:
    """Buckets, spread over *endpoints*; *weight* gives this worker's part in the mean;
    *most_bytes* is what a unit may have, where the method wants small ones.

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
        most_bytes: int | None = None,
    ) -> None:
        check_servers_can_hold(optimizer)
        self._rank, self._buckets, self._endpoints = rank, list(buckets), endpoints
        self._optimizer, self._weight = optimizer, weight
        self._job, self._options = job, options
        self._tensors, self._meet_here = list(tensors), meet_here
        self._plan = split(buckets, optimizer, len(endpoints), most_bytes)
        self._landing = [_like(bucket.buffer) for bucket in buckets]
        self._under_way: list[tuple[int, list[Reception]]] = []
        self._versions: list[list[int]] = []
        self.first_step = 0
        self.is_guest = False
        """Whether this worker has joined a training that goes on."""
        self._loads = [0] * len(endpoints)
        """By server: how many loads it had come through when it last answered."""
        self._pushed_step = 0
        self._shards = sorted({part.shard for parts in self._plan for part in parts})
        """Those that hold a part of the model; the first one holds what nobody trains."""
        self._untrained = Untrained(endpoints[self._shards[0]], rest, mixed)
        self._noted = -NOTE_SECONDS
        self._owner = dict(self._numbered())

    # ---- the `Remote` ----

    def join(self) -> int:
        # All who train may just meet at one server after the other. So who joins comes to
        # them backwards, and takes parameters backwards: wherever it is waited for, it is not
        # held up at a server before.
        step, empty = 0, []
        for shard in reversed(range(len(self._endpoints))):
            answer = self._endpoints[shard].request(self._description(shard)).wait()
            assert isinstance(answer, Joined), answer
            step, self._loads[shard] = max(step, answer.step), answer.load
            self.is_guest = self.is_guest or answer.guest
            empty += [] if answer.loaded else [shard]
        if empty and self._rank == 0:
            self._load(empty, dict(self._optimizer.state) or None, self._meet_here)
        self._optimizer.state.clear()
        # Servers may be at different steps: all are told the latest, before any is waited for.
        if step or self.is_guest:
            note = Note(step=step, guest=self.is_guest)
            for reception in [e.request(note) for e in self._holding()]:
                reception.wait()
        for shard in reversed(self._shards):
            self._take([shard], step)
        self._put_all()
        self._catch_up(step)
        if self._meet_here or max(self._loads):
            self._untrained.pull()
        self.first_step = step
        return step

    def _description(self, shard: int) -> Join:
        return Join(
            options=self._options,
            method=self._job.spec,
            sums=self._job.sums,
            shard=shard,
            units=[
                [unit for part in parts if part.shard == shard for unit in part.units]
                for parts in self._plan
            ],
            dtypes=[_NAMES[bucket.buffer.dtype] for bucket in self._buckets],
            optimizer=type(self._optimizer).__name__,
            hyperparameters=self._hyperparameters(),
            clip_norm=self._job.clip_norm,
            servers=len(self._holding()),
            tensors=self._tensors,
        )

    def _catch_up(self, step: int) -> None:
        """Others may load just now: then some servers are through with that, and the rest
        wait for this worker, too."""
        while True:
            most = max(self._loads)
            behind = [shard for shard in self._shards if self._loads[shard] < most]
            if not behind:
                return
            for shard, _ in self._meet_at(behind, Arrive(purpose="load")):
                self._pull(step)
                self._has_pulled(shard)

    def push(self, bucket: Bucket, step: int, stage: int = FIRST) -> None:
        hyperparameters, weight = self._hyperparameters(), self._weight()
        self._pushed_step = step
        if bucket.last:
            self._untrained.blend(weight)
        landing, receptions = self._landing[bucket.index], []
        for part in self._plan[bucket.index]:
            message = Push(
                step=step,
                bucket=bucket.index,
                stage=stage,
                weight=weight,
                used=[bucket.used[self._slot(bucket, unit)] for unit in part.units],
                hyperparameters=hyperparameters,
            )
            receptions.append(
                self._endpoints[part.shard].request(
                    message, _cut(bucket.buffer, part), _cut(landing, part)
                )
            )
        self._under_way.append((bucket.index, receptions))

    def wait(self) -> int:
        told = self._agree_on_norm() or self._pass_on_decision()
        steps: dict[tuple[int, Part], int] = {}
        for number, receptions in self._under_way:
            for part, reception in zip(self._plan[number], receptions, strict=True):
                answer = reception.wait()
                assert isinstance(answer, Parameters), answer
                steps[number, part] = answer.step
        for reception in told:
            reception.wait()
        step = max(steps.values())
        behind = []
        if step > self._pushed_step + 1:
            # This step came too late, and servers may have gone on to different ones.
            behind = [place for place, its in steps.items() if its < step]
        for reception in [self._ask_for(*place, step) for place in behind]:
            reception.wait()
        self._untrained.arrived()
        for number, _ in self._under_way:
            self._put(number)
        self._under_way.clear()
        self._remember_versions()
        return step

    def _pass_on_decision(self) -> list[Reception]:
        """Where server 0 decides who counts, tell the others."""
        coordinates = getattr(self._job.method, "coordinates", False)
        if len(self._endpoints) == 1 or not coordinates:
            return []
        counted: list[int] = []
        for number, receptions in self._under_way:
            for part, reception in zip(self._plan[number], receptions, strict=True):
                if part.shard == 0:
                    answer = reception.wait()
                    assert isinstance(answer, Parameters), answer
                    counted = counted or answer.counted
        return self._tell_who_counted(counted)

    def _tell_who_counted(self, counted: list[int]) -> list[Reception]:
        if not counted:
            return []  # all were waited for
        decide = Decide(step=self._pushed_step, workers=counted)
        return [endpoint.request(decide) for endpoint in self._endpoints[1:]]

    def _agree_on_norm(self) -> list[Reception]:
        """Where servers clip, and several hold parts: each is told the norm of all parts.
        They answer no push before that."""
        holding = self._holding()
        if self._job.clip_norm == math.inf or len(holding) == 1:
            return []
        step, squares = self._pushed_step, []
        told: list[Reception] = []
        asked = [e.request(PullNorm(step=step)) for e in holding]
        for number, reception in enumerate(asked):
            part = reception.wait()
            assert isinstance(part, NormPart), part
            squares.append(part.squares)
            if number == 0 and getattr(self._job.method, "coordinates", False):
                told = self._tell_who_counted(part.counted)
        norm = Norm(step=step, squares=math.fsum(squares))
        return told + [endpoint.request(norm) for endpoint in holding]

    def _holding(self) -> list[Endpoint]:
        """The servers that hold a part of the model."""
        return [self._endpoints[shard] for shard in self._shards]

    def _ask_for(self, number: int, part: Part, step: int) -> Reception:
        landing = _cut(self._landing[number], part)
        pull = Pull(bucket=number, step=step)
        return self._endpoints[part.shard].request(pull, into=landing)

    def note(self, now: float) -> None:
        """Let the servers know that this worker is alive; more than once a second changes
        nothing."""
        if now - self._noted >= NOTE_SECONDS:
            self._noted = now
            for endpoint in self._endpoints:
                endpoint.request(Note())  # nobody waits for the answer

    def leave(self) -> None:
        self._under_way.clear()
        for reception in [e.request(Leave()) for e in self._endpoints]:
            reception.wait()
        before = max(self._loads)
        self._pull()
        if max(self._loads) > before:  # those who trained longer have loaded
            self._untrained.pull()
        self._untrained.blend(0.0)  # adds nothing: all end with the same
        self._untrained.arrived()

    def consolidate(self) -> Callable[[], None]:
        before = [[p.detach().clone() for p in b.parameters] for b in self._buckets]
        self._pull()

        def undo() -> None:
            with torch.no_grad():
                for bucket, mine in zip(self._buckets, before, strict=True):
                    for parameter, value in zip(bucket.parameters, mine, strict=True):
                        parameter.copy_(value)
            self._remember_versions()

        return undo

    # ---- what the script changes by itself ----

    def check_unwritten(self, method: str) -> None:
        """Raise `UsageError` where the script has written into a parameter since the last
        step: the next answer would write over it, and nobody else would ever see it."""
        if not self._versions:
            return
        for bucket, before in zip(self._buckets, self._versions, strict=True):
            for name, parameter, version in zip(
                bucket.names, bucket.parameters, before, strict=True
            ):
                if version_of(parameter) != version:
                    raise UsageError(
                        f"parameter {name!r} was written to since step(): under {method} "
                        "servers hold the parameters, and what is written here reaches "
                        "nobody. Evaluate other weights in a copy of the model, or inside "
                        "`with optimizer.consolidated():`, which takes back what is "
                        "written; to change them for all, call load_state_dict on every "
                        "worker, or write before distribute, or after finish()"
                    )

    def load(
        self, state: dict[torch.Tensor, dict[str, Any]] | None, rest: bool
    ) -> None:
        """What the script has loaded into the model since the last step, the optimizer's
        *state* unless it stays, and the *rest* of the model, as the lowest rank has them,
        become the servers' and everybody's. Collective over those that train."""
        arrive = Arrive(purpose="load", brings=True)
        for shard, leads in self._meet_at(self._shards, arrive):
            if leads:
                self._load([shard], state, rest and shard == self._shards[0])
            self._take([shard])
            if rest and shard == self._shards[0]:
                self._untrained.pull()
            self._has_pulled(shard)
        self._put_all()

    def meet(self) -> bool:
        """Wait for all that train: then each has the answers to what it sent. Returns whether
        this is the lowest rank of those who met. Collective over them."""
        arrive = Arrive(purpose="meet")
        met = dict(self._meet_at(self._shards, arrive))
        return met[self._shards[0]]

    def take_again(self) -> None:
        """What the script has written is not wanted: take all from the servers."""
        self._pull()
        self._untrained.pull()

    def _meet_at(
        self, shards: Collection[int], arrive: Arrive
    ) -> Iterator[tuple[int, bool]]:
        """Arrive at these servers; then for each whether this worker is to load what all go
        on from. One after the other, in the same order on all workers: who waits for one
        server has done its part at those before."""
        waiting = [(shard, self._endpoints[shard].request(arrive)) for shard in shards]
        for shard, reception in waiting:
            answer = reception.wait()
            assert isinstance(answer, Met), answer
            yield shard, answer.leads

    def _has_pulled(self, shard: int) -> None:
        for _ in self._meet_at([shard], Arrive(purpose="pulled")):
            pass

    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The optimizer's state, by parameter, in torch's own form."""
        found: dict[int, dict[str, list[Any]]] = {}
        for number, bucket in enumerate(self._buckets):
            for part in self._plan[number]:
                into = torch.empty(
                    8 * (part.stop - part.start), dtype=bucket.buffer.dtype
                )
                reception = self._endpoints[part.shard].request(
                    PullState(bucket=number), into=into
                )
                answer = reception.wait()
                assert isinstance(answer, OptimizerState), answer
                for unit, entries in zip(part.units, answer.entries, strict=True):
                    mine = found.setdefault(unit.parameter, {})
                    for name, value in entries:
                        whole = isinstance(value, int)
                        at = int(value)
                        mine.setdefault(name, []).append(
                            into[at : at + unit.elements].clone() if whole else value
                        )
        return {
            self._owner[number]: {
                name: _merged(values, self._owner[number])
                for name, values in entries.items()
            }
            for number, entries in found.items()
        }

    def keep_state(self) -> None:
        """Training is over: the optimizer takes over its state from the servers."""
        self._optimizer.state.update(self.state())

    def _load_state(
        self, shards: Collection[int], state: dict[torch.Tensor, dict[str, Any]]
    ) -> None:
        for number, bucket in enumerate(self._buckets):
            for part in self._plan[number]:
                if part.shard not in shards:
                    continue
                entries: list[list[tuple[str, int | float]]] = []
                parts, offset = [bucket.buffer.new_empty(0)], 0
                for unit in part.units:
                    mine: list[tuple[str, int | float]] = []
                    owner = self._owner[unit.parameter]
                    for name, value in state.get(owner, {}).items():
                        if is_per_element(value, owner):
                            mine.append((name, offset))
                            flat = value.detach().reshape(-1)
                            parts.append(flat[unit.start : unit.stop])
                            offset += unit.elements
                        elif value is not None:
                            mine.append((name, float(value)))
                    entries.append(mine)
                message = LoadState(bucket=number, entries=entries)
                self._endpoints[part.shard].request(message, torch.cat(parts)).wait()

    # ---- help ----

    def _hyperparameters(self) -> Hyperparameters:
        return [
            {
                name: _plain(name, value)
                for name, value in group.items()
                if name not in _HOW
            }
            for group in self._optimizer.param_groups
        ]

    def _load(
        self,
        shards: Collection[int],
        state: dict[torch.Tensor, dict[str, Any]] | None,
        rest: bool,
    ) -> None:
        """Send these servers what all go on from. It takes effect with the parameters, which
        come last."""
        if rest:
            self._untrained.load()
        if state is not None:
            self._load_state(shards, state)
        if self._versions:
            # What the script has not written may be out of date here.
            for reception in self._ask_for_all(shards, 0):
                reception.wait()
        now = self._present_versions()
        for number, bucket in enumerate(self._buckets):
            views = self._landing[number].split([p.numel() for p in bucket.parameters])
            for slot, (view, parameter) in enumerate(
                zip(views, bucket.parameters, strict=True)
            ):
                before = self._versions[number] if self._versions else None
                if before is None or before[slot] != now[number][slot]:
                    view.copy_(parameter.detach().reshape(-1))
        waiting = [
            self._endpoints[part.shard].request(
                Load(bucket=number), _cut(self._landing[number], part)
            )
            for number, parts in enumerate(self._plan)
            for part in parts
            if part.shard in shards
        ]
        for reception in waiting:
            reception.wait()

    def _ask_for_all(self, shards: Collection[int], step: int) -> list[Reception]:
        return [
            self._ask_for(number, part, step)
            for number, parts in enumerate(self._plan)
            for part in parts
            if part.shard in shards
        ]

    def _pull(self, step: int = 0) -> None:
        """The servers' parameters become the model's; those of *step*, or newer ones."""
        self._take(self._shards, step)
        self._put_all()

    def _take(self, shards: Collection[int], step: int = 0) -> None:
        """Pull what these servers hold, and do not put it in yet."""
        waiting = self._ask_for_all(shards, step)
        answers = [reception.wait() for reception in waiting]
        places = [
            (number, part)
            for number, parts in enumerate(self._plan)
            for part in parts
            if part.shard in shards
        ]
        for (number, part), answer in zip(places, answers, strict=True):
            assert isinstance(answer, Parameters), answer
            self._loads[part.shard] = max(self._loads[part.shard], answer.load)
            self._pulled(number, part, answer)

    def _put_all(self) -> None:
        for number in range(len(self._buckets)):
            self._put(number)
        self._remember_versions()

    def _pulled(self, number: int, part: Part, answer: Parameters) -> None:
        """What a server says about a bucket, beside its parameters."""

    def _put(self, number: int) -> None:
        bucket = self._buckets[number]
        sizes = [parameter.numel() for parameter in bucket.parameters]
        with torch.no_grad():
            for parameter, part in zip(
                bucket.parameters, self._landing[number].split(sizes), strict=True
            ):
                parameter.copy_(part.view(parameter.shape))

    def _present_versions(self) -> list[list[int]]:
        return [[version_of(p) for p in bucket.parameters] for bucket in self._buckets]

    def _remember_versions(self) -> None:
        self._versions = self._present_versions()

    def _numbered(self) -> list[tuple[int, torch.nn.Parameter]]:
        pairs = []
        for bucket, parts in zip(self._buckets, self._plan, strict=True):
            numbers = dict.fromkeys(u.parameter for part in parts for u in part.units)
            pairs += list(zip(numbers, bucket.parameters, strict=True))
        return pairs

    def _slot(self, bucket: Bucket, unit: Any) -> int:
        owner = self._owner[unit.parameter]
        return next(i for i, p in enumerate(bucket.parameters) if p is owner)


def _cut(flat: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a bucket's buffer; of one that stands for more bytes, its share."""
    stands_for: int | None = getattr(flat, "stands_for_bytes", None)
    piece = flat[part.start : part.stop]
    if stands_for is not None:
        stand_in_for(stands_for * piece.numel() // flat.numel(), piece)
    return piece


def _like(buffer: torch.Tensor) -> torch.Tensor:
    landing = torch.empty_like(buffer)
    stands_for: int | None = getattr(buffer, "stands_for_bytes", None)
    return landing if stands_for is None else stand_in_for(stands_for, landing)


def _merged(values: list[Any], parameter: torch.Tensor) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values).view(parameter.shape)
    return torch.tensor(values[0], dtype=torch.float32)


def _plain(name: str, value: Any) -> Any:
    """A hyperparameter as a message can hold it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"hyperparameter {name!r}: expected a number, a truth value or a list of them for "
        f"an optimizer that lives on a server, got {type(value).__name__}"
    )
