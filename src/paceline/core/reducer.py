"""Moves gradients from autograd into flat buckets, and hands out complete buckets in plan order.

PyTorch DDP calls this part the reducer. The gradient of each parameter is copied into its view
of a bucket, and ``.grad`` becomes that view. The next backward pass then adds into it without a
copy. Every rank hands out buckets in plan order, whatever order autograd chose: collectives must
match. The method sends them: `methods/bsp.py` and the others.

Small tensors are copied together, in copy groups: one call of torch costs more than the copy of a
few KiB. Large ones are copied as soon as they are ready.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.context import TrainingContext
from paceline.interfaces.buckets import (
    Bucket,
    make_buckets,
    stand_for_the_same,
    strides_in_bucket,
    view_in_bucket,
)
from paceline.torch_internals import copy_together, join_into

_LARGE_BYTES = 64 * 1024
"""Tensors of this size or more are copied alone.

A second pass over their memory would cost more than a call saves (`benchmarks/measure/gradient_hooks.py`).
"""
_GROUP_BYTES = 1 << 20
"""Largest copy group, in bytes: its gradients stay in memory until all of them are ready."""


class CopyGroup:
    """Neighbours in a bucket that are copied together.

    *pending*: indices of the parameters whose gradients are not ready yet.
    """

    __slots__ = ("bucket", "indices", "is_flat", "memory", "pending", "slots")

    def __init__(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        self.bucket, self.slots = bucket, slots
        self.indices = {slot.index for slot in slots}
        self.pending = set(self.indices)
        start = sum(p.numel() for p in bucket.parameters[: slots[0].position])
        size = sum(slot.parameter.numel() for slot in slots)
        self.memory = bucket.buffer[start : start + size]
        self.is_flat = all(slot.parameter.dim() == 1 for slot in slots)
        for slot in slots:
            slot.group, slot.pending = self, self.pending


class Slot:
    """The place of one parameter's gradient: *position* in its bucket.

    *pending* is that of its copy group.
    """

    __slots__ = ("group", "index", "parameter", "pending", "position", "view")

    group: CopyGroup
    pending: set[int]
    position: int
    view: torch.Tensor

    def __init__(self, index: int, parameter: torch.nn.Parameter) -> None:
        self.index, self.parameter = index, parameter

    @property
    def bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


class Reducer:
    """One worker's gradients of the current backward pass.

    If workers form the mean, each gradient is multiplied by this worker's *share* while it is
    copied. Then the sum of the buckets over workers is the mean.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context, self._parameters = context, context.parameters
        self.share = context.workers.weight if context.forms_means else 1.0
        self.in_backward = False
        self.slots = [Slot(n, p) for n, (_, p) in enumerate(context.parameters)]
        """A slot for each parameter, in the context's order."""
        self._slot_of = {id(slot.parameter): slot for slot in self.slots}
        self._groups: list[CopyGroup] = []
        self._ordered = [p for _, p in context.parameters if p.dim() > 1]
        """Parameters of several dimensions, whose elements can have more than one memory order."""
        self._strides: list[tuple[int, ...]] = []
        """Their strides when the buckets were made."""
        self._views: list[torch.Tensor] = []
        self._addresses: list[int] = []
        """Addresses of the views when the buckets were made."""
        self._absent: set[int] = set()
        """Parameters that have no gradient in this pass according to its graph."""
        self._next_bucket = 0

    def make_buckets(self, groups: Sequence[Sequence[int]]) -> None:
        """Make the context's buckets from *groups* of parameter indices; gradients move into them."""
        made_before = bool(self._groups)
        buckets = self._context.buckets = make_buckets(self._parameters, groups)
        self._groups = []
        for bucket in buckets:
            slots = [self._slot_of[id(parameter)] for parameter in bucket.parameters]
            for position, slot in enumerate(slots):
                slot.position, slot.view = position, bucket.views[position]
            self._groups += [CopyGroup(bucket, some) for some in _cut(slots)]
        self._strides = [parameter.stride() for parameter in self._ordered]
        self._views = [slot.view for slot in self.slots]
        self._addresses = [view.data_ptr() for view in self._views]
        self._expect_every_gradient()
        if not made_before:
            return
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None:
                slot.view.copy_(gradient)
                slot.parameter.grad = slot.view

    def bucket_of(self, parameter: torch.Tensor) -> Bucket | None:
        """The bucket of a parameter's gradient; None for a parameter that is not trained."""
        slot = self._slot_of.get(id(parameter))
        return None if slot is None else slot.group.bucket

    # ---- one backward pass ----

    @property
    def has_sent_some(self) -> bool:
        """Whether a bucket of this pass was handed out."""
        return self._next_bucket > 0

    def begin(self) -> None:
        """Begin a backward pass."""
        self._absent.clear()
        self._next_bucket = 0
        self._expect_every_gradient()

    def check_memory(self) -> None:
        """Check parameters and gradient views before gradients arrive, and renew moved views.

        ``model.to(...)`` may change a parameter's strides and the memory of ``.grad``. Raises an
        error for other strides, since other ranks would add elements in another order.
        """
        strides = list(map(torch.Tensor.stride, self._ordered))
        if strides != self._strides:
            for parameter, before in zip(self._ordered, self._strides, strict=True):
                self._require_strides(parameter, before)
            self._strides = strides
        addresses = list(map(torch.Tensor.data_ptr, self._views))
        if addresses != self._addresses:
            for slot, now, then in zip(
                self.slots, addresses, self._addresses, strict=True
            ):
                if now != then:
                    self._renew_views(slot.group.bucket)

    def fill(self, group: CopyGroup) -> bool:
        """Copy the gradients of *group* into their bucket; a missing one becomes zeros.

        Returns whether the bucket is complete now.
        """
        bucket, slots = group.bucket, group.slots
        if len(slots) == 1:
            self._fill_slot(slots[0])
        else:
            used = bucket.used
            gradients, views = [], []
            for slot in slots:
                parameter, view = slot.parameter, slot.view
                gradient = parameter.grad
                used[slot.position] = gradient is not None
                if gradient is None:
                    view.zero_()
                elif gradient is not view:
                    if gradient.layout is not torch.strided:
                        raise self._sparse(slot)
                    gradients.append(gradient)
                    views.append(view)
                    parameter.grad = view
            if group.is_flat and len(gradients) == len(slots):
                join_into(group.memory, gradients)
            elif gradients:
                copy_together(views, gradients)
            if self.share != 1.0:
                group.memory.mul_(self.share)
        bucket.missing -= 1
        return not bucket.missing

    def next_complete(self) -> Bucket | None:
        """The next bucket in plan order, if it is complete."""
        buckets = self._context.buckets
        if self._next_bucket == len(buckets) or buckets[self._next_bucket].missing:
            return None
        self._next_bucket += 1
        return buckets[self._next_bucket - 1]

    @property
    def all_ready(self) -> bool:
        """Whether every tensor took part in this pass."""
        if self._absent:
            return False
        return not any(bucket.missing for bucket in self._context.buckets)

    def ready(self) -> list[int]:
        """The parameters whose gradients are ready."""
        absent = self._absent
        return [
            slot.index
            for slot in self.slots
            if slot.index not in slot.pending and slot.index not in absent
        ]

    def leave_out(self, indices: Sequence[int]) -> None:
        """Do not wait for gradients of these parameters: there will be none in this pass."""
        self._absent.update(indices)
        for index in indices:
            slot = self.slots[index]
            slot.pending.discard(index)
            if not slot.pending:
                self.fill(slot.group)

    def take_unexpected(self, slot: Slot) -> None:
        """Take a gradient that was not expected, if it was left out and its bucket was not sent.

        Otherwise raise `GradientError`.
        """
        bucket, is_filled = slot.group.bucket, not slot.pending
        is_open = bucket.index >= self._next_bucket
        is_empty = not is_filled or not bucket.used[slot.position]
        if slot.index in self._absent and is_open and is_empty:
            self._absent.discard(slot.index)
            if is_filled:
                self._fill_slot(slot)
            return
        raise self._context.fail(
            f"the gradient of {self._name(slot)!r} was computed twice in one backward "
            "pass, or outside its graph, when its bucket may have been sent already. With "
            "activation checkpointing use checkpoint(..., use_reentrant=False)"
        )

    def fill_unused(self) -> bool:
        """Fill the buckets' unused tensors with zeros at the end of a pass. Returns whether none was."""
        all_ready = self.all_ready
        if all_ready:
            return True
        for index in sorted(self._absent):
            slot = self.slots[index]
            set_otherwise = slot.parameter.grad is not None
            used = slot.group.bucket.used[slot.position]
            if set_otherwise and not used:  # a hook of the script has set .grad
                self.take_unexpected(slot)
        for group in self._groups:
            if group.pending:
                group.pending.clear()
                self.fill(group)
        return False

    def zero(self) -> None:
        """Fill all buckets with zeros: this worker has no data."""
        for bucket in self._context.buckets:
            bucket.buffer.zero_()
            bucket.used[:] = [False] * len(bucket.used)

    def _expect_every_gradient(self) -> None:
        for bucket in self._context.buckets:
            bucket.missing = 0
        for group in self._groups:
            group.pending.update(group.indices)
            group.bucket.missing += 1

    def _fill_slot(self, slot: Slot) -> None:
        """Copy one gradient into its bucket, if it is not there already."""
        view, gradient = slot.view, slot.parameter.grad
        slot.group.bucket.used[slot.position] = gradient is not None
        if gradient is None:
            view.zero_()
        elif gradient is view:
            if self.share != 1.0:
                view.mul_(self.share)
        else:
            if gradient.layout is not torch.strided:
                raise self._sparse(slot)
            if gradient.requires_grad:  # backward(create_graph=True)
                gradient = gradient.detach()
            if self.share == 1.0:
                view.copy_(gradient)
            else:
                torch.mul(gradient, self.share, out=view)
            slot.parameter.grad = view

    def _name(self, slot: Slot) -> str:
        return self._parameters[slot.index][0]

    def _sparse(self, slot: Slot) -> Exception:
        return self._context.fail(
            f"the gradient of {self._name(slot)!r} is sparse, and only "
            "dense gradients can be averaged; build the embedding with sparse=False"
        )

    def _require_strides(
        self, parameter: torch.Tensor, before: tuple[int, ...]
    ) -> None:
        was = torch.empty_strided(parameter.shape, before, device="meta")
        strides = strides_in_bucket(parameter), strides_in_bucket(was)
        rows = zip(*strides, parameter.shape, strict=True)
        if any(now != then and size > 1 for now, then, size in rows):
            name = self._name(self._slot_of[id(parameter)])
            raise self._context.fail(
                f"parameter {name!r} has strides {parameter.stride()} now, and had "
                f"{before} when distribute was called: its elements would be added in "
                "another order than on other ranks. Change the memory format before "
                "distribute"
            )

    def _renew_views(self, bucket: Bucket) -> None:
        """Point the views of a bucket into its buffer again; their values stay."""
        sizes = [parameter.numel() for parameter in bucket.parameters]
        views = []
        for parameter, part, old in zip(
            bucket.parameters, bucket.buffer.split(sizes), bucket.views, strict=True
        ):
            view = view_in_bucket(part, parameter)
            stand_for_the_same(view, parameter)
            if view.data_ptr() != old.data_ptr():
                view.copy_(old)
            if parameter.grad is old:
                parameter.grad = view
            self._slot_of[id(parameter)].view = view
            views.append(view)
        bucket.views = tuple(views)
        self._views = [slot.view for slot in self.slots]

    # ---- the share of each pass ----

    def set_weight(self, weight: float, *, rescale: bool) -> None:
        """Set the weight of this worker's next gradients.

        *rescale*: also adjust ``.grad`` from earlier passes under `no_sync`, which counted on the
        earlier weight.
        """
        self._context.workers.weight = weight
        share = weight if self._context.forms_means else 1.0
        if share == self.share:
            return
        if rescale:
            for _, parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.share / share)
        self.share = share

    # ---- averages ----

    def expose_gradients(self) -> None:
        """Set ``.grad`` of each tensor that any rank used.

        Unused tensors get None: otherwise momentum and weight decay would move them.
        """
        for slot in self.slots:
            if not slot.group.bucket.used[slot.position]:
                slot.parameter.grad = None
            elif slot.parameter.grad is None:
                slot.parameter.grad = slot.view

    def require_finite(self, step: int) -> None:
        """Raise `GradientError` that names the first gradient that is not finite."""
        for bucket in self._context.buckets:
            if torch.isfinite(bucket.buffer).all():
                continue
            for name, view in zip(bucket.names, bucket.views, strict=True):
                if not torch.isfinite(view).all():
                    raise self._context.fail(
                        f"the gradient of {name!r} is not finite in step {step}. Lower "
                        "the learning rate, clip gradients, or use a GradScaler without "
                        "check_finite"
                    )


def _cut(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Divide the *slots* of a bucket into copy groups."""
    groups: list[list[Slot]] = []
    room = 0
    for slot in slots:
        if slot.bytes > room or slot.bytes >= _LARGE_BYTES:
            groups.append([])
            room = _GROUP_BYTES if slot.bytes < _LARGE_BYTES else 0
        groups[-1].append(slot)
        room -= slot.bytes
    return groups
