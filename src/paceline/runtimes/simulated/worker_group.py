"""`SimulatedGroup`, the `WorkerGroup` of simulated workers, and all groups of a simulation.

Each operation defines a rank's contribution, the schedule that moves it, and how the result is
written to the rank's buffers. A `CollectiveGroup` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from operator import eq
from typing import Any

import torch

from paceline.cluster.links import Links
from paceline.cluster.worker_classes import WorkerClasses
from paceline.collectives.gloo_sum import ring_sum
from paceline.collectives.schedule_execution import reduce_function, simulate_values
from paceline.collectives.schedules import Ring, Tree, all_to_all
from paceline.errors import UsageError
from paceline.interfaces import ReduceOperation, Schedule
from paceline.interfaces.buckets import stand_alike, wire_bytes
from paceline.records import Span
from paceline.runtimes.simulated.clock import Completion, VirtualClock
from paceline.runtimes.simulated.collective_group import (
    CollectiveCall,
    CollectiveGroup,
    CollectiveOperation,
    Deliver,
    shapes_of,
)


class SimulatedWork:
    """Handle of an operation of a `SimulatedGroup`, which ends at a virtual instant."""

    __slots__ = ("clock", "completion")

    def __init__(self, clock: VirtualClock, completion: Completion) -> None:
        self.clock = clock
        self.completion = completion

    def wait(self) -> None:
        """Return at the instant at which the result arrives."""
        self.clock.wait(self.completion)

    def on_completion(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which the result arrives."""
        self.clock.when(self.completion, action)


class SimulatedGroup:
    """One worker's end of a `CollectiveGroup`: the `WorkerGroup` of simulated workers.

    Scripts that call torch.distributed get a `SimulatedProcessGroup` over it.

    Args:
        name: Separates its streams of messages from those of other ends of the same group.
        rank: The worker's position in the group.
        shared: The group, which all members share.
        groups: All groups of the simulation.
    """

    follows_streams = False
    moves_host_tensors = True

    def __init__(
        self, name: str, rank: int, shared: CollectiveGroup, groups: CollectiveGroups
    ) -> None:
        self.name = name
        self.rank, self.size = rank, len(shared.ranks)
        self.shared = shared
        self._groups = groups

    def max_in_flight(self, device: torch.device) -> int:
        return self.shared.lanes

    # ---- collectives ----

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation
    ) -> SimulatedWork:
        # The buffer belongs to the group until wait(), and no rank is done before all have called.
        return self.all_reduce_tensors([buffer], [buffer.detach()], _NAMES[operation])

    def all_reduce_tensors(
        self,
        outputs: Sequence[torch.Tensor],
        contribution: Sequence[torch.Tensor],
        operation: str,
        call: str = "all_reduce",
    ) -> SimulatedWork:
        """Combine tensors of all ranks. *operation* is torch's name, such as "SUM"."""

        def deliver(done: CollectiveOperation, position: int) -> None:
            for index, output in enumerate(outputs):
                output.copy_(reduced(done, index, operation, ring=True))

        return self.launch(
            CollectiveCall(call, operation, shapes_of(outputs)),
            Ring(self.size, bytes_of(outputs)),
            contribution,
            deliver,
        )

    def broadcast(self, buffer: torch.Tensor, source: int) -> SimulatedWork:
        return self.broadcast_tensors([buffer], source)

    def broadcast_tensors(
        self, tensors: Sequence[torch.Tensor], source: int
    ) -> SimulatedWork:
        """Broadcast all tensors in one operation."""
        self.check_runs(source)

        def deliver(done: CollectiveOperation, position: int) -> None:
            if position != source:
                _fill(tensors, done.of(source))

        return self.launch(
            CollectiveCall("broadcast", f"from {source}", shapes_of(tensors)),
            Tree(self.size, bytes_of(tensors), source),
            copies(tensors) if self.rank == source else None,
            deliver,
        )

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, operation: ReduceOperation
    ) -> SimulatedWork:
        parts = buffer.reshape(-1).split(output.numel())
        name = _NAMES[operation]
        return self.reduce_scatter_parts(output, parts, wire_bytes(buffer), name)

    def reduce_scatter_parts(
        self,
        output: torch.Tensor,
        parts: Sequence[torch.Tensor],
        size: int,
        operation: str,
    ) -> SimulatedWork:
        """Reduce and scatter parts.

        *operation* is torch's name; *size* is the bytes of all parts.
        """

        def deliver(done: CollectiveOperation, position: int) -> None:
            output.copy_(reduced(done, position, operation).view(output.shape))

        return self.launch(
            CollectiveCall("reduce_scatter", operation, shapes_of(parts)),
            Ring(self.size, size, rounds=1),
            copies(parts),
            deliver,
        )

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> SimulatedWork:
        def deliver(done: CollectiveOperation, position: int) -> None:
            # Copy once for all ranks: n copies instead of n * n.
            if 0 not in done.results:
                flat = [tensors[0].reshape(-1) for tensors in done.of_all()]
                done.results[0] = torch.cat(flat)
            output.copy_(done.results[0].view(output.shape))

        return self.gather_everywhere([buffer], deliver)

    def gather_everywhere(
        self, tensors: Sequence[torch.Tensor], deliver: Deliver
    ) -> SimulatedWork:
        """Send every rank's *tensors* to all ranks."""
        return self.launch(
            CollectiveCall("all_gather", "", shapes_of(tensors)),
            Ring(self.size, self.size * bytes_of(tensors), rounds=1),
            copies(tensors),
            deliver,
        )

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> SimulatedWork:
        return self.exchange(self._rows(output), self._rows(buffer))

    def _rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = tensor.split([tensor.shape[0] // self.size] * self.size)
        return [stand_alike(row, tensor) for row in rows]

    def exchange(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> SimulatedWork:
        """Send part r of *inputs* to rank r, and receive part r of *outputs* from it."""
        # Messages end rank by rank, so ranks of one class may continue at different times.
        self.check_all_run("an exchange among all")

        def deliver(done: CollectiveOperation, position: int) -> None:
            for output, contribution in zip(outputs, done.of_all(), strict=True):
                output.copy_(contribution[position])

        largest = max(bytes_of([tensor]) for tensor in inputs)
        return self.launch(
            CollectiveCall("all_to_all", f"{len(inputs)} tensors"),
            all_to_all(self.size, largest),
            copies(inputs),
            deliver,
        )

    # ---- messages and schedules ----

    def send(self, buffer: torch.Tensor, to: int, stream: str) -> SimulatedWork:
        return self.post([buffer], to, f"{self.name}|{stream}")

    def post(
        self, tensors: Sequence[torch.Tensor], to: int, tag: Hashable
    ) -> SimulatedWork:
        """Send several tensors as one message."""
        self.check_all_run()
        payload = copies(tensors)
        wait_for_kernels()
        completion = self.shared.mailbox.send(
            self.rank, to, tag, bytes_of(tensors), payload
        )
        return SimulatedWork(self.shared.clock, completion)

    def receive(self, buffer: torch.Tensor, source: int, stream: str) -> SimulatedWork:
        return self.take([buffer], source, f"{self.name}|{stream}")

    def take(
        self, tensors: Sequence[torch.Tensor], source: int, tag: Hashable
    ) -> SimulatedWork:
        """Receive several tensors that arrive as one message."""
        self.check_all_run()
        completion = self.shared.mailbox.receive(
            source, self.rank, tag, _finishing(partial(_fill, tensors))
        )
        return SimulatedWork(self.shared.clock, completion)

    def perform(
        self,
        schedule: Schedule,
        flat: torch.Tensor,
        operation: ReduceOperation,
        timed: Schedule,
        unit: float,
        stream: str,
    ) -> SimulatedWork:
        # A stream has a queue of its own.
        if stream:
            name = f"{self.name}, after {stream}"
            whole = self._groups.end(name, self.shared.ranks, shared=True)
            return whole.perform(schedule, flat, operation, timed, unit, "")

        def deliver(done: CollectiveOperation, position: int) -> None:
            held = done.results.get(0)
            if held is None:
                # This rank is done, so ranks that have not called cannot affect it.
                held = [
                    torch.zeros_like(flat) if own is None else own[0].clone()
                    for own in done.of_all()
                ]
                simulate_values(schedule, held, reduce_function(operation))
                if all(done.called.values()):
                    done.results[0] = held
            flat.copy_(held[position])
            if operation == "mean":
                flat.div_(self.size)

        kind = type(schedule).__name__
        return self.launch(
            CollectiveCall("perform", f"{kind}, {operation}", shapes_of([flat])),
            timed,
            copies([flat]),
            deliver,
            unit,
        )

    def launch(
        self,
        call: CollectiveCall,
        schedule: Schedule,
        contribution: Any,
        deliver: Deliver,
        unit: float = 1,
    ) -> SimulatedWork:
        """See `CollectiveGroup.launch`."""
        shared = self.shared
        wait_for_kernels()
        completion = shared.launch(
            self.rank, call, schedule, contribution, _finishing(deliver), unit
        )
        return SimulatedWork(shared.clock, completion)

    def check_runs(self, root: int) -> None:
        """Raise `UsageError` if the source rank does not run."""
        group = self.shared
        if group.represented_by[root] != root:
            raise UsageError(
                f"worker {group.ranks[root]} sends to all on group {group.name!r}, and only its "
                f"representative, worker {group.ranks[group.represented_by[root]]}, runs: expected "
                "one that runs as the source; simulate all workers"
            )

    def check_all_run(self, what: str = "a message between two") -> None:
        """Raise `UsageError` if some ranks do not run, and single ranks' messages matter."""
        group = self.shared
        if group.stands_for:
            raise UsageError(
                f"{what} workers on group {group.name!r}, of which "
                f"representatives run: expected reductions and gathers; simulate all workers"
            )

    # ---- other groups ----

    def renamed(self, name: str) -> SimulatedGroup:
        """Return another end of the same group, with streams of its own."""
        return SimulatedGroup(name, self.rank, self.shared, self._groups)

    def split(self, name: str, ranks: Sequence[int]) -> SimulatedGroup:
        return self._groups.end(name, [self.shared.ranks[rank] for rank in ranks])

    def subset(self, name: str, ranks: Sequence[int]) -> SimulatedGroup:
        members = [self.shared.ranks[rank] for rank in ranks]
        among = f"{self.name}, among {list(ranks)}"
        return self._groups.end(among, members, shared=True).renamed(name)

    def has_room(self, kept: int, ranks: Sequence[int]) -> bool:
        # Groups need neither threads nor connections.
        return True

    def close(self) -> None:
        """Do nothing: a simulated group holds no resources."""


class CollectiveGroups:
    """All groups of a simulation's workers, and each worker's ends of them."""

    def __init__(
        self,
        clock: VirtualClock,
        links: Links,
        *,
        lanes: int,
        play: bool,
        observe: Callable[[Span], None] | None = None,
        classes: WorkerClasses | None = None,
    ) -> None:
        self._clock, self._links = clock, links
        self._lanes, self._play = lanes, play
        self._observe = observe
        self._classes = classes
        self._everyone = range(links.cluster.workers)
        self._found: dict[tuple[str, Sequence[int], int], CollectiveGroup] = {}
        self._made: dict[tuple[int, str, Sequence[int]], int] = {}
        self._names: set[str] = set()

    def of_script(self, name: str, ranks: Sequence[int]) -> SimulatedGroup:
        """Return the calling worker's end of a group that its script makes by torch.distributed."""
        whole = self._members(ranks) is self._everyone
        return self.end(name, ranks, title="world" if whole else name)

    def end(
        self,
        name: str,
        ranks: Sequence[int],
        *,
        shared: bool = False,
        title: str = "",
    ) -> SimulatedGroup:
        """Return the calling worker's end of a group.

        Args:
            name: Names the group; its members ask for equal names in the same order.
            ranks: Its members, as workers of the simulation.
            shared: Return the group that was made before, if there is one.
            title: The name in messages to the user; empty: *name*.
        """
        rank = self._clock.current.rank
        members = self._members(ranks)
        # A name can be used again after its group was destroyed. The n-th time that a worker makes
        # a group is the n-th time for every other member.
        times = self._made.get((rank, name, members), 0)
        if not shared:
            self._made[rank, name, members] = times + 1
        key = name, members, times
        if key not in self._found:
            self._found[key] = self._make(title or name, members)
        return SimulatedGroup(name, members.index(rank), self._found[key], self)

    def _members(self, ranks: Sequence[int]) -> Sequence[int]:
        everyone = self._everyone
        if len(ranks) == len(everyone) and all(map(eq, ranks, everyone)):
            # The ranks are shared, and already hashed.
            return everyone
        return tuple(ranks)

    def _make(self, title: str, members: Sequence[int]) -> CollectiveGroup:
        if title in self._names:
            title = f"{title} {len(self._found)}"
        self._names.add(title)
        return CollectiveGroup(
            title,
            members,
            self._clock,
            self._links,
            lanes=self._lanes,
            play=self._play,
            observe=self._observe,
            represented_by=(
                None if self._classes is None else self._classes.within(members)
            ),
        )


# ---- data ----

_NAMES: dict[ReduceOperation, str] = {"mean": "AVG", "sum": "SUM", "max": "MAX"}

REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda a, b: torch.minimum(a, b, out=a),
    "MAX": lambda a, b: torch.maximum(a, b, out=a),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}
"""Functions that combine a second tensor into a first, by torch's name of the reduction."""


def reduced(
    operation: CollectiveOperation, index: int, name: str, *, ring: bool = False
) -> torch.Tensor:
    """Return tensor *index* of all contributions, combined once for all ranks.

    Combines in rank order, or sums in gloo's *ring* order.
    """
    if index not in operation.results:
        tensors = [own[index] for own in operation.contributions.values()]
        if operation.weights is not None:
            tensors = list(
                map(partial(_repeated, name), tensors, operation.weights.values())
            )
        if ring and name in ("SUM", "AVG"):
            result = ring_sum(tensors)
        else:
            result = reduce(REDUCE[name], tensors[1:], tensors[0].clone())
        if name == "AVG":
            whole = not (result.is_floating_point() or result.is_complex())
            # Round means of integers like NCCL.
            result.div_(
                len(operation.represented_by), rounding_mode="trunc" if whole else None
            )
        operation.results[index] = result
    combined: torch.Tensor = operation.results[index]
    return combined


def _repeated(name: str, tensor: torch.Tensor, times: int) -> torch.Tensor:
    """Return a representative's tensor as often as the workers that it represents contribute it."""
    if name in ("SUM", "AVG"):
        return tensor * times
    if name == "PRODUCT":
        return tensor**times
    if name == "BXOR":
        return tensor * (times % 2)
    return tensor


def wait_for_kernels() -> None:
    """Wait until GPUs have done the work that this thread has queued on its current streams.

    Each worker may train on a stream of its own. No stream knows another, so data must be complete
    before it passes from one worker to another.
    """
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.current_stream(device).synchronize()


def _finishing(deliver: Callable[..., None]) -> Callable[..., None]:
    """Return *deliver*, but with results that are complete when it returns."""

    def finished(*arguments: Any) -> None:
        deliver(*arguments)
        wait_for_kernels()

    return finished


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies, so that the caller may reuse its buffers."""
    return [tensor.detach().clone() for tensor in tensors]


def _fill(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value.view(tensor.shape))


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes on the network."""
    return sum(wire_bytes(tensor) for tensor in tensors)
