"""A torch.distributed backend on the virtual clock.

Scripts, and paceline's own `Comm`, call torch.distributed as always; this file translates
each call into an operation of a `CollectiveGroup`: what the rank contributes, which schedule
moves it, and how the result gets into its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import lru_cache, partial, reduce
from typing import Any

import torch

from paceline.collectives.execute import (
    reduce_function,
    ring_sum,
    simulate_values,
)
from paceline.collectives.schedules import Ring, Star, Tree, all_to_all, barrier
from paceline.errors import UsageError
from paceline.interfaces import ReduceOperation, Schedule
from paceline.interfaces.buckets import stand_alike, wire_bytes
from paceline.runtimes.simulated.clock import Completion, VirtualClock
from paceline.runtimes.simulated.comm import (
    CollectiveGroup,
    CollectiveOperation,
    Deliver,
    Mailbox,
)
from paceline.torch_internals import ProcessGroupBase, WorkBase, reduce_operation_name

_ASKING = 1e-6
"""Seconds that a question for completion takes."""


class SimulatedWork(WorkBase):
    """Work that ends at a virtual instant."""

    def __init__(self, clock: VirtualClock, completion: Completion) -> None:
        super().__init__()
        self._clock = clock
        self._completion = completion

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._clock.wait(self._completion)
        return True

    def when_in(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which the result is in."""
        self._clock.when(self._completion, action)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the result is in, at this worker's own time.

        Asking in vain takes a microsecond: a script that asks in a loop would otherwise
        never let virtual time go on.
        """
        time = self._completion.time
        if time is None or time > self._clock.current.time:
            self._clock.pause(_ASKING)
            time = self._completion.time
        return time is not None and time <= self._clock.current.time

    def is_success(self) -> bool:
        return self.is_completed()


BACKEND = "paceline_virtual"

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda a, b: torch.minimum(a, b, out=a),
    "MAX": lambda a, b: torch.maximum(a, b, out=a),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


class SimulatedProcessGroup(ProcessGroupBase):
    """One worker's end of a `CollectiveGroup`.

    *make* gives the calling worker's end of a group with this name and these workers, a new
    one or, if asked for, the one that there is.
    """

    def __init__(
        self,
        rank: int,
        communicator: CollectiveGroup,
        mailbox: Mailbox,
        make: Callable[[str, Sequence[int], bool], SimulatedProcessGroup],
    ) -> None:
        super().__init__(rank, len(communicator.ranks))
        self._make = make
        self._position = rank
        self._communicator = communicator
        self._mailbox = mailbox
        self._clock = communicator.clock
        self.lanes = communicator.lanes

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def beside(self, name: str, ranks: Sequence[int]) -> SimulatedProcessGroup:
        """A new group *name* of the members *ranks* of this one."""
        members = [self._communicator.ranks[rank] for rank in ranks]
        return self._make(name, members, False)

    def shared(self, name: str, ranks: Sequence[int]) -> SimulatedProcessGroup:
        """The group *name* of the members *ranks* of this one: the same one each time."""
        members = [self._communicator.ranks[rank] for rank in ranks]
        return self._make(name, members, True)

    def _launch(
        self,
        call: str,
        schedule: Schedule,
        contribution: Any,
        deliver: Deliver,
        unit: float = 1,
    ) -> SimulatedWork:
        def write(operation: CollectiveOperation, position: int) -> None:
            # Whichever worker's thread this is: parameters and inference tensors too.
            with torch.inference_mode():
                deliver(operation, position)

        completion = self._communicator.launch(
            self._position, call, schedule, contribution, write, unit
        )
        return SimulatedWork(self._clock, completion)

    # ---- reductions ----

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> SimulatedWork:
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> SimulatedWork:
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(
        self, call: str, tensors: list[torch.Tensor], opts: Any
    ) -> SimulatedWork:
        name = _operation(opts)

        def deliver(operation: CollectiveOperation, position: int) -> None:
            for index, tensor in enumerate(tensors):
                tensor.copy_(_reduced(operation, index, name, ring=True))

        return self._launch(
            f"{call}({name}, {_shapes(tensors)})",
            Ring(self.size(), _bytes(tensors)),
            _copies(tensors),
            deliver,
        )

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> SimulatedWork:
        name = _operation(opts)

        def deliver(operation: CollectiveOperation, position: int) -> None:
            if position == opts.rootRank:
                for index, tensor in enumerate(tensors):
                    tensor.copy_(_reduced(operation, index, name))

        return self._launch(
            f"reduce({name}, to {opts.rootRank}, {_shapes(tensors)})",
            Tree(self.size(), _bytes(tensors), opts.rootRank, reduce=True),
            _copies(tensors),
            deliver,
        )

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any = None,
    ) -> SimulatedWork:
        return self._reduce_scatter(outputs, inputs[0], _bytes(inputs[0]), opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, buffer: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        parts = buffer.reshape(-1).split(output.numel())
        return self._reduce_scatter([output], list(parts), wire_bytes(buffer), opts)

    def _reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        parts: list[torch.Tensor],
        size: int,
        opts: Any,
    ) -> SimulatedWork:
        name = _operation(opts)

        def deliver(operation: CollectiveOperation, position: int) -> None:
            result = _reduced(operation, position, name)
            outputs[0].copy_(result.view(outputs[0].shape))

        return self._launch(
            f"reduce_scatter({name}, {_shapes(parts)})",
            Ring(self.size(), size, rounds=1),
            _copies(parts),
            deliver,
        )

    def perform(
        self,
        schedule: Schedule,
        flat: torch.Tensor,
        operation: ReduceOperation,
        timed: Schedule,
        unit: float,
    ) -> SimulatedWork:
        """Move and add up as *schedule* says. *timed* is the same where time is charged; one
        unit of that is *unit* bytes."""

        def deliver(done: CollectiveOperation, position: int) -> None:
            held = done.results.get(0)
            if held is None:
                # Who has not come yet cannot matter to this rank, which is done.
                held = [
                    torch.zeros_like(flat) if copies is None else copies[0].clone()
                    for copies in done.of_all()
                ]
                simulate_values(schedule, held, reduce_function(operation))
                if all(done.called.values()):
                    done.results[0] = held
            flat.copy_(held[position])
            if operation == "mean":
                flat.div_(self.size())

        kind = type(schedule).__name__
        return self._launch(
            f"perform({kind}, {operation}, {_shapes([flat])})",
            timed,
            _copies([flat]),
            deliver,
            unit,
        )

    # ---- copies ----

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> SimulatedWork:
        root = opts.rootRank
        self._check_runs(root)

        def deliver(operation: CollectiveOperation, position: int) -> None:
            if position != root:
                _fill(tensors, operation.of(root))

        return self._launch(
            f"broadcast(from {root}, {_shapes(tensors)})",
            Tree(self.size(), _bytes(tensors), root),
            _copies(tensors) if self._position == root else None,
            deliver,
        )

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any = None,
    ) -> SimulatedWork:
        def deliver(operation: CollectiveOperation, position: int) -> None:
            for output, contribution in zip(
                outputs[0], operation.of_all(), strict=True
            ):
                output.copy_(contribution[0])

        return self._all_gather(inputs, deliver)

    def all_gather_single(
        self, output: torch.Tensor, buffer: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        def deliver(operation: CollectiveOperation, position: int) -> None:
            if 0 not in operation.results:  # once for all ranks: n copies, not n * n
                flat = [tensors[0].reshape(-1) for tensors in operation.of_all()]
                operation.results[0] = torch.cat(flat)
            output.copy_(operation.results[0].view(output.shape))

        return self._all_gather([buffer], deliver)

    def _all_gather(
        self,
        inputs: list[torch.Tensor],
        deliver: Deliver,
    ) -> SimulatedWork:
        return self._launch(
            f"all_gather({_shapes(inputs)})",
            Ring(self.size(), self.size() * _bytes(inputs), rounds=1),
            _copies(inputs),
            deliver,
        )

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: Any,
    ) -> SimulatedWork:
        root = opts.rootRank

        def deliver(operation: CollectiveOperation, position: int) -> None:
            if position == root:
                for output, contribution in zip(
                    outputs[0], operation.of_all(), strict=True
                ):
                    output.copy_(contribution[0])

        return self._launch(
            f"gather(to {root}, {_shapes(inputs)})",
            Star(self.size(), _bytes(inputs), root, gather=True),
            _copies(inputs),
            deliver,
        )

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: Any,
    ) -> SimulatedWork:
        root = opts.rootRank
        self._check_runs(root)

        def deliver(operation: CollectiveOperation, position: int) -> None:
            outputs[0].copy_(operation.of(root)[position])

        return self._launch(
            f"scatter(from {root}, {_shapes(outputs)})",
            Star(self.size(), _bytes(outputs), root),
            _copies(inputs[0]) if self._position == root else None,
            deliver,
        )

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> SimulatedWork:
        # Its messages end rank by rank: of a class, some go on earlier than others.
        self._check_all_run("an exchange among all")

        def deliver(operation: CollectiveOperation, position: int) -> None:
            for output, contribution in zip(outputs, operation.of_all(), strict=True):
                output.copy_(contribution[position])

        largest = max(_bytes([tensor]) for tensor in inputs)
        return self._launch(
            f"all_to_all({len(inputs)} tensors)",
            all_to_all(self.size(), largest),
            _copies(inputs),
            deliver,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> SimulatedWork:
        n = self.size()

        def rows(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
            split = tensor.split(sizes or [tensor.shape[0] // n] * n)
            return [stand_alike(row, tensor) for row in split]

        return self.alltoall(rows(output, output_sizes), rows(buffer, input_sizes))

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._launch(
            "barrier()", barrier(self.size()), None, lambda operation, position: None
        )

    def _check_runs(self, root: int) -> None:
        """Raise `UsageError` where the rank whose data all get is one that does not run."""
        group = self._communicator
        if group.represented_by[root] != root:
            raise UsageError(
                f"worker {group.ranks[root]} sends to all on group {group.name!r}, and only its "
                f"representative, worker {group.ranks[group.represented_by[root]]}, runs: expected "
                "one that runs as the source; simulate all workers"
            )

    def _check_all_run(self, what: str = "a message between two") -> None:
        """Raise `UsageError` where messages of single ranks decide, and some ranks do not run."""
        group = self._communicator
        if group.stands_for:
            raise UsageError(
                f"{what} workers on group {group.name!r}, of which "
                f"representatives run: expected reductions and gathers; simulate all workers"
            )

    # ---- point to point ----

    def send(
        self, tensors: list[torch.Tensor], to: int, tag: Hashable = 0
    ) -> SimulatedWork:
        self._check_all_run()
        completion = self._mailbox.send(
            self._position, to, tag, _bytes(tensors), _copies(tensors)
        )
        return SimulatedWork(self._clock, completion)

    def recv(
        self, tensors: list[torch.Tensor], source: int, tag: Hashable = 0
    ) -> SimulatedWork:
        self._check_all_run()
        completion = self._mailbox.receive(
            source, self._position, tag, partial(_fill, tensors)
        )
        return SimulatedWork(self._clock, completion)

    def recv_anysource(
        self, tensors: list[torch.Tensor], tag: int = 0
    ) -> SimulatedWork:
        raise UsageError(
            "recv without a source is not available in the simulated runtime: its order "
            "would depend on timing; name the source"
        )


def _reduced(
    operation: CollectiveOperation, index: int, name: str, *, ring: bool = False
) -> torch.Tensor:
    """Tensor *index* of all contributions, combined once for all ranks: in rank order, or
    sums in gloo's *ring* order."""
    if index not in operation.results:
        tensors = [own[index] for own in operation.contributions.values()]
        if operation.weights is not None:
            tensors = list(
                map(partial(_repeated, name), tensors, operation.weights.values())
            )
        if ring and name in ("SUM", "AVG"):
            result = ring_sum(tensors)
        else:
            result = reduce(_REDUCE[name], tensors[1:], tensors[0])
        if name == "AVG":
            whole = not (result.is_floating_point() or result.is_complex())
            # Of whole numbers as NCCL has it.
            result.div_(
                len(operation.represented_by), rounding_mode="trunc" if whole else None
            )
        operation.results[index] = result
    combined: torch.Tensor = operation.results[index]
    return combined


def _repeated(name: str, tensor: torch.Tensor, times: int) -> torch.Tensor:
    """A representative's tensor as often as the workers that it stands for contribute it."""
    if name in ("SUM", "AVG"):
        return tensor * times
    if name == "PRODUCT":
        return tensor**times
    if name == "BXOR":
        return tensor * (times % 2)
    return tensor


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _fill(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value.view(tensor.shape))


def _operation(opts: Any) -> str:
    name = "SUM" if opts is None else reduce_operation_name(opts.reduceOp)
    if name not in _REDUCE:
        raise UsageError(
            f"reduce operation {name} is not available in the simulated runtime; "
            f"available: {', '.join(_REDUCE)}"
        )
    return name


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(wire_bytes(tensor) for tensor in tensors)


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    if len(tensors) > 3:
        return f"{len(tensors)} tensors of {sum(t.numel() for t in tensors)} elements"
    return ", ".join(_shape(t.dtype, tuple(t.shape)) for t in tensors)


@lru_cache(maxsize=1024)
def _shape(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{'x'.join(map(str, shape))}]"
