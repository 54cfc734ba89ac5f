"""Nodes of workers that train one model together, and exchange it with the other nodes.

Between two exchanges the workers of a node hold the same parameters, since they step with the same
gradient. One of them, in turn, sends for the node. A worker that is out of data does not step, and is
behind the others of its node until the next exchange. So workers of a node first find the one that has
trained most, and the sender gets its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.interfaces import Comm, Pending, Run
from paceline.methods.local_updates.fragments import TrainedSince
from paceline.methods.model_averaging import ModelAverager


@dataclass
class Progress:
    """A worker's progress: *since* the last exchange, and *steps* in all."""

    since: TrainedSince = field(default_factory=TrainedSince)
    steps: int = 0

    def count(self, weight: float) -> None:
        """Count a step on samples with this *weight*."""
        self.since.weight += weight
        self.steps += 1

    def as_tensor(self, run: Run) -> torch.Tensor:
        """Return the weight since the last exchange, and the number of steps, as a tensor to be sent."""
        own, device = [self.since.weight, self.steps], run.parameters[0].device
        return torch.tensor(own, dtype=torch.float64, device=device)


class Nodes:
    """The job's nodes.

    *members*: the ranks of each node. *own*: the number of this worker's node. *inside*: its workers.
    """

    def __init__(self, run: Run, places: Sequence[int]) -> None:
        numbers = sorted(set(places))
        self.members = [
            [rank for rank, place in enumerate(places) if place == number]
            for number in numbers
        ]
        self.own = numbers.index(places[run.comm.rank])
        self.inside: Comm = run.comm.group(self.members[self.own])
        self._all, self._rank = run.comm, run.comm.rank

    @property
    def count(self) -> int:
        """The paper's P."""
        return len(self.members)

    def weight(self, samples: Sequence[float], steps: int) -> float:
        """Return the weight of a node whose workers have trained on *samples* in *steps* steps.

        It is 1 if all workers have trained equally much, and all nodes have equally many workers.
        """
        return sum(samples) * self.count / (self._all.size * steps)

    def speaker(self, turn: int) -> int:
        """Return the position in this node of the worker that sends for it."""
        return turn % len(self.members[self.own])

    def across(self, turn: int) -> Comm | None:
        """Return the group of the nodes' senders; None on other workers, or with one node."""
        speaking = [node[turn % len(node)] for node in self.members]
        if self.count == 1 or self._rank not in speaking:
            return None
        return self._all.group(speaking)


@dataclass
class Exchange:
    """An exchange in flight, in the buffers of the model's flat tensors, *delay* (B) steps long.

    *due*: the step after which it is used. *turn*: determines the sender. *weights*: this node's
    weight and, after its arrival, the sum of all nodes' weights.
    """

    due: int
    turn: int
    delay: int
    weights: torch.Tensor
    pending: list[Pending] = field(default_factory=list)

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait()
        self.pending.clear()


def begin(
    nodes: Nodes,
    model: ModelAverager,
    run: Run,
    progress: Progress,
    turn: int,
    delay: int,
) -> Exchange:
    """Send this node's parameters to the other nodes: sums of a*w and of a. Collective.

    Node p has the weight a_p.
    """
    inside = nodes.inside
    own = progress.as_tensor(run)
    samples, steps = _gathered(inside, own)
    _share_newest(nodes, model, steps, nodes.speaker(turn))
    _average_statistics(nodes, model, samples)
    weight = nodes.weight(samples, run.step + 1 - progress.since.begins)
    weights = own.new_tensor([weight, weight])
    exchange = Exchange(run.step + delay, turn, delay, weights)
    progress.since.begin(run.step + 1)
    across = nodes.across(turn)
    if across is not None:
        exchange.pending.append(across.all_reduce(exchange.weights[1:], "sum"))
        for flat in (*model.parameters, *model.statistics):
            flat.gather_in()
            flat.buffer.mul_(weight)
            exchange.pending.append(across.all_reduce(flat.buffer, "sum"))
        for flat in model.counters:
            flat.gather_in()
            exchange.pending.append(across.all_reduce(flat.buffer, "max"))
    return exchange


def end(nodes: Nodes, model: ModelAverager, exchange: Exchange) -> None:
    """Wait for the other nodes' parameters, and merge them. Collective.

        w <- (2B*w + sum_p a_p w_p) / (2B + sum_p a_p)

    Here w are each worker's own parameters: the sender may be out of data, and then its parameters
    are not the node's. A node that has not trained takes only the others' parameters.
    """
    exchange.wait()
    if nodes.count == 1:
        return
    speaker = nodes.speaker(exchange.turn)
    arriving = [exchange.weights, *(flat.buffer for flat in model.flats)]
    for pending in [nodes.inside.broadcast(b, speaker) for b in arriving]:
        pending.wait()
    own, total = exchange.weights.tolist()
    if not total:
        return  # no worker has trained
    kept = 2.0 * exchange.delay if own else 0.0
    for flat in (*model.parameters, *model.statistics):
        if kept:
            for tensor, view in zip(flat.tensors, flat.views, strict=True):
                view.add_(tensor.to(view.dtype), alpha=kept)
        flat.buffer.div_(kept + total)
        flat.scatter_out()
    model.scatter_counters()


def _share_newest(
    nodes: Nodes, model: ModelAverager, steps: Sequence[float], speaker: int
) -> None:
    """If the sender is behind, give the node the parameters of a worker that is not."""
    most = max(steps)
    if steps[speaker] == most:
        return
    source = list(steps).index(most)
    for flat in model.parameters:
        flat.gather_in()
        nodes.inside.broadcast(flat.buffer, source).wait()
        flat.scatter_out()


def _average_statistics(
    nodes: Nodes, model: ModelAverager, samples: Sequence[float]
) -> None:
    """BatchNorm's become the node's: the mean, by samples, and the largest counters."""
    whole = sum(samples)
    share = samples[nodes.inside.rank] / whole if whole else 0.0
    flats = [*(model.statistics if whole else ()), *model.counters]
    pending = []
    for flat in flats:
        flat.gather_in()
        if flat.buffer.is_floating_point() or flat.buffer.is_complex():
            flat.buffer.mul_(share)
            pending.append(nodes.inside.all_reduce(flat.buffer, "sum"))
        else:
            pending.append(nodes.inside.all_reduce(flat.buffer, "max"))
    for one in pending:
        one.wait()
    for flat in flats:
        flat.scatter_out()


def mean_of_nodes(
    nodes: Nodes, model: ModelAverager, run: Run, progress: Progress, were_equal: bool
) -> None:
    """Put the average of the nodes, as they are between two steps, into the model.

    If they *were_equal* after the last exchange each counts by its samples since; else, or without any
    samples, by its workers. Collective.
    """
    samples, steps = _gathered(run.comm, progress.as_tensor(run))
    weights = [float(len(node)) for node in nodes.members]
    if were_equal and any(samples):
        weights = [sum(samples[r] for r in node) for node in nodes.members]
    newest = [max(node, key=lambda r: (steps[r], -r)) for node in nodes.members]
    rank, mine = run.comm.rank, nodes.own
    weight = weights[mine] / sum(weights) if newest[mine] == rank else 0.0
    of_statistics = samples[rank] / sum(samples) if any(samples) else weight
    model.mean(run.comm, weight, of_statistics)


def _gathered(comm: Comm, own: torch.Tensor) -> list[list[float]]:
    """Gather the two numbers of all workers of *comm*: a list for each number."""
    everyone = own.new_empty(2 * comm.size)
    comm.all_gather(everyone, own).wait()
    return [column.tolist() for column in everyone.view(-1, 2).unbind(1)]
