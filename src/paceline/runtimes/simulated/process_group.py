"""A torch.distributed backend on the virtual clock, for scripts that call torch.distributed.

Each call becomes one of a `SimulatedGroup`. Paceline's own communicators use that group directly.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from paceline.collectives.schedules import Star, Tree, barrier
from paceline.errors import UsageError
from paceline.interfaces.buckets import stand_alike, wire_bytes
from paceline.runtimes.simulated.collective_group import (
    CollectiveCall,
    CollectiveOperation,
    shapes_of,
)
from paceline.runtimes.simulated.worker_group import (
    REDUCE,
    SimulatedGroup,
    SimulatedWork,
    bytes_of,
    copies,
    reduced,
)
from paceline.torch_internals import ProcessGroupBase, WorkBase, reduce_operation_name

BACKEND = "paceline_virtual"

_ASKING = 1e-6
"""Seconds that a test for completion takes."""


class SimulatedTorchWork(WorkBase):
    """torch's handle of an operation that ends at a virtual instant."""

    def __init__(self, work: SimulatedWork) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the result has arrived, at this worker's own time.

        A check without a result takes a microsecond: otherwise virtual time would stop for a script
        that polls in a loop.
        """
        clock, completion = self._work.clock, self._work.completion
        time = completion.time
        if time is None or time > clock.current.time:
            clock.pause(_ASKING)
            time = completion.time
        return time is not None and time <= clock.current.time

    def is_success(self) -> bool:
        return self.is_completed()


class SimulatedProcessGroup(ProcessGroupBase):
    """A `SimulatedGroup` as a torch.distributed process group."""

    def __init__(self, workers: SimulatedGroup) -> None:
        super().__init__(workers.rank, workers.size)
        self.workers = workers

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    # ---- reductions ----

    def allreduce(
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> SimulatedTorchWork:
        return self._all_reduce(tensors, opts, "all_reduce")

    def allreduce_coalesced(
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> SimulatedTorchWork:
        return self._all_reduce(tensors, opts, "all_reduce_coalesced")

    def _all_reduce(
        self, tensors: list[torch.Tensor], opts: Any, call: str
    ) -> SimulatedTorchWork:
        operation = _operation(opts)
        return SimulatedTorchWork(
            self.workers.all_reduce_tensors(tensors, copies(tensors), operation, call)
        )

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> SimulatedTorchWork:
        operation, root = _operation(opts), opts.rootRank

        def deliver(done: CollectiveOperation, position: int) -> None:
            if position == root:
                for index, tensor in enumerate(tensors):
                    tensor.copy_(reduced(done, index, operation))

        work = self.workers.launch(
            CollectiveCall("reduce", f"{operation}, to {root}", shapes_of(tensors)),
            Tree(self.size(), bytes_of(tensors), root, reduce=True),
            copies(tensors),
            deliver,
        )
        return SimulatedTorchWork(work)

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> SimulatedTorchWork:
        size = bytes_of(inputs[0])
        return self._reduce_scatter(outputs[0], inputs[0], size, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, buffer: torch.Tensor, opts: Any = None
    ) -> SimulatedTorchWork:
        parts = list(buffer.reshape(-1).split(output.numel()))
        return self._reduce_scatter(output, parts, wire_bytes(buffer), opts)

    def _reduce_scatter(
        self, output: torch.Tensor, parts: list[torch.Tensor], size: int, opts: Any
    ) -> SimulatedTorchWork:
        operation = _operation(opts)
        return SimulatedTorchWork(
            self.workers.reduce_scatter_parts(output, parts, size, operation)
        )

    # ---- copies ----

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> SimulatedTorchWork:
        return SimulatedTorchWork(
            self.workers.broadcast_tensors(tensors, opts.rootRank)
        )

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> SimulatedTorchWork:
        def deliver(done: CollectiveOperation, position: int) -> None:
            for output, contribution in zip(outputs[0], done.of_all(), strict=True):
                output.copy_(contribution[0])

        return SimulatedTorchWork(self.workers.gather_everywhere(inputs, deliver))

    def all_gather_single(
        self, output: torch.Tensor, buffer: torch.Tensor, opts: Any = None
    ) -> SimulatedTorchWork:
        return SimulatedTorchWork(self.workers.all_gather(output, buffer))

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> SimulatedTorchWork:
        root = opts.rootRank

        def deliver(done: CollectiveOperation, position: int) -> None:
            if position == root:
                for output, contribution in zip(outputs[0], done.of_all(), strict=True):
                    output.copy_(contribution[0])

        work = self.workers.launch(
            CollectiveCall("gather", f"to {root}", shapes_of(inputs)),
            Star(self.size(), bytes_of(inputs), root, gather=True),
            copies(inputs),
            deliver,
        )
        return SimulatedTorchWork(work)

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any,
    ) -> SimulatedTorchWork:
        root = opts.rootRank
        self.workers.check_runs(root)

        def deliver(done: CollectiveOperation, position: int) -> None:
            outputs[0].copy_(done.of(root)[position])

        work = self.workers.launch(
            CollectiveCall("scatter", f"from {root}", shapes_of(outputs)),
            Star(self.size(), bytes_of(outputs), root),
            copies(inputs[0]) if self.rank() == root else None,
            deliver,
        )
        return SimulatedTorchWork(work)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> SimulatedTorchWork:
        return SimulatedTorchWork(self.workers.exchange(outputs, inputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> SimulatedTorchWork:
        n = self.size()

        def rows(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
            split = tensor.split(sizes or [tensor.shape[0] // n] * n)
            return [stand_alike(row, tensor) for row in split]

        return self.alltoall(rows(output, output_sizes), rows(buffer, input_sizes))

    def barrier(self, opts: Any = None) -> SimulatedTorchWork:
        work = self.workers.launch(
            CollectiveCall("barrier"),
            barrier(self.size()),
            None,
            lambda operation, position: None,
        )
        return SimulatedTorchWork(work)

    # ---- point to point ----

    def send(
        self, tensors: list[torch.Tensor], to: int, tag: int = 0
    ) -> SimulatedTorchWork:
        return SimulatedTorchWork(self.workers.post(tensors, to, tag))

    def recv(
        self, tensors: list[torch.Tensor], source: int, tag: int = 0
    ) -> SimulatedTorchWork:
        return SimulatedTorchWork(self.workers.take(tensors, source, tag))

    def recv_anysource(
        self, tensors: list[torch.Tensor], tag: int = 0
    ) -> SimulatedTorchWork:
        raise UsageError(
            "recv without a source is not available in the simulated runtime: its order "
            "would depend on timing; name the source"
        )


def _operation(opts: Any) -> str:
    name = "SUM" if opts is None else reduce_operation_name(opts.reduceOp)
    if name not in REDUCE:
        raise UsageError(
            f"reduce operation {name} is not available in the simulated runtime; "
            f"available: {', '.join(REDUCE)}"
        )
    return name
