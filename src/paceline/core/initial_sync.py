"""Before training: all ranks hold the same model and options."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import torch

from paceline.errors import ModelMismatchError
from paceline.interfaces import Comm
from paceline.interfaces.buckets import strides_in_bucket


class Description(msgspec.Struct, array_like=True):
    """What must be equal on all ranks: lines such as ``fc.weight float32[10x64]``. Strides are
    in them where they decide in which order a gradient's elements are sent."""

    options: str
    tensors: list[str]


def describe(model: torch.nn.Module, options: str) -> Description:
    """The model's tensors, in registration order, and the options of training."""
    lines = []
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else " frozen"
        lines.append(f"{name} {_shape(parameter)}{_strides(parameter)}{frozen}")
    for name, buffer in model.named_buffers():
        lines.append(f"buffer {name} {_shape(buffer)}")
    return Description(options, lines)


def check_same_everywhere(comm: Comm, mine: Description, device: torch.device) -> None:
    """Raise `ModelMismatchError` on every rank if any rank's description differs.

    Names the first difference and a rank that has it. Costs one small all-gather where
    all are equal. Collective.
    """
    encoded = msgspec.json.encode(mine)
    digest = hashlib.sha256(encoded).digest()
    # Four numbers: a size, so that the texts can be gathered if need be, and a digest.
    words = [len(encoded)] + [
        int.from_bytes(digest[i : i + 7], "big") for i in range(0, 21, 7)
    ]
    own = torch.tensor(words, dtype=torch.int64, device=device)
    everyone = torch.empty(4 * comm.size, dtype=torch.int64, device=device)
    comm.all_gather(everyone, own).wait()
    if bool((everyone.view(comm.size, 4) == everyone[:4]).all()):
        return

    longest = int(everyone[::4].max())
    text = torch.zeros(longest, dtype=torch.uint8, device=device)
    text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    texts = torch.empty(longest * comm.size, dtype=torch.uint8, device=device)
    comm.all_gather(texts, text).wait()
    descriptions = [
        msgspec.json.decode(bytes(part[: int(length)].tolist()), type=Description)
        for part, length in zip(
            texts.view(comm.size, longest), everyone[::4], strict=True
        )
    ]
    raise ModelMismatchError(_first_difference(descriptions))


def _first_difference(descriptions: Sequence[Description]) -> str:
    reference = descriptions[0]
    for rank, other in enumerate(descriptions):
        if other.options != reference.options:
            return (
                f"ranks train with different options: rank 0 has {reference.options!r}, "
                f"rank {rank} has {other.options!r}; call distribute with the same "
                "arguments on every rank"
            )
        for ours, theirs in zip(reference.tensors, other.tensors, strict=False):
            if ours != theirs:
                return (
                    f"ranks hold different models: rank 0 has {ours!r} where rank {rank} "
                    f"has {theirs!r}; build the same model, in the same memory format, on "
                    "every rank"
                )
        if len(other.tensors) != len(reference.tensors):
            longer = max(reference.tensors, other.tensors, key=len)
            extra = longer[min(len(reference.tensors), len(other.tensors))]
            return (
                f"ranks hold different models: rank 0 has {len(reference.tensors)} "
                f"tensors and rank {rank} has {len(other.tensors)}; the first that only "
                f"one of them has is {extra!r}"
            )
    raise AssertionError("digests differ but descriptions do not")


def _shape(tensor: torch.Tensor) -> str:
    sizes = "x".join(str(size) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def _strides(parameter: torch.Tensor) -> str:
    """Those that are not a contiguous tensor's; a dimension of size 1 has none that matters."""
    strides = strides_in_bucket(parameter)
    contiguous = torch.empty(parameter.shape, device="meta").stride()
    rows = zip(strides, contiguous, parameter.shape, strict=True)
    if all(own == other or size == 1 for own, other, size in rows):
        return ""
    sizes = zip(strides, parameter.shape, strict=True)
    return " strides " + "x".join(str(s) if size > 1 else "1" for s, size in sizes)
