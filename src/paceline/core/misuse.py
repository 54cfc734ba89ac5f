"""Finds silent mistakes: scripts that train wrongly without an error.

- Two tools that average gradients make 1/n of the average, and parameters that are spread over ranks
  have none: `check_not_parallel`, `check_not_inside_ddp`.
- Workers that all train on the same data do the work of one: `SameDataCheck`.
- A change of a gradient that was already sent reaches no other worker: `SentGradientCheck`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.context import TrainingContext
from paceline.core.reducer import Reducer
from paceline.errors import UsageError
from paceline.interfaces import Bucket
from paceline.torch_internals import (
    SHARDING,
    active_ddp,
    is_distributed_tensor,
    parallel_by_others,
    version_of,
)

SAME_DATA_STEPS = 3
"""The gradient must equal the mean in this many steps before `SameDataCheck` warns."""

MOST_SAME_DATA_STEPS = 10
"""`SameDataCheck` gives up after this many steps of gradients that tell nothing (zeros, one
number)."""

SAMPLE = 64
"""Numbers of a gradient that `SameDataCheck` compares."""

DIFFERENT = 8
"""How many of them must differ from each other: models that were made to be timed have gradients
that do not depend on any data."""

SUMMED_STEPS = 8
"""`SentGradientCheck` sums contents up in the first steps, and for this many after a write. Later
it takes every write for a change."""


def check_not_parallel(model: torch.nn.Module) -> None:
    """Raise `UsageError` if another tool makes *model*, or a part of it, parallel."""
    for name, module in model.named_modules():
        tool = parallel_by_others(module)
        if tool is not None:
            what = f"its part {name!r} is" if name else "it is"
            if tool in SHARDING:
                raise UsageError(
                    f"the model given to distribute is sharded: {what} under {tool}, so each "
                    "rank holds a part of its parameters, and distribute averages gradients of "
                    f"whole models that every rank holds. Leave {tool} out; a model that one "
                    f"device has no room for trains under {tool} alone, without distribute"
                )
            raise UsageError(
                f"the model given to distribute is made parallel twice: {what} under "
                f"{tool} too, which averages gradients itself. "
                "Build the model without it, and give distribute the plain one"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_distributed_tensor(tensor):
            raise UsageError(
                f"{name!r} is a DTensor: each rank holds a part of it (fully_shard, "
                "tensor parallelism), and distribute averages gradients of whole models "
                "that every rank holds. Leave sharding out, or train with FSDP alone"
            )


def check_not_inside_ddp(model: torch.nn.Module) -> None:
    """Raise `UsageError` if this forward pass of *model* runs inside that of a
    DistributedDataParallel which averages its gradients."""
    ddp = active_ddp()
    if ddp is None:
        return
    mine = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in mine for parameter in ddp.parameters()):
        raise UsageError(
            "the model given to distribute runs inside DistributedDataParallel, which "
            "averages its gradients too: a step would use 1/n of the mean. Call the plain "
            "model (model, not ddp_model), and leave DDP out; trainers that wrap models "
            "by themselves (Hugging Face's Trainer, Accelerate's prepare) are told not to"
        )


class SameDataCheck:
    """Warns once if all workers train on the same data, as a script for one process does on each.

    Rank 0 compares its own gradient with the mean in the first steps, from what it sends and
    receives anyway. Later steps cost nothing.
    """

    def __init__(self, context: TrainingContext, reducer: Reducer) -> None:
        self._context, self._reducer = context, reducer
        comm = context.comm
        # If workers do not communicate in every step, an average may be that of one worker.
        sees_means = (
            context.method.visible_gradient == "mean" and context.rounds.is_every_step
        )
        is_first_of_many = comm.rank == 0 and comm.size > 1
        self.watching = sees_means and is_first_of_many and context.sampler is None
        """Whether steps are still compared."""
        self._own: tuple[int, torch.Tensor] | None = None
        self._equal = self._steps = 0

    def bucket_leaves(self, bucket: Bucket) -> None:
        """*bucket* is about to be sent, with this rank's share of the mean in it."""
        if not self.watching:
            return
        largest = max(self._context.buckets, key=lambda one: one.buffer.numel())
        share = self._reducer.share
        if bucket is largest and share:
            self._own = bucket.index, _sample(bucket) / share

    def means_are_there(self) -> None:
        """The buckets hold means."""
        if self._own is None:
            return
        workers = self._context.comm.size
        (index, own), self._own = self._own, None
        mean = _sample(self._context.buckets[index])
        self._steps += 1
        if len(mean[mean.isfinite() & (mean != 0)].unique()) >= DIFFERENT:
            rounding = torch.finfo(mean.dtype).eps * (16 + workers)
            self.watching = torch.allclose(
                own, mean, rtol=min(0.25, rounding), atol=0.0, equal_nan=True
            )
            self._equal += 1
        if self.watching and self._equal == SAME_DATA_STEPS:
            self._context.report(
                f"in {SAME_DATA_STEPS} steps rank 0's gradient was the mean of all "
                f"{workers}: do all workers train on the same data? Then they do "
                "the work of one. Give each its share: paceline.Sampler, or torch's "
                "DistributedSampler"
            )
            self.watching = False
        if self._steps == MOST_SAME_DATA_STEPS:
            self.watching = False


def _sample(bucket: Bucket) -> torch.Tensor:
    """A copy of some numbers, from all over the bucket."""
    flat = bucket.buffer
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


class SentGradientCheck:
    """Finds gradients that the script has changed between ``backward()`` and ``step()``.

    A version counter only tells that something was written. ``clip_grad_norm_`` with a bound
    above the norm writes the same values back, so contents are compared, too. Summing them up
    costs about as much as a step of SGD (180 ms for 400 MiB on one core): this is done in the
    first steps, and while the script writes.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._versions: dict[int, int] = {}
        self._contents: dict[int, torch.Tensor] = {}
        self._steps_to_sum = SUMMED_STEPS
        self._has_warned = False

    def remember(self) -> None:
        """The buckets have been sent as they are now."""
        buckets = self._context.buckets
        self._versions = {b.index: version_of(b.buffer) for b in buckets}
        self._contents.clear()
        if self._steps_to_sum > 0:
            self._steps_to_sum -= 1
            self._contents = {b.index: _contents(b.buffer) for b in buckets}

    def require_unchanged(self) -> None:
        """Raise `GradientError` if the script has changed a gradient that was sent."""
        name = self._first_changed(self._context.buckets)
        if name is not None:
            raise self._context.fail(
                f"the gradient of {name!r} (or of a tensor sent with it) was changed "
                f"between backward() and step(): under {self._context.method.name} it is on its "
                "way to the others by then, and a change reaches nobody. Clip with "
                "distribute(clip_norm=...); without GradScaler; or use bsp, whose .grad "
                "holds the mean"
            )

    def _first_changed(self, buckets: Sequence[Bucket]) -> str | None:
        """The name of the first gradient that is not what was sent, or shares a bucket with one
        that is not."""
        written = False
        for bucket in buckets:
            for name, parameter, view in zip(
                bucket.names, bucket.parameters, bucket.views, strict=True
            ):
                if parameter.grad is not None and parameter.grad is not view:
                    return name
            if version_of(bucket.buffer) == self._versions[bucket.index]:
                continue
            before = self._contents.get(bucket.index)
            if before is None or not torch.equal(before, _contents(bucket.buffer)):
                return bucket.names[0]
            written = True
        if written:
            self._steps_to_sum = SUMMED_STEPS
            if not self._has_warned:
                self._has_warned = True
                self._context.report(
                    "gradients were written to between backward() and step(), with the "
                    "values that they had (clip_grad_norm_ does that while its bound is "
                    "above the norm). They have been sent by then: a change is an error. "
                    "To clip, distribute(clip_norm=...)"
                )
        return None


def _contents(buffer: torch.Tensor) -> torch.Tensor:
    """A fingerprint of a flat tensor's contents.

    It holds the sum in words of eight bytes, the sum as numbers (changing all signs keeps the
    former), and the bytes left over.
    """
    raw = buffer.detach().view(torch.uint8)
    words = raw.numel() // 8 * 8
    sums = raw[:words].view(torch.int64).sum(), buffer.detach().sum()
    return torch.cat([*(s.reshape(1).view(torch.uint8) for s in sums), raw[words:]])
