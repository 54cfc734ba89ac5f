"""A nested state as tensors: those in it, and a byte tensor that says how they are nested.

The structure is MessagePack: what is not a tensor is data and not code. It names each
tensor of the state, so nothing is inferred from names; these are paths for people to read,
with a number where two entries have the same one (``{1: x, "1": y}``).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from paceline.errors import UsageError

_TENSOR, _TUPLE, _ARRAY = 1, 2, 3  # MessagePack extension codes
_STRUCTURE = "//structure"
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # of MessagePack's whole numbers


def pack(name: str, state: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Put a nested *state* into *tensors*, whose new names all begin with *name* and a
    slash. Raises `UsageError` for what is not data."""
    key = name + _STRUCTURE
    tensors[key] = torch.empty(0, dtype=torch.uint8)  # so that no path takes its name
    structure = msgspec.msgpack.encode(_strip(state, name, tensors))
    tensors[key] = torch.frombuffer(bytearray(structure), dtype=torch.uint8)


def unpack(name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The state that `pack` took; a numpy number comes back as Python's."""

    def restore(code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            return tensors[bytes(data).decode()]
        if code == _ARRAY:
            return tensors[bytes(data).decode()].numpy()
        return tuple(decoder.decode(data))

    decoder = msgspec.msgpack.Decoder(ext_hook=restore)
    structure = tensors[name + _STRUCTURE]
    return decoder.decode(structure.numpy().tobytes())


def is_packed(name: str, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether `pack` was called with *name*."""
    return name + _STRUCTURE in tensors


def name_of(key: str) -> str:
    """The name with which `pack` was called that made the tensor *key*."""
    return key.partition("/")[0]


def _strip(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """*value* with each tensor in it put into *tensors*, and its name in its place."""
    if isinstance(value, torch.Tensor):
        return _named(_TENSOR, value.detach(), path, tensors)
    if isinstance(value, np.ndarray):
        return _named(_ARRAY, _as_tensor(value, path), path, tensors)
    if isinstance(value, dict):
        return {
            _plain_key(key, path): _strip(one, f"{path}/{key}", tensors)
            for key, one in value.items()
        }
    if isinstance(value, tuple | list):
        items = [_strip(one, f"{path}/{i}", tensors) for i, one in enumerate(value)]
        if isinstance(value, list):
            return items
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
    return _plain(value, path)


def _named(
    code: int, tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]
) -> msgspec.msgpack.Ext:
    key, number = path, 1
    while key in tensors:
        number += 1
        key = f"{path}~{number}"
    tensors[key] = tensor
    return msgspec.msgpack.Ext(code, key.encode())


def _plain(value: Any, path: str) -> Any:
    """A number, a truth value, a text or None, of Python's own type."""
    if isinstance(value, np.generic) and not isinstance(value, float | str):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        value = int.__int__(value)
        if not _SMALLEST <= value <= _LARGEST:
            raise UsageError(
                f"cannot save {path}: expected a whole number of at most 64 bits, got "
                f"{value}; save it as a text"
            )
        return value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UsageError(
        f"cannot save {path}: expected tensors, numpy arrays, numbers, texts, lists, "
        f"tuples and dicts of them, got {type(value).__name__}"
    )


def _plain_key(key: Any, path: str) -> Any:
    if isinstance(key, tuple):
        return tuple(_plain_key(part, path) for part in key)
    return _plain(key, f"{path}, the key {key!r}")


def _as_tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise UsageError(f"cannot save {path}: {error}") from None
