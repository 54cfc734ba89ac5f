"""A model's parameters on their servers, from one worker's side: the `Remote`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Endpoint, Reception, ServerJob
from paceline.messages import (
    DTYPES,
    FIRST,
    Blend,
    Decide,
    Hyperparameters,
    Join,
    Joined,
    Leave,
    Load,
    LoadState,
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

    Raises `UsageError` for an optimizer that cannot live on a server.
    """

    def __init__(
        self,
        rank: int,
        optimizer: torch.optim.Optimizer,
        endpoints: Sequence[Endpoint],
        job: ServerJob,
        options: str,
        model_buffers: Sequence[torch.Tensor],
        buckets: Sequence[Bucket],
        weight: Callable[[], float],
        most_bytes: int | None = None,
    ) -> None:
        check_servers_can_hold(optimizer)
        self._rank, self._buckets, self._endpoints = rank, list(buckets), endpoints
        self._optimizer, self._weight = optimizer, weight
        self._job, self._options = job, options
        self._plan = split(buckets, optimizer, len(endpoints), most_bytes)
        self._landing = [_like(bucket.buffer) for bucket in buckets]
        self._under_way: list[tuple[int, list[Reception]]] = []
        self._versions: list[list[int]] = []
        self.first_step = 0
        self._pushed_step = 0
        floats = [b for b in model_buffers if b.is_floating_point() and b.numel()]
        counters = [b for b in model_buffers if not b.dtype.is_complex and b.numel()]
        self._floats = floats
        self._counters = [b for b in counters if not b.is_floating_point()]
        self._blending: Reception | None = None
        self._blended = torch.empty(0, dtype=torch.float64)
        self._noted = -NOTE_SECONDS
        self._owner = dict(self._numbered())

    # ---- the `Remote` ----

    def join(self) -> int:
        receptions = []
        for shard, endpoint in enumerate(self._endpoints):
            join = Join(
                options=self._options,
                method=self._job.spec,
                sums=self._job.sums,
                shard=shard,
                units=[
                    [
                        unit
                        for part in parts
                        if part.shard == shard
                        for unit in part.units
                    ]
                    for parts in self._plan
                ],
                dtypes=[_NAMES[bucket.buffer.dtype] for bucket in self._buckets],
                optimizer=type(self._optimizer).__name__,
                hyperparameters=self._hyperparameters(),
                clip_norm=self._job.clip_norm,
                servers=len(self._holding()),
            )
            receptions.append(endpoint.request(join))
        joined = [reception.wait() for reception in receptions]
        step, loaded = 0, True
        for answer in joined:
            assert isinstance(answer, Joined), answer
            step, loaded = max(step, answer.step), loaded and answer.loaded
        if not loaded and self._rank == 0:
            # Before the parameters: nobody's gradient may come in between.
            if self._optimizer.state:
                self.load_state(dict(self._optimizer.state))
            self._load()
        self._optimizer.state.clear()
        self._pull(step)  # servers may be at different steps: all are told the latest
        self.first_step = step
        return step

    def push(self, bucket: Bucket, step: int, stage: int = FIRST) -> None:
        hyperparameters, weight = self._hyperparameters(), self._weight()
        self._pushed_step = step
        if bucket.last:
            self._blend(weight)
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
        if self._blending is not None:
            self._blending.wait()
            self._blending = None
            self._put_buffers()
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
        shards = {part.shard for parts in self._plan for part in parts}
        return [self._endpoints[shard] for shard in sorted(shards)]

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
        self._pull()
        self._blend(0.0)  # adds nothing: all end with the same
        if self._blending is not None:
            self._blending.wait()
            self._put_buffers()

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

    # ---- the model's buffers ----

    def _blend(self, weight: float) -> None:
        """Send BatchNorm's statistics, to be mixed with everybody's, and ask for them."""
        tensors = [*self._floats, *self._counters]
        if not tensors:
            return
        flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
        self._blended = flat.cpu()
        message = Blend(weight=weight, floats=sum(b.numel() for b in self._floats))
        self._blending = self._endpoints[0].request(
            message, self._blended, self._blended
        )

    def _put_buffers(self) -> None:
        tensors = [*self._floats, *self._counters]
        parts = self._blended.split([tensor.numel() for tensor in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    # ---- what the script changes by itself ----

    def take_changes(self) -> None:
        """Where the script has written into the model since the last step, as
        ``load_state_dict`` does: rank 0's values become the servers'."""
        if self._versions and self._versions != self._present_versions():
            if self._rank == 0:
                self._load()
            self._remember_versions()

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

    def load_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Rank 0's *state*, by parameter, becomes the servers'."""
        if self._rank != 0:
            return
        for number, bucket in enumerate(self._buckets):
            for part in self._plan[number]:
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

    def _load(self) -> None:
        waiting = []
        for number, bucket in enumerate(self._buckets):
            landing = self._landing[number]
            for view, parameter in zip(
                landing.split([p.numel() for p in bucket.parameters]),
                bucket.parameters,
                strict=True,
            ):
                view.copy_(parameter.detach().reshape(-1))
            for part in self._plan[number]:
                endpoint, load = self._endpoints[part.shard], Load(bucket=number)
                waiting.append(endpoint.request(load, _cut(landing, part)))
        for reception in waiting:
            reception.wait()

    def _pull(self, step: int = 0) -> None:
        """The servers' parameters become the model's; those of *step*, or newer ones."""
        waiting = [
            self._endpoints[part.shard].request(
                Pull(bucket=number, step=step), into=_cut(self._landing[number], part)
            )
            for number, parts in enumerate(self._plan)
            for part in parts
        ]
        for reception in waiting:
            reception.wait()
        for number in range(len(self._buckets)):
            self._put(number)
        self._remember_versions()

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
