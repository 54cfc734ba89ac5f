"""`GradientCompression`: a compressor with error feedback and uncompressed first steps.

Error feedback
--------------
Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); analysed by
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes"
(ICML 2019), algorithm 2. Per tensor, with g this worker's share of the mean and C the compressor:

    a = g + e;  send C(a);  e = a - decompressed C(a)

So at every step the sum of all results plus the sum of all residuals e is the sum of all
gradients: an error is not lost, but sent later. docs/reference/compressors.md lists the differences
from the paper.

With a *decay* below 1 the residual fades: e = decay * (a - decompressed C(a)). Local updates with
sparse differences use it in place of momentum. Then the sums above no longer agree.

Uncompressed first steps
------------------------
Published compressors start late: torch's PowerSGD hook after 1,000 steps, deep gradient
compression after a warm-up of epochs. Early gradients are large and change their direction
quickly. Their compression error would be sent later, when the learning rate has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.compression.base import (
    COMMON,
    Compressor,
    NoCompression,
    PerWorkerCompressor,
    RankInfo,
    Rounds,
    Shape,
    State,
    StateKind,
    at_least_float32,
    extremes,
    reals,
    require_at_least,
    sum_uncompressed,
)
from paceline.errors import UsageError
from paceline.interfaces import SpeedClass

_FEEDBACK_PASSES = 10.0
"""Passes over memory that error feedback adds to compression, and again to decompression.

Measured on one core of a CPU, relative to a copy of a tensor (2 passes).
"""


@dataclass(frozen=True)
class GradientCompression:
    """A compressor, with error feedback and uncompressed first steps.

    Each tensor's state has the compressor's state under ``"code"``. With error feedback it also has
    the compression error, and with uncompressed first steps the number of sums.

    Args:
        code: The compressor.
        error_feedback: Add the compression error of a tensor to its next gradient. It takes memory for
            as many elements as the model has, in float32 at least.
        decay: Factor on the error from one step to the next, 0 to 1.
        warmup_steps: Number of a tensor's first sums that are uncompressed.

    Raises:
        UsageError: A value is out of range, or the compressor takes no error feedback.

    Example:
        >>> paceline.distribute(model, optimizer, compression=GradientCompression(Int4()))
    """

    code: Compressor = field(default_factory=NoCompression)
    error_feedback: bool = False
    decay: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 <= self.decay <= 1:
            raise UsageError(f"decay: expected a factor from 0 to 1, got {self.decay}")
        if self.error_feedback and not self.code.takes_error_feedback:
            raise UsageError(
                f"error_feedback: {self.code.name!r} takes none, since it keeps its own memory of "
                "errors or is unbiased. Use error_feedback=false"
            )
        if self.decay != 1.0 and not self.error_feedback:
            raise UsageError(
                f"decay={self.decay} has no effect without error feedback. Add error_feedback=true"
            )
        require_at_least(0, "warmup_steps", self.warmup_steps)
        if self.warmup_steps and hasattr(self.code, "warmup_steps"):
            raise UsageError(
                f"warmup_steps={self.warmup_steps}: {self.code.name!r} has its own warm-up. "
                "Set the compressor's warmup_steps instead"
            )

    @classmethod
    def by_default(cls, code: Compressor) -> GradientCompression:
        """Return a compressor with its default error feedback and first steps."""
        return cls(
            code,
            code.error_feedback_by_default and code.takes_error_feedback,
            warmup_steps=code.warmup_steps_by_default,
        )

    @property
    def name(self) -> str:
        """The compressor's name."""
        return self.code.name

    @property
    def compresses(self) -> bool:
        """Whether anything is compressed."""
        return self.code != NoCompression()

    @property
    def unbiased(self) -> bool:
        """Whether the expected result is the sum itself."""
        return self.code.unbiased and not self.error_feedback

    @property
    def decodes_per_worker(self) -> bool:
        """Whether each worker's compressed gradient can be decompressed alone, from the first step on."""
        return isinstance(self.code, PerWorkerCompressor) and not self.warmup_steps

    @property
    def state(self) -> StateKind:
        """The kind of state between steps."""
        if self.error_feedback:
            return "own"
        if self.warmup_steps and self.code.state == "none":
            return "common"
        return self.code.state

    def memory_passes(self, workers: int) -> tuple[float, float]:
        """See `Compressor.memory_passes`."""
        encoding, decoding = self.code.memory_passes(workers)
        more = _FEEDBACK_PASSES if self.error_feedback else 0.0
        return encoding + more, decoding + more

    def with_epoch(self, steps: int | None) -> GradientCompression:
        """See `Compressor.with_epoch`."""
        return replace(self, code=self.code.with_epoch(steps))

    def for_speed(self, speed: SpeedClass) -> GradientCompression:
        """See `Compressor.for_speed`."""
        return replace(self, code=self.code.for_speed(speed))

    def for_replies(self) -> GradientCompression:
        """See `Compressor.for_replies`: replies need no error feedback and no warm-up."""
        return GradientCompression(self.code.for_replies())

    def steady_state(self) -> GradientCompression:
        """Return it without its warm-up, in which more is sent."""
        return replace(self, code=self.code.steady_state(), warmup_steps=0)

    def init_state(self, like: torch.Tensor, name: str, rank: int) -> State:
        """See `Compressor.init_state`."""
        state: State = {}
        code = self.code.init_state(like, name, rank)
        if code:
            state["code"] = code
        if self.error_feedback and (like.is_floating_point() or like.is_complex()):
            # Residuals are small compared with gradients: a sum in 16 bits would lose them.
            state["residual"] = torch.zeros_like(
                like,
                dtype=at_least_float32(like.dtype),
                memory_format=torch.contiguous_format,
            )
        if self.warmup_steps:
            state[COMMON] = {"sums": 0}
        return state

    def inherit_state(
        self, state: State, former: Sequence[State], workers: int
    ) -> None:
        """See `Compressor.inherit_state`.

        The sum of all residuals is preserved: each worker gets an equal part. The warm-up continues.
        """
        codes = [_of_code(old) for old in former]
        self.code.inherit_state(_of_code(state), codes, workers)
        if "residual" in state:
            for old in former:
                state["residual"].add_(old["residual"].to(state["residual"]) / workers)
        if self.warmup_steps and former:
            state[COMMON]["sums"] = max(old[COMMON]["sums"] for old in former)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: RankInfo,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Rounds:
        """See `Compressor.average`."""
        if self.warmup_steps:
            early = [state[COMMON]["sums"] < self.warmup_steps for state in states]
            for state in states:
                sums = state[COMMON]["sums"] + 1
                state[COMMON]["sums"] = min(sums, self.warmup_steps)
            own = None if sent is None else reals(_chosen(sent, early))
            yield from sum_uncompressed(reals(_chosen(parts, early)), own)
            if all(early):
                return
            late = [not one for one in early]
            parts, states = _chosen(parts, late), _chosen(states, late)
            sent = None if sent is None else _chosen(sent, late)
        codes = [_of_code(state) for state in states]
        if not self.error_feedback:
            yield from self.code.average(parts, codes, place, sent)
            return
        if sent is None:
            sent = [torch.empty_like(part) for part in parts]
        corrected = _Corrected(parts, states)
        yield from self.code.average(parts, codes, place, sent)  # C(a)
        corrected.keep(sent, parts, self.decay)

    # ---- compression of one worker's gradient ----

    def code_bytes(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """See `PerWorkerCompressor.code_bytes`."""
        return self._per_worker.code_bytes(shapes, dtype)

    def encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """See `PerWorkerCompressor.encode`."""
        codes = [_of_code(state) for state in states]
        if not self.error_feedback:
            return self._per_worker.encode(parts, codes)
        whole = [part.clone() for part in parts]
        corrected = _Corrected(whole, states)
        code = self._per_worker.encode(whole, codes)
        sent = [torch.empty_like(part) for part in parts]
        self._per_worker.decode(code, sent)
        corrected.keep(sent, sent, self.decay)
        return code

    def decode(
        self, code: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool = False
    ) -> None:
        """See `PerWorkerCompressor.decode`."""
        self._per_worker.decode(code, parts, add=add)

    @property
    def _per_worker(self) -> PerWorkerCompressor:
        assert isinstance(self.code, PerWorkerCompressor)
        return self.code


def _of_code(state: State) -> State:
    code: State = state.get("code", {})
    return code


def _chosen(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [value for value, one in zip(values, which, strict=True) if one]


class _Corrected:
    """Adds residuals to gradients: *parts* change from g to a = g + e.

    A tensor whose gradient is zero in every element sends nothing and keeps its residual.
    """

    def __init__(self, parts: Sequence[torch.Tensor], states: Sequence[State]) -> None:
        self._rows: list[tuple[State, torch.Tensor, _Truth, int]] = []
        for number, (part, state) in enumerate(zip(parts, states, strict=True)):
            if "residual" not in state:
                continue
            is_used = _truth(extremes(part).any())
            whole = state["residual"]
            if is_used is not False:
                whole = whole + part
                part.copy_(whole)
            if not isinstance(is_used, bool):
                part.mul_(is_used)
            self._rows.append((state, whole, is_used, number))

    def keep(
        self,
        sent: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        decay: float,
    ) -> None:
        """Store the new residuals: e = a - *sent*, times *decay*.

        An unused tensor (a = e) may have sent something nevertheless: the second rounding of the
        owner of a part. If a result is not finite, residuals stay as they were.
        """
        if not self._rows:
            return
        every = torch.stack([extremes(part) for part in results])
        finite = _truth(every.isfinite().all())
        if finite is False:
            return
        for state, whole, is_used, number in self._rows:
            if is_used is False:
                left = whole - sent[number]
            else:
                left = whole.sub_(sent[number])
                if decay != 1.0:
                    left.mul_(
                        decay if is_used is True else torch.where(is_used, decay, 1)
                    )
            if finite is not True:
                left = torch.where(finite, left, state["residual"])
            state["residual"] = left


_Truth = bool | torch.Tensor


def _truth(value: torch.Tensor) -> _Truth:
    """*value* as a bool if it is in host memory. Otherwise the tensor, so that no device is waited for."""
    return bool(value) if value.device.type == "cpu" else value
