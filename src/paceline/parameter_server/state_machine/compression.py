"""Compressed messages between workers and a server, and the server's half of compression.

Pushes
------
With g a worker's gradient, w its weight, e the worker's residual (if it has error feedback), and C
the compressor:

    the worker sends C(w g + e);  the server decompresses it, and divides by w

So disciplines, norms and optimizers see a gradient as without compression. Residuals are shares of
the average, as in workers that form averages themselves. A step that leaves out a late gradient
leaves it out decompressed.

Replies
-------
If replies are differences, the server has a *replica* h of each worker's parameters. A pull returns
all of the parameters x, and then h is x. The reply to a push is

    C(x - h);  h = h + decompressed C(x - h)

and the worker adds the same to its parameters, which so have the bits of h. The next difference
contains the compression error: h is the residual. This is EF21-P (Gruntkowska, Tyurin and
Richtarik, "EF21-P and friends", ICML 2023) with one h for each worker, since each gets its replies
at times of its own. The compressor must bring h nearer to x: see `check_brings_nearer`.

Decompressed numbers are added when all of them have arrived, not one by one. A processor that
multiplies and adds in one instruction would end with other bits than one that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.compression import (
    COMMON,
    COMPRESSORS,
    GradientCompression,
    State,
    keys_of,
    make,
)
from paceline.errors import UsageError
from paceline.interfaces import Method
from paceline.interfaces.buckets import stands_in
from paceline.interfaces.server_messages import Join, Push, Replies, Unit
from paceline.parameter_server.state_machine.store import Store
from paceline.spec import nested


def shape_of(unit: Unit) -> tuple[int, ...]:
    """Return the shape of a unit for compressors.

    A part of a tensor is a matrix of one row, since compressors may leave vectors uncompressed as
    small.
    """
    return (1, unit.elements) if unit.shape is None else unit.shape


def views(flat: torch.Tensor, units: Sequence[Unit]) -> list[torch.Tensor]:
    """Return the *units* in a *flat* part of a bucket, in their shapes for compressors."""
    pieces = flat.split([unit.elements for unit in units])
    return [
        piece.view(shape_of(unit)) for piece, unit in zip(pieces, units, strict=True)
    ]


def code_bytes(
    compression: GradientCompression,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> int:
    """Return the bytes of a compressed payload of tensors of these *shapes*, in steady state."""
    return check_decodes_per_worker(compression.steady_state()).code_bytes(
        shapes, dtype
    )


class ServerCompression:
    """Compression of a training that *join* describes, on the server that has its *store*.

    Raises `UsageError` for a compressor whose payloads a server cannot decompress.
    """

    def __init__(self, join: Join, store: Store) -> None:
        self._store, self._units = store, join.units
        self._pushed = check_decodes_per_worker(make(join.compression))
        self._decode_passes = self._pushed.code.memory_passes(1)[1]
        self._answers = check_decodes_per_worker(self._pushed.for_replies())
        self.replicas: dict[tuple[int, int], _WorkerReplica] | None = None
        """By worker and bucket; None if replies are full."""
        if join.replies == "deltas":
            self.replicas = {}

    # ---- pushes ----

    def gradient(self, push: Push, payload: torch.Tensor | None) -> torch.Tensor:
        """Return a push's gradient, decompressed.

        Raises `UsageError`, with nothing changed, for a payload that does not fit the bucket.
        """
        store = self._store
        store.check_bucket(push.bucket)
        if push.late or push.units is not None:
            raise UsageError("push: under compression a bucket is pushed as a whole")
        if payload is not None and stands_in(payload):
            # Only in virtual time: the tensor represents a compressed gradient by its bytes.
            self._charge(push.bucket, self._decode_passes)
            return store.fitting("push", push.bucket, payload)
        if payload is None or payload.dtype != torch.uint8:
            got = "nothing" if payload is None else f"elements of {payload.dtype}"
            raise UsageError(
                f"push: expected the compressed bytes of bucket {push.bucket}, got {got}"
            )
        flat = torch.empty_like(store.flats[push.bucket])
        self._pushed.decode(payload, views(flat, self._units[push.bucket]))
        self._charge(push.bucket, self._decode_passes)
        return flat if push.weight in (0, 1) else flat.div_(push.weight)

    # ---- answers ----

    def given(self, worker: int, bucket: int, values: torch.Tensor) -> int:
        """Note that a worker gets all of a bucket; return the sequence.

        *values*, the parameters, must stay unchanged.
        """
        if self.replicas is None:
            return 0
        before = self.replicas.get((worker, bucket))
        sequence = 1 if before is None else before.sequence + 1
        states = self._states(worker, bucket) if before is None else before.states
        self.replicas[worker, bucket] = _WorkerReplica(values, states, sequence)
        return sequence

    def check_given(self, worker: int, bucket: int) -> None:
        """Raise `UsageError` if a worker never got the bucket, and so cannot get differences."""
        if self.replicas is not None and (worker, bucket) not in self.replicas:
            raise UsageError(
                f"push: worker {worker} has not pulled bucket {bucket}, and answers are "
                "differences from what it holds: pull first"
            )

    def difference(self, worker: int, bucket: int) -> tuple[torch.Tensor, int]:
        """Return the compressed difference of a bucket for a worker, and the sequence.

        Raises `UsageError` for a worker that never got the bucket.
        """
        assert self.replicas is not None
        self.check_given(worker, bucket)
        replica = self.replicas[worker, bucket]
        replica.sequence += 1
        now = self._store.flats[bucket]
        self._charge(
            bucket, sum(self._answers.memory_passes(1)) + _SUBTRACTED_AND_ADDED
        )
        if self._store.bytes[bucket] != now.numel() * now.element_size():
            # This happens only in virtual time.
            return now.clone(), replica.sequence
        if not replica.is_own:
            replica.values, replica.is_own = replica.values.clone(), True
        units = self._units[bucket]
        difference = now - replica.values  # x - h
        code = self._answers.encode(views(difference, units), replica.states)
        self._answers.decode(code, views(difference, units))
        replica.values.add_(difference)  # h = h + decoded C(x - h)
        return code, replica.sequence

    def forget(self, worker: int) -> None:
        """Drop the replicas of a worker that is lost, or needs no more differences."""
        if self.replicas is not None:
            for key in [key for key in self.replicas if key[0] == worker]:
                del self.replicas[key]

    def _states(self, worker: int, bucket: int) -> list[State]:
        flat, units = self._store.flats[bucket], self._units[bucket]
        return [
            self._answers.init_state(
                view, f"answer {unit.parameter} {unit.start}", worker
            )
            for unit, view in zip(units, views(flat, units), strict=True)
        ]

    def _charge(self, bucket: int, passes: float) -> None:
        self._store.add_work(coded=passes * self._store.bytes[bucket])


_SUBTRACTED_AND_ADDED = 6.0
"""Passes over a bucket: two reads and one write, for a subtraction and an addition."""


@dataclass
class _WorkerReplica:
    """A worker's copy of one bucket.

    Attributes:
        values: The parameters.
        states: States of the compressor of its differences.
        sequence: Number of its last reply.
        is_own: Whether no other replica shares *values*.
    """

    values: torch.Tensor
    states: list[State]
    sequence: int
    is_own: bool = False


# ---- compression with servers that update ----


def spec_of_code(compression: GradientCompression) -> str:
    """Return the spec from which a server makes the compressor.

    Raises `UsageError` for a compressor that is not registered in the same form.
    """
    spec, _ = nested("compression", keys_of(compression))
    # A server decompresses all steps alike, so only workers apply warm-ups.
    if (
        spec is None
        or spec.name not in COMPRESSORS
        or make(spec).steady_state() != compression.steady_state()
    ):
        raise UsageError(
            f"compression {compression.name!r}: a server makes its compressor from a name and "
            "keys, and paceline.compression.COMPRESSORS has none, or another one, for these: "
            "register it there, or use a method whose workers average gradients, such as bsp"
        )
    return str(spec)


def check_answers(
    method: Method, compression: GradientCompression, replies: Replies
) -> None:
    """Raise `UsageError` for differences in a training whose replies have none."""
    if replies == "full":
        return
    if method.updates_on != "server":
        raise UsageError(
            f"replies={replies} with method {method.name!r}: its workers update, and no server "
            "answers with parameters; leave that out, or take a method whose servers update"
        )
    if not compression.compresses:
        raise UsageError(
            f"replies={replies} without compression: a difference would be as large as the "
            "parameters are; add compression, such as int8 or top-k"
        )


def check_pushed(
    method: Method, compression: GradientCompression, replies: Replies
) -> None:
    """Raise `UsageError` for compression that a *method* with updating servers does not support.

    The workers could not push compressed gradients, or the servers could not send such *replies*.
    """
    if not getattr(method, "compressible_pushes", False):
        raise UsageError(
            f"compression {compression.name!r} with method {method.name!r}: the method pushes "
            "parts of buckets, which change from step to step, and computes what its servers do "
            "with them. Leave compression out, or take a method that pushes whole buckets"
        )
    check_decodes_per_worker(compression)
    spec_of_code(compression)
    if replies == "deltas":
        check_brings_nearer(compression)


def check_decodes_per_worker(compression: GradientCompression) -> GradientCompression:
    """Return *compression*. Raise `UsageError` unless a server can decompress one worker's push."""
    if not compression.decodes_per_worker:
        raise UsageError(
            f"compression {compression.name!r} with servers that update: servers decompress "
            "each worker's push by itself, and this compressor needs those of all workers, or "
            "begins later. Take top-k, qsgd, int8 or bf16, or a method whose workers form means, "
            "such as bsp"
        )
    return compression


_PROBE = 64, 256
"""The shape of a tensor on which a compressor is tried."""


def check_brings_nearer(compression: GradientCompression) -> None:
    """Raise `UsageError` for a compressor that cannot compress differences.

    Differences would grow from one to the next if its error is larger than the tensor. A compressor
    that accumulates its inputs cannot use them either.
    """
    answers = check_decodes_per_worker(compression.for_replies())
    if not (answers.code.takes_error_feedback or answers.unbiased):
        raise UsageError(
            f"replies=deltas with compression {compression.name!r}: the compressor accumulates "
            "gradients, and a difference already contains the error of the one before; use "
            "replies=full, or a compressor without memory, such as top-k"
        )
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(_PROBE, generator=generator)
    state = answers.init_state(tensor, "probe", 0)
    if "steps" in state.get("code", {}).get(
        COMMON, {}
    ):  # a compressor that counts epochs sends other data in later ones
        raise UsageError(
            f"replies=deltas with compression {compression.name!r}: the compressor changes from "
            "step to step, and the replies to a worker have no steps of their own; use "
            "replies=full, or a compressor that is always the same, such as top-k"
        )
    decoded = torch.empty_like(tensor)
    answers.decode(answers.encode([tensor], [state]), [decoded])
    left = float((tensor - decoded).norm() / tensor.norm())
    if left >= 1:
        raise UsageError(
            f"replies=deltas with compression {compression.name!r}: the compression error of a "
            f"tensor is {left:.2g} times as large as the tensor, so differences would grow: use a "
            "finer compressor (more levels, smaller blocks), or replies=full"
        )
