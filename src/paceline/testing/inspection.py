"""What an optimizer trains with, for tests: their one way to look behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bucketing.tuner import Planner
from paceline.core.active_training import Changes
from paceline.core.optimizer import present_of
from paceline.interfaces import Comm, Endpoint, OwnState, Run
from paceline.parameter_server.client.remote_model import RemoteParameters
from paceline.records import Journal
from paceline.runtimes.join import join_runtime


@dataclass(frozen=True)
class InspectedBucket:
    """One bucket: the *names* of its parameters, in gradient-ready order, its number of
    *elements*, and its *bytes* on the network."""

    index: int
    names: tuple[str, ...]
    elements: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """What one worker's training is made of.

    Attributes:
        buckets: Its gradient buckets now, in plan order.
        state: What the method keeps.
        run: What the method sees of this worker.
        comm: What this worker communicates through.
        journal: The records of its steps.
        own_states: What a checkpoint keeps of this worker alone.
        planner: Who plans the buckets.
        remote: The parameters on their servers, where these update; else None.
        endpoints: This worker's connections to servers.
        changes: Who changes the method under ``"auto"``; else None.
        step_is_due: Whether gradients were delivered, and ``step()`` has not followed.
        scales: Whether a GradScaler steps the optimizer, as far as that is known.
        meet: What `paceline.save` calls, so that all workers are at one place.
        load_is_complete: What `paceline.load` calls, when all is loaded.
    """

    buckets: tuple[InspectedBucket, ...]
    state: Any
    run: Run
    comm: Comm
    journal: Journal
    own_states: list[OwnState]
    planner: Planner
    remote: RemoteParameters | None
    endpoints: tuple[Endpoint, ...]
    changes: Changes | None
    step_is_due: bool
    scales: bool
    meet: Callable[[], bool]
    load_is_complete: Callable[[], bool]


def inspect(optimizer: torch.optim.Optimizer) -> Inspection:
    """What an optimizer that `distribute` has given back trains with, as of now.

    It changes nothing, and sends nothing. Call it in a worker of the job: it returns what
    that worker has.
    """
    present = present_of(optimizer)
    training = present.training
    return Inspection(
        buckets=tuple(
            InspectedBucket(one.index, one.names, one.buffer.numel(), one.bytes)
            for one in training.buckets
        ),
        state=training.state,
        run=training.run,
        comm=training.comm,
        journal=join_runtime().journal,
        own_states=training.own_states,
        planner=training.planner,
        remote=training.remote if training.updates_on_server else None,
        endpoints=tuple(present.endpoints),
        changes=present.changes,
        step_is_due=training.step_is_due,
        scales=present.scales,
        meet=training.meet,
        load_is_complete=training.load_is_complete,
    )
