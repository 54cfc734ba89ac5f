"""Codes between workers and a server, and the server's half of them.

Pushes
------
With g a worker's gradient, w its weight, e the residual that the worker keeps, where it keeps
one, and C the code:

    the worker sends C(w g + e);  the server decodes it, and divides by w

so that disciplines, norms and optimizers see a gradient as without compression, and residuals
are shares of the mean as they are where workers form it. What a step leaves out because it was
late is left out as it was decoded.

Answers
-------
Where they are differences the server keeps what each worker holds, its *shadow* h. A pull gives
all of the parameters x, and then h is x. A push is answered with

    C(x - h);  h = h + decoded C(x - h)

and the worker adds the same to what it holds, which so has the bits of h. What a code leaves out
is in the next difference: h is the residual. This is EF21-P (Gruntkowska, Tyurin and Richtarik,
"EF21-P and friends", ICML 2023) with one h for each worker, since each is answered at a time of
its own. It wants a code that brings h nearer to x: see `compression_checks`.

Decoded numbers are added where all of them stand, and not as they are decoded: a processor that
multiplies and adds in one instruction would end with other bits than one that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.compression import make, pure
from paceline.errors import UsageError
from paceline.interfaces import Compressor, State
from paceline.interfaces.buckets import stands_in
from paceline.interfaces.server_messages import Join, Push, Unit
from paceline.parameter_server.state_machine.compression_checks import (
    check_decodes_per_worker,
)
from paceline.parameter_server.state_machine.store import Store


def shape_of(unit: Unit) -> tuple[int, ...]:
    """What a code sees of a unit: a part of a tensor is a matrix of one row, since vectors may
    be left alone as small."""
    return (1, unit.elements) if unit.shape is None else unit.shape


def views(flat: torch.Tensor, units: Sequence[Unit]) -> list[torch.Tensor]:
    """The *units* in a *flat* part of a bucket, in the shapes that codes see."""
    pieces = flat.split([unit.elements for unit in units])
    return [
        piece.view(shape_of(unit)) for piece, unit in zip(pieces, units, strict=True)
    ]


def code_bytes(
    compressor: Compressor, shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> int:
    """What one code of tensors of these *shapes* is, once all first steps are over."""
    return check_decodes_per_worker(compressor.settled()).code_bytes(shapes, dtype)


class Coded:
    """The codes of a training that *join* describes, on the server that has its *store*.
    Raises `UsageError` for a compression that a server cannot decode."""

    def __init__(self, join: Join, store: Store) -> None:
        self._store, self._units = store, join.units
        pushed = check_decodes_per_worker(make(join.compression))
        self._code = check_decodes_per_worker(pure(pushed))
        self._passes = self._code.passes(1)
        self._answers = check_decodes_per_worker(pushed.for_replies())
        self.shadows: dict[tuple[int, int], _Shadow] | None = None
        """By worker and bucket; None where answers are dense."""
        if join.replies == "deltas":
            self.shadows = {}

    # ---- pushes ----

    def gradient(self, push: Push, payload: torch.Tensor | None) -> torch.Tensor:
        """What a push brings, decoded. Raises `UsageError`, with nothing changed, for what is
        no code of the bucket."""
        store = self._store
        store.check_bucket(push.bucket)
        if push.late or push.units is not None:
            raise UsageError("push: under compression a bucket is pushed as a whole")
        if payload is not None and stands_in(payload):
            # Of virtual time alone: it only counts as a code.
            self._charge(push.bucket, self._passes[1])
            return store.fitting("push", push.bucket, payload)
        if payload is None or payload.dtype != torch.uint8:
            got = "nothing" if payload is None else f"elements of {payload.dtype}"
            raise UsageError(
                f"push: expected the code of bucket {push.bucket}, in bytes, got {got}"
            )
        flat = torch.empty_like(store.flats[push.bucket])
        self._code.decode(payload, views(flat, self._units[push.bucket]))
        self._charge(push.bucket, self._passes[1])
        return flat if push.weight in (0, 1) else flat.div_(push.weight)

    # ---- answers ----

    def given(self, worker: int, bucket: int, values: torch.Tensor) -> int:
        """A worker is given all of a bucket, *values*, which nobody writes; returns the
        turn."""
        if self.shadows is None:
            return 0
        before = self.shadows.get((worker, bucket))
        turn = 1 if before is None else before.turn + 1
        states = self._states(worker, bucket) if before is None else before.states
        self.shadows[worker, bucket] = _Shadow(values, states, turn)
        return turn

    def check_given(self, worker: int, bucket: int) -> None:
        """Raise `UsageError` for a worker that cannot be answered with differences: it was never
        given the bucket."""
        if self.shadows is not None and (worker, bucket) not in self.shadows:
            raise UsageError(
                f"push: worker {worker} has not pulled bucket {bucket}, and answers are "
                "differences from what it holds: pull first"
            )

    def difference(self, worker: int, bucket: int) -> tuple[torch.Tensor, int]:
        """What a worker is sent instead of a bucket, and the turn. Raises `UsageError` for one
        that was never given the bucket."""
        assert self.shadows is not None
        self.check_given(worker, bucket)
        shadow = self.shadows[worker, bucket]
        shadow.turn += 1
        now = self._store.flats[bucket]
        self._charge(bucket, sum(self._answers.passes(1)) + _SUBTRACTED_AND_ADDED)
        if self._store.bytes[bucket] != now.numel() * now.element_size():
            return now.clone(), shadow.turn  # of virtual time alone
        if not shadow.is_own:
            shadow.values, shadow.is_own = shadow.values.clone(), True
        units = self._units[bucket]
        difference = now - shadow.values  # x - h
        code = self._answers.encode(views(difference, units), shadow.states)
        self._answers.decode(code, views(difference, units))
        shadow.values.add_(difference)  # h = h + decoded C(x - h)
        return code, shadow.turn

    def forget(self, worker: int) -> None:
        """This worker is lost, or needs no more differences."""
        if self.shadows is not None:
            for key in [key for key in self.shadows if key[0] == worker]:
                del self.shadows[key]

    def _states(self, worker: int, bucket: int) -> list[State]:
        flat, units = self._store.flats[bucket], self._units[bucket]
        return [
            self._answers.init(view, f"answer {unit.parameter} {unit.start}", worker)
            for unit, view in zip(units, views(flat, units), strict=True)
        ]

    def _charge(self, bucket: int, passes: float) -> None:
        self._store.add_work(coded=passes * self._store.bytes[bucket])


_SUBTRACTED_AND_ADDED = 6.0
"""Passes over a bucket: two numbers are read and one is written, twice."""


@dataclass
class _Shadow:
    """What a worker holds of one bucket. *states*: of the code of its differences; *turn*: of
    what it was given last; *is_own*: others do not share *values*."""

    values: torch.Tensor
    states: list[State]
    turn: int
    is_own: bool = False
