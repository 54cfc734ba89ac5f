"""Codes that stand alone: what one worker's mean something without the others'.

A mean of them is formed by gathering: everybody decodes all workers' codes, in the order of
ranks, and adds them up, so that all end with the same bits. A server decodes what one worker
has pushed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from paceline.compression.no_compression import summed
from paceline.compression.packing import (
    Reader,
    dense,
    elements,
    is_lossy,
    is_small,
    places,
    put,
    real_type,
    reals,
    to_bytes,
)
from paceline.interfaces import Coding, Compressor, Gather, Leg, Place, Shape, State


class Alone(Compressor):
    """Subclasses write `_encode`, `_decode` and `_size`, for real tensors of floating point
    that are neither empty nor, where they have a field *small*, small; the rest is here.

    Small tensors, and those of which nothing may be lost, are sent as they are: summed where
    a mean is formed, in front of the code where it is pushed.
    """

    linear: ClassVar[bool] = False
    small: int = 0

    @property
    def rounds(self) -> int:
        """One for codes, and one for what is sent as it is."""
        return 2 if self.small else 1

    @property
    def decodes_per_worker(self) -> bool:
        return True

    @abstractmethod
    def _encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """A flat code of bytes, of `_size`."""

    @abstractmethod
    def _decode(
        self,
        code: torch.Tensor,
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        add: bool,
    ) -> None:
        """What *code* stands for, into *parts* or added to them. They have the shapes of what
        was encoded, whose type was *dtype*; their own may be wider. Raises `UsageError` where
        *code* is too short or too long (`Reader` does), or where a number in it cannot be,
        such as a place outside of a tensor."""

    @abstractmethod
    def _size(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """The bytes of a code."""

    def code_bytes(self, shapes: Sequence[Shape], dtype: torch.dtype) -> int:
        """See `PerWorkerCompressor.code_bytes`."""
        kept, kind = real_type(shapes, dtype)
        lossy = is_lossy(kind)
        large = [s for s in kept if lossy and not is_small(s, self.small)]
        plain = [s for s in kept if not lossy or is_small(s, self.small)]
        code = self._size(large, kind) if large else 0
        return elements(plain) * kind.itemsize + code

    def traffic(
        self, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
    ) -> Sequence[Leg]:
        kept, kind = real_type(shapes, dtype)
        if not is_lossy(kind):
            return dense(kept, kind)
        large = [shape for shape in kept if not is_small(shape, self.small)]
        plain = [shape for shape in kept if is_small(shape, self.small)]
        code = (Leg("gather", self._size(large, kind)),) if large else ()
        return (*dense(plain, kind), *code)

    def average(
        self,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
        place: Place,
        sent: Sequence[torch.Tensor] | None = None,
    ) -> Coding:
        plain, large, own = self._sorted(parts, states)
        plain_sent, large_sent = (None, None)
        if sent is not None:
            plain_sent, large_sent, _ = self._sorted(sent, states)
        # Coding comes before the first wait, beside the backward pass.
        code = self._encode(large, own) if large else None
        if code is not None and large_sent is not None:
            self._decode(code, large_sent, large[0].dtype, add=False)
        yield from summed(plain, plain_sent)
        if code is not None:
            everyone = yield Gather(code)
            self._add_up(everyone, large)

    def encode(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> torch.Tensor:
        """See `PerWorkerCompressor.encode`."""
        plain, large, own = self._sorted(parts, states)
        codes = [to_bytes(*plain)] if plain else []
        if large:
            codes.append(self._encode(large, own))
        return torch.cat(codes) if len(codes) != 1 else codes[0]

    def decode(
        self, code: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool = False
    ) -> None:
        """See `PerWorkerCompressor.decode`."""
        plain, large, _ = self._sorted(parts, [{}] * len(parts))
        reader = Reader(code)
        for part in plain:
            value = reader.take(part.dtype, part.numel()).view(part.shape)
            part.add_(value) if add else part.copy_(value)
        if large:
            self._decode(reader.rest(), large, large[0].dtype, add)
        else:
            reader.end()

    def _sorted(
        self, parts: Sequence[torch.Tensor], states: Sequence[State]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[State]]:
        """What is sent as it is, what is coded, and the states of that."""
        kept = [s for part, s in zip(parts, states, strict=True) if part.numel()]
        plain, large, own = [], [], []
        for part, state in zip(reals(parts), kept, strict=True):
            if is_lossy(part.dtype) and not is_small(part.shape, self.small):
                large.append(part)
                own.append(state)
            else:
                plain.append(part)
        return plain, large, own

    def _add_up(self, everyone: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """All workers' codes, decoded, and added up in at least 32 bits."""
        dtype, wide = parts[0].dtype, list(parts)
        if dtype.itemsize < 4:
            count = elements([part.shape for part in parts])
            whole = torch.empty(count, dtype=torch.float32, device=parts[0].device)
            wide = places(whole, parts)
        for number, code in enumerate(everyone):
            self._decode(code, wide, dtype, add=number > 0)
        if wide[0] is not parts[0]:
            put(whole, parts)
