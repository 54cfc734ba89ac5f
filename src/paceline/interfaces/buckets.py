"""Buckets: flat buffers of gradients that are communicated together, and the bytes of tensors on the network.

Only gradients are flat, without padding. Parameters stay the user's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from paceline.torch_internals import version_of

Kind = tuple[torch.dtype, torch.device]
"""Tensors of one kind can share a bucket."""


@dataclass(eq=False)
class Bucket:
    """The gradients of some parameters in one flat *buffer*.

    Attributes:
        index: Its number, in the order in which buckets are delivered.
        names: Of the parameters.
        parameters: In gradient-ready order.
        buffer: All gradients, flat.
        views: ``views[i]`` is the part of *buffer* with the shape and strides of
            ``parameters[i]``.
        used: ``used[i]`` says whether ``parameters[i]`` took part in this rank's backward pass.
        last: Whether it is the step's last bucket.
        missing: How many of its gradients are not there yet.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    buffer: torch.Tensor
    views: tuple[torch.Tensor, ...]
    used: list[bool]
    last: bool = False
    missing: int = field(default=0, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of the buffer on the network."""
        return wire_bytes(self.buffer)

    def by_index(self) -> torch.Tensor:
        """Return all gradients in one flat tensor, the elements of each in index order.

        That is *buffer* itself, or a copy if a parameter's strides have another order.
        """
        if all(view.is_contiguous() for view in self.views):
            return self.buffer
        return stand_alike(flatten(self.views), self.buffer)


def strides_in_bucket(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient in its bucket.

    They are the parameter's own if its elements fill their memory without gaps, else those of a
    contiguous tensor. Fused optimizers step through a parameter and its gradient as flat memory.
    """
    if parameter.is_contiguous():
        return parameter.stride()
    filled = 1
    sizes = zip(parameter.stride(), parameter.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in sizes if size != 1):
        if stride != filled:
            return torch.empty(parameter.shape, device="meta").stride()
        filled *= size
    return parameter.stride()


def match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give each state tensor that has the shape of its parameter the parameter's strides.

    Needed after a checkpoint is loaded, since checkpoints do not save strides.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = in_strides_of(parameter, value)


def in_strides_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return *value*, or a copy with the strides of *parameter* if it has the same shape but other strides."""
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    return like.detach().copy_(value)


def kind_of(parameter: torch.Tensor) -> Kind:
    """Return dtype and device: tensors can share a bucket if both are equal."""
    return parameter.dtype, parameter.device


def wire_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of *tensor* on the network: its own, or those of the tensor it represents."""
    stands_for: int | None = getattr(tensor, "stands_for_bytes", None)
    return tensor.numel() * tensor.element_size() if stands_for is None else stands_for


def stand_in_for(
    size: int, tensor: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Make *tensor* count as *size* bytes on the simulated network, however few bytes it has.

    Args:
        size: Bytes.
        tensor: The tensor; it is also the result.
        shape: The shape that compressors see, if it is known.
    """
    tensor.stands_for_bytes = size  # type: ignore[attr-defined]
    if shape is not None:
        tensor.stands_for_shape = tuple(shape)  # type: ignore[attr-defined]
    return tensor


def stands_in(tensor: torch.Tensor) -> bool:
    """Return whether *tensor* counts as another number of bytes than it has."""
    return hasattr(tensor, "stands_for_bytes")


def wire_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of *tensor*, or of the tensor that it represents on the network.

    If only the bytes of that tensor are known, the shape is a matrix as square as they allow.
    """
    if not stands_in(tensor):
        return tuple(tensor.shape)
    known: tuple[int, ...] | None = getattr(tensor, "stands_for_shape", None)
    if known is not None:
        return known
    return nearly_square(wire_bytes(tensor) // tensor.element_size())


@cache
def nearly_square(elements: int) -> tuple[int, ...]:
    """Return the shape of a matrix of *elements* elements, or of a row where the matrix would be narrow."""
    root = math.isqrt(elements)
    for side in range(root, root // 4, -1):
        if elements % side == 0:
            return side, elements // side
    return (elements,) if root < 2 else (root, elements // root)


def stand_alike(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Make each element of *tensor* count as many bytes as one of *like*, if *like* represents a larger tensor.

    A part of a buffer represents its proportional part of the larger one.
    """
    if stands_in(like):
        stand_in_for(wire_bytes(like) * tensor.numel() // max(1, like.numel()), tensor)
    return tensor


def stand_for_the_same(tensor: torch.Tensor, as_this: torch.Tensor) -> None:
    """Make *tensor* represent the same tensor as *as_this*, if that represents one; in its own dtype."""
    if stands_in(as_this):
        size = wire_bytes(as_this) * tensor.element_size() // as_this.element_size()
        stand_in_for(size, tensor, getattr(as_this, "stands_for_shape", None))


def make_buckets(
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    groups: Sequence[Sequence[int]],
) -> list[Bucket]:
    """Make buckets over *parameters*.

    Args:
        parameters: Names and parameters, in the model's order.
        groups: For each bucket the positions in *parameters*, all of one kind.
    """
    buckets = []
    for number, group in enumerate(groups):
        members = [parameters[i] for i in group]
        sizes = [parameter.numel() for _, parameter in members]
        first = members[0][1]
        buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        if any(stands_in(parameter) for _, parameter in members):
            stand_in_for(sum(wire_bytes(p) for _, p in members), buffer)
        views = tuple(
            view_in_bucket(part, parameter)
            for part, (_, parameter) in zip(buffer.split(sizes), members, strict=True)
        )
        for view, (_, parameter) in zip(views, members, strict=True):
            stand_for_the_same(view, parameter)
        buckets.append(
            Bucket(
                index=number,
                names=tuple(name for name, _ in members),
                parameters=tuple(parameter for _, parameter in members),
                buffer=buffer,
                views=views,
                used=[False] * len(members),
                last=number == len(groups) - 1,
            )
        )
    return buckets


def view_in_bucket(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return *flat*, a part of a bucket's buffer, as the gradient of *parameter*."""
    strides = strides_in_bucket(parameter)
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one flat copy of tensors of one kind, the elements of each in index order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy *flat* back into the tensors that `flatten` took it from."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def stamps(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of *tensors*, which change with every write in place.

    A caller with an operation in flight compares them to detect writes by other code.
    """
    return [version_of(tensor) for tensor in tensors]


def by_kind(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by kind, in order of first appearance."""
    groups: dict[Kind, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(kind_of(tensor), []).append(tensor)
    return list(groups.values())
