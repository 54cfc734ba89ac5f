"""Averages through a compressor: each of its rounds is one collective.

A compressor's ``average`` is a generator. It yields payloads, which are sent, and continues with the
results. Each continuation is chained to its collective (`Pending.then`), so all ranks run them in the
same order, and while backward still runs.

In virtual time, compression takes time until the first payload is there, and at the wait for the
result. The continuations in between are instants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.compression import (
    COMMON,
    AllToAll,
    Gather,
    GradientCompression,
    Leg,
    RankInfo,
    Request,
    Rounds,
    State,
    Sum,
)
from paceline.core.context import TrainingContext
from paceline.errors import UsageError
from paceline.interfaces import Comm, Pending
from paceline.interfaces.buckets import stand_in_for, stands_in, wire_bytes, wire_shape


class CompressedAverage:
    """One worker's averages through the training's compressor. Holds its state by tensor name.

    Listeners get a call for each compression and decompression, see `Compute.compressed`.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.compression = context.settings.compression
        self._workers, self._rank = context.workers, context.comm.rank
        self._charge = context.listeners.compressed
        self.states: dict[str, State] = {}
        self._under_way: dict[str, Pending] = {}
        self._legs: dict[Any, Sequence[Leg]] = {}
        self._early: dict[Any, Sequence[tuple[int, Sequence[Leg]]]] = {}
        self._sums: Counter[str] = Counter()
        """Number of sums of each stand-in by name: stand-ins have no state that counts them."""
        self.was_used = False
        """Whether anything was sent through it."""

    def sum(
        self,
        comm: Comm,
        buffer: torch.Tensor,
        parts: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        counts: bool = False,
    ) -> Pending | None:
        """Replace *buffer*, this worker's share, by its sum over *comm*.

        *buffer* consists of *parts* with these *names*. *counts*: this worker's share counts, even
        if it is out of data. Returns None if the compressor has nothing to send.
        """
        self.was_used = True
        for name in names:
            # Wait for this tensor's earlier compression, which leaves the state for the next
            # one. Parts of a step may still be under way when the next step sends.
            if name in self._under_way:
                self._under_way[name].wait()
        counts = counts or self._workers.counts
        rows = zip(names, parts, strict=True)
        states = [self._state(name, part, counts) for name, part in rows]
        earlier = 0
        if stands_in(buffer):
            earlier = max((self._sums[name] for name in names), default=0)
            self._sums.update(names)
        pending = self._begin(comm, buffer, parts, states, earlier)
        if pending is not None and self.compression.state != "none":
            pending.track_until_waited(self._under_way, names)
        return pending

    def benchmark(self, comm: Comm, buffer: torch.Tensor) -> Pending | None:
        """Sum *buffer* as one large matrix, only to time it.

        It leaves no state, and compresses as in steady state.
        """
        steady = self.compression.steady_state()
        parts = [buffer] if stands_in(buffer) else _as_matrix(buffer)
        states = [steady.init_state(part, "", self._rank) for part in parts]
        return self._begin(comm, buffer, parts, states, None, steady)

    def _begin(
        self,
        comm: Comm,
        buffer: torch.Tensor,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        earlier: int | None,
        compression: GradientCompression | None = None,
    ) -> _DecompressedSum | None:
        """Start the sum. *earlier*: a stand-in's number of sums before this one; None: steady state."""
        compression = compression or self.compression
        size = wire_bytes(buffer)
        legs: Sequence[Leg] | None = None
        if stands_in(buffer):
            legs = self._traffic(buffer, parts, comm.size, earlier)
            rounds = _sum_stand_in(legs, buffer, comm.size)
        else:
            place = RankInfo(comm.rank, comm.size)
            rounds = compression.average(parts, states, place)
        self._charge(compression, comm.size, size, "encode")
        pending = _Chain(rounds, comm, legs).begin()
        if pending is None:
            return None
        return _DecompressedSum(
            pending, lambda: self._charge(compression, comm.size, size, "decode")
        )

    def _traffic(
        self,
        buffer: torch.Tensor,
        parts: Sequence[torch.Tensor],
        workers: int,
        earlier: int | None,
    ) -> Sequence[Leg]:
        """The collectives, with bytes, of the tensors that *parts* stand in for."""
        if not all(map(stands_in, parts)):
            parts = [buffer]
        shapes = tuple(wire_shape(part) for part in parts)
        key = shapes, parts[0].dtype, workers
        if key not in self._legs:
            code = self.compression.code
            self._early[key] = code.warmup_wire_bytes(*key)
            self._legs[key] = code.steady_state().wire_bytes(*key)
        if earlier is not None:
            for steps, legs in self._early[key]:
                if earlier < steps:
                    return legs
                earlier -= steps
        return self._legs[key]

    def _state(self, name: str, part: torch.Tensor, counts: bool) -> State:
        kind = self.compression.state
        if kind == "none":
            return {}
        if not name:
            raise UsageError(
                f"compression {self.compression.name!r} has a state for each tensor, and this "
                "method sends parts of buckets, which change from step to step. Use a "
                "compressor without state (bf16, fp16, int8), or bsp"
            )
        if name not in self.states:
            self.states[name] = self.compression.init_state(part, name, self._rank)
        kept = self.states[name]
        speaks = counts or self.compression.code.contributes_without_data
        if kind == "own" and not speaks:
            # A worker out of data contributes zeros, without its own error feedback. The sizes
            # of compressed gradients still follow from the common state.
            fresh = self.compression.init_state(part, name, self._rank)
            _share_common(fresh, kept)
            return fresh
        return kept


def _share_common(fresh: State, kept: State) -> None:
    """Put the common state of *kept* into *fresh*, as the same object."""
    for key, value in fresh.items():
        if key == COMMON:
            fresh[key] = kept[key]
        elif isinstance(value, dict):
            _share_common(value, kept[key])


def _as_matrix(buffer: torch.Tensor) -> list[torch.Tensor]:
    """Views of *buffer*: a square matrix, and the remaining elements if there are any."""
    side = math.isqrt(buffer.numel())
    square, rest = buffer[: side * side], buffer[side * side :]
    return [square.view(side, side), *([rest] if rest.numel() else [])]


def _sum_stand_in(legs: Sequence[Leg], buffer: torch.Tensor, workers: int) -> Rounds:
    """Sum *buffer*, a stand-in for a larger one, with the collectives that *legs* lists."""
    total: torch.Tensor | None = None
    for leg in legs:
        answer: torch.Tensor
        if leg.kind == "sum":
            answer = yield Sum(buffer.clone())
        elif leg.kind == "gather":
            answer = (yield Gather(buffer.clone())).sum(0)
        else:
            answer = (yield AllToAll(buffer.repeat(workers))).sum(0)
        total = answer if total is None else total
    if total is not None:
        buffer.copy_(total)


class _Chain:
    """One sum in flight. *legs*: the size on the network of each round, if the gradient is a stand-in."""

    def __init__(self, rounds: Rounds, comm: Comm, legs: Sequence[Leg] | None) -> None:
        self._rounds, self._comm = rounds, comm
        self._legs = None if legs is None else iter(legs)
        self._result: torch.Tensor | None = None

    def begin(self) -> Pending | None:
        return self._next(lambda: next(self._rounds))

    def _next(self, go_on: Callable[[], Request]) -> Pending | None:
        try:
            with torch.no_grad():
                message = go_on()
        except StopIteration:
            return None
        return self._send(message).then(self._continue)

    def _continue(self) -> Pending | None:
        result = self._result
        assert result is not None
        return self._next(lambda: self._rounds.send(result))

    def _send(self, message: Request) -> Pending:
        code = self._with_wire_size(message.code)
        if isinstance(message, Sum):
            self._result = code
            return self._comm.all_reduce(code, "sum")
        workers = self._comm.size
        gathers = isinstance(message, Gather)
        everyone = code.new_empty(code.numel() * (workers if gathers else 1))
        if stands_in(code):
            size = wire_bytes(code) * (workers if gathers else 1)
            stand_in_for(size, everyone)
        self._result = everyone.view(workers, -1)
        if gathers:
            return self._comm.all_gather(everyone, code)
        return self._comm.all_to_all(everyone, code)

    def _with_wire_size(self, code: torch.Tensor) -> torch.Tensor:
        if self._legs is None:
            return code
        return stand_in_for(round(next(self._legs).size), code)


class _DecompressedSum:
    """The `Pending` of a compressed sum. Its wait takes the time of decompression, too."""

    __slots__ = ("_at_end", "_pending")

    def __init__(self, pending: Pending, charge: Callable[[], None]) -> None:
        self._pending, self._at_end = pending, [charge]

    def track_until_waited(
        self, under_way: dict[str, Pending], names: Sequence[str]
    ) -> None:
        """Enter this sum into *under_way* under these *names*, until it has been waited for."""
        under_way |= dict.fromkeys(names, self)

        def untrack() -> None:
            for name in names:
                if under_way.get(name) is self:
                    del under_way[name]

        self._at_end.append(untrack)

    def wait(self) -> None:
        self._pending.wait()
        at_end, self._at_end = self._at_end, []
        for work in at_end:
            work()

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        return self._pending.then(work)
