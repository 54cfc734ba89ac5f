"""What workers load into a server: taken in pieces, and all of it at once.

A load comes in many messages, and its worker may die between two of them. So nothing of it
takes effect before the last bucket's parameters are in, and then all of it does at once.
"""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import Arrive, Done, Load, LoadRest, LoadState
from paceline.parameter_server.state_machine.barriers import HOW_TO_LOAD, Meetings
from paceline.parameter_server.state_machine.replies import Answers
from paceline.parameter_server.state_machine.shard import HeldShard
from paceline.parameter_server.state_machine.store import State
from paceline.parameter_server.state_machine.untrained_tensors import HeldRest


class Loads:
    """One load under way, of one worker: the first one that brings parameters, and later the
    one that leads where all meet to load."""

    def __init__(
        self, shard: HeldShard, rest: HeldRest, meetings: Meetings, answers: Answers
    ) -> None:
        self._shard, self._rest = shard, rest
        self._meetings, self._answers = meetings, answers
        self._clear()

    def _clear(self) -> None:
        self._worker: int | None = None
        self._parameters: dict[int, torch.Tensor] = {}
        self._states: dict[int, list[State]] = {}
        self._parts: list[torch.Tensor] = []

    # ---- what comes ----

    def arrive(self, sender: Sender, arrive: Arrive) -> None:
        """A worker is where all meet. Raises `UsageError` in mid-step."""
        member = self._shard.members[sender.worker]
        if arrive.purpose != "meet":
            self._shard.check_held()
        if self._shard.fault:
            raise UsageError(self._shard.fault)
        if member.begun or member.leaving:
            raise UsageError("arrive: in the middle of a step, or after the last one")
        self._meetings.check_not_there("arrive", sender.worker)
        self._meetings.arrive(sender, arrive)

    def take_parameters(
        self, sender: Sender, load: Load, payload: torch.Tensor | None
    ) -> bool:
        """A bucket's parameters; returns whether all of the load is here now. Raises
        `UsageError` for what does not fit, or not from this worker."""
        self._begin("load", sender.worker)
        store = self._shard.store
        self._parameters[load.bucket] = store.fitting("load", load.bucket, payload)
        self._answers.send(sender, Done())
        return self._parameters.keys() == set(store.buckets)

    def take_state(
        self, sender: Sender, load: LoadState, payload: torch.Tensor | None
    ) -> None:
        """A bucket's optimizer state. Raises `UsageError` for what does not fit."""
        self._begin("load-state", sender.worker)
        store = self._shard.store
        states = store.fitting_state(load.bucket, load.entries, payload)
        self._states[load.bucket] = states
        self._answers.send(sender, Done())

    def take_rest(
        self, sender: Sender, load: LoadRest, payload: torch.Tensor | None
    ) -> None:
        """A part of what nobody trains. Raises `UsageError` for a part that does not follow
        the one before."""
        self._shard.check_held()
        self._begin("load-rest", sender.worker)
        if payload is None or payload.dtype != torch.uint8:
            raise UsageError("load-rest: expected a payload of bytes")
        here = sum(part.numel() for part in self._parts)
        if load.start != here:
            raise UsageError(
                f"load-rest: expected what begins at byte {here}, got byte {load.start}"
            )
        self._parts.append(payload)
        self._answers.send(sender, Done())

    def _begin(self, what: str, worker: int) -> None:
        """What comes is this worker's now; what came of another one is of no use."""
        if self._shard.is_loaded and worker != self._meetings.leader:
            raise UsageError(
                f"{what}: this server has parameters, and others go on from them: "
                f"{HOW_TO_LOAD}"
            )
        if self._worker != worker:
            self._clear()
            self._worker = worker

    def forget(self, worker: int) -> None:
        """This worker is lost: nothing of its load is used."""
        if worker == self._worker:
            self._clear()

    # ---- all of it ----

    def put(self) -> None:
        """Let all that is here take effect. Whoever trains is where all meet, and has nothing
        under way: the gradients that are held are of workers that died."""
        goes_on, store = self._shard.is_loaded, self._shard.store
        if self._parts:
            self._rest.load(self._parts)
        for bucket, states in self._states.items():
            store.put_state(bucket, states)
        for bucket, parameters in self._parameters.items():
            store.load(bucket, parameters)
        self._clear()
        if goes_on:
            self._shard.renew(self._meetings.step())
            self._meetings.has_loaded()
        self._shard.changed()
