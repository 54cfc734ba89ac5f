"""Finds silent mistakes: scripts that train wrongly without an error.

- If another tool averages gradients too, a step uses 1/n of the average. Parameters that are
  sharded over ranks cannot be averaged: `check_not_parallel`, `check_not_inside_ddp`.
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
"""`SameDataCheck` stops after this many steps if gradients are all alike, such as zeros."""

SAMPLE = 64
"""Numbers of a gradient that `SameDataCheck` compares."""

DIFFERENT = 8
"""Number of them that must differ from each other.

Models that only serve to measure times have gradients that do not depend on data.
"""

SUMMED_STEPS = 8
"""`SentGradientCheck` compares contents in this many first steps, and in as many after a write.

Later it counts every write as a change.
"""


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
                    f"whole models that every rank holds. Leave {tool} out; a model that does "
                    f"not fit one device trains under {tool} alone, without distribute"
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
    """Raise `UsageError` if DistributedDataParallel runs this forward pass of *model*.

    It would average the gradients, too.
    """
    ddp = active_ddp()
    if ddp is None:
        return
    mine = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in mine for parameter in ddp.parameters()):
        raise UsageError(
            "the model given to distribute runs inside DistributedDataParallel, which "
            "averages its gradients too: a step would use 1/n of the mean. Call the plain "
            "model (model, not ddp_model), and leave DDP out. Switch it off in trainers that "
            "wrap models themselves (Hugging Face's Trainer, Accelerate's prepare)"
        )


class SameDataCheck:
    """Warns once if all workers train on the same data, as after an unchanged single-process script.

    Rank 0 compares its own gradient with the mean in the first steps, without any extra message.
    Later steps cost nothing.
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
        """Note this rank's own gradient in *bucket*, which is about to be sent."""
        if not self.watching:
            return
        largest = max(self._context.buckets, key=lambda one: one.buffer.numel())
        share = self._reducer.share
        if bucket is largest and share:
            self._own = bucket.index, _sample(bucket) / share

    def means_are_there(self) -> None:
        """Compare the noted gradient with the mean that its bucket now holds."""
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
    """A copy of some numbers, evenly spread over the bucket."""
    flat = bucket.buffer
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


class SentGradientCheck:
    """Finds gradients that the script has changed between ``backward()`` and ``step()``.

    torch's version counter only shows that something was written. ``clip_grad_norm_`` with a limit
    above the norm writes the same values, so contents are compared, too. Their sums cost about as
    much as a step of SGD (180 ms for 400 MiB on one core). So they are formed only in the first
    steps, and while the script writes.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._versions: dict[int, int] = {}
        self._contents: dict[int, torch.Tensor] = {}
        self._steps_to_sum = SUMMED_STEPS
        self._has_warned = False

    def remember(self) -> None:
        """Note the buckets' present contents, which were sent."""
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
                f"between backward() and step(): under {self._context.method.name} it was "
                "already sent, and the change reaches no other worker. Clip with "
                "distribute(clip_norm=...), use no GradScaler, or use bsp, whose .grad holds "
                "the mean"
            )

    def _first_changed(self, buckets: Sequence[Bucket]) -> str | None:
        """The name of the first gradient that has changed, or shares a bucket with a changed one."""
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
                    "gradients were written to between backward() and step(), without a "
                    "change of values (clip_grad_norm_ does that while its limit is above the "
                    "norm). They were already sent, so a change would be an error. To clip, "
                    "use distribute(clip_norm=...)"
                )
        return None


def _contents(buffer: torch.Tensor) -> torch.Tensor:
    """A fingerprint of a flat tensor's contents.

    It holds the sum of the contents as words of eight bytes, the sum as numbers, and the remaining
    bytes. A change of all signs does not change the first sum.
    """
    raw = buffer.detach().view(torch.uint8)
    words = raw.numel() // 8 * 8
    sums = raw[:words].view(torch.int64).sum(), buffer.detach().sum()
    return torch.cat([*(s.reshape(1).view(torch.uint8) for s in sums), raw[words:]])
