"""What all workers form together: one mean over all of their models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.interfaces import Comm, Run
from paceline.interfaces.buckets import by_kind
from paceline.methods.ds_sync.averaged_tensors import HALF, floating
from paceline.methods.flat_tensors import Flat


class Weighted:
    """A mean over *comm*, in which this worker counts as *weight* of a *total*; whoever
    weighs nothing only learns the result."""

    def __init__(self, run: Run, comm: Comm, weight: int, total: int) -> None:
        self._run, self._comm = run, comm
        self._factor = weight * comm.size / total

    def mean(
        self,
        sources: Iterable[Sequence[torch.Tensor]],
        into: Iterable[Sequence[torch.Tensor]],
    ) -> None:
        """Of groups of tensors, each of one kind, *into* tensors of the same shapes. Sums of
        half-precision numbers are formed in single precision. Collective."""
        under_way = []
        for tensors, targets in zip(sources, into, strict=True):
            wide = torch.float32 if targets[0].dtype in HALF else None
            flat = Flat(targets, wide)
            if self._factor:
                for view, tensor in zip(flat.views, tensors, strict=True):
                    view.copy_(tensor.detach())
                if self._factor != 1.0:
                    flat.buffer.mul_(self._factor)
            under_way.append((flat, self._run.average(flat.buffer, among=self._comm)))
        for flat, pending in under_way:
            pending.wait()
            flat.put()

    def model(self) -> None:
        """The parameters, and the statistics of their BatchNorm layers; what these count, as
        far as anybody has counted. Collective."""
        run = self._run
        parts = [bucket.parameters for bucket in run.buckets]
        parts += by_kind(floating(run.own_buffers))  # type: ignore[arg-type]
        self.mean(parts, parts)
        counts = [one for one in run.own_buffers if _counts(one)]
        for kind in by_kind(counts):
            flat = Flat(kind, torch.uint8 if kind[0].dtype == torch.bool else None)
            flat.take()
            self._comm.all_reduce(flat.buffer, "max").wait()
            flat.put()


def _counts(buffer: torch.Tensor) -> bool:
    """Whether it holds whole numbers, or flags, of which all take the largest."""
    real = buffer.is_floating_point() or buffer.is_complex()
    return not real and buffer.numel() > 0


def copies(run: Run) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every tensor that `Weighted.model` writes to, and what it holds now."""
    tensors = [*run.parameters, *run.own_buffers]
    return [(tensor, tensor.detach().clone()) for tensor in tensors]
