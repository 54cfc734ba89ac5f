"""How a worker comes to hold what the servers hold: it joins, it loads, it meets the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from paceline.interfaces import Reception
from paceline.interfaces.buckets import stand_alike
from paceline.interfaces.server_messages import (
    Arrive,
    Join,
    Joined,
    Load,
    Met,
    Note,
    Parameters,
    Pull,
)
from paceline.parameter_server.client.optimizer_state import States
from paceline.parameter_server.client.partition import HeldPart, Spread
from paceline.parameter_server.client.remote_buffers import Untrained


class Joining:
    """The way of worker *rank* into a training.

    *describe* makes what each server is told of it. All begin with what nobody trains as rank
    0 has it, where workers *meet_here* and nowhere else.
    """

    def __init__(
        self,
        rank: int,
        spread: Spread,
        states: States,
        untrained: Untrained,
        describe: Callable[[int], Join],
        meet_here: bool,
    ) -> None:
        self._rank, self._spread = rank, spread
        self._states, self._untrained = states, untrained
        self._describe, self._meet_here = describe, meet_here
        self.first_step = 0
        self.is_guest = False
        """Whether this worker has joined a training that goes on."""
        self.is_over = False
        """Whether an earlier life of this worker has done all of its steps."""
        self._layout = spread.layout
        self._loads = [0] * len(spread.endpoints)
        """By server: how many loads it had come through when it last answered."""

    # ---- joining ----

    def join(self) -> int:
        """Returns the number of this worker's first step."""
        # The others may be meeting, at one server after the other. A worker that joins goes
        # through the servers backwards, also with its pulls: so it is never held up at a
        # server before the one where they wait for it.
        spread, empty = self._spread, list[int]()
        steps, own = [0], list[int]()
        for server in reversed(range(len(spread.endpoints))):
            answer = spread.endpoints[server].request(self._describe(server)).wait()
            assert isinstance(answer, Joined), answer
            self._loads[server] = answer.load
            self.is_guest = self.is_guest or answer.guest
            self.is_over = self.is_over or answer.over
            if server in self._layout.homes:
                steps.append(answer.step)
                own.append(answer.own)
            empty += [] if answer.loaded else [server]
        if empty and self._rank == 0:
            self._load(empty, dict(spread.optimizer.state) or None, self._meet_here)
        # What a server has of a later step already it answers, and does not apply again.
        step = max(*steps, min(own))
        spread.optimizer.state.clear()
        # Servers may be at different steps: all are told the latest, before any is waited for.
        if step or self.is_guest:
            note = Note(step=step, guest=self.is_guest)
            servers = self._layout.servers
            for reception in [spread.endpoints[s].request(note) for s in servers]:
                reception.wait()
        if self.is_guest:
            self._settle()
        for server in reversed(self._layout.homes):
            self._take([server], step)
        spread.put_all()
        self._catch_up(step)
        if self._meet_here or max(self._loads):
            self._untrained.pull()
        self.first_step = step
        return step

    def _settle(self) -> None:
        """A worker that comes back is waited for where workers meet once it was given
        something there; and it is given nothing while they meet. So it looks first where they
        meet, if it pulls from elsewhere: what it pulls then is of after their meeting."""
        spread = self._spread
        for server in self._layout.meets_at:
            if server not in self._layout.homes:
                part = spread.pulled()[0]
                pull = Pull(bucket=part.bucket, looks=True)
                like = spread.landing_of(part)
                into = stand_alike(torch.empty_like(like), like)
                answer = spread.endpoints[server].request(pull, into=into).wait()
                assert isinstance(answer, Parameters), answer
                self._loads[server] = answer.load

    def _catch_up(self, step: int) -> None:
        """Others may load just now: some servers are through with that then, and the rest
        wait for this worker, too."""
        while True:
            most = max(self._loads)
            behind = [s for s in self._layout.meets_at if self._loads[s] < most]
            if not behind:
                return
            for server, _ in self._meet_at(behind, Arrive(purpose="load")):
                self.pull(step)
                self._has_pulled(server)

    # ---- where all meet ----

    def meet(self, step: int) -> bool:
        """Wait for all that train: then each has the answers to what it sent. *step*: this
        worker's next one, 0 before the first. Returns whether this is the lowest rank of those
        who met. Collective over them."""
        servers = self._layout.meets_at
        met = dict(self._meet_at(servers, Arrive(purpose="meet", step=step)))
        return met[servers[0]]

    def load(
        self, state: dict[torch.Tensor, dict[str, Any]] | None, rest: bool
    ) -> None:
        """What the script has loaded into the model since the last step, the optimizer's
        *state* unless it stays, and the *rest* of the model, as the lowest rank has them,
        become the servers' and everybody's. Collective over those that train."""
        servers = self._layout.meets_at
        arrive = Arrive(purpose="load", brings=True)
        for server, leads in self._meet_at(servers, arrive):
            if leads:
                self._load([server], state, rest)
            self._take(self._layout.fed_by(server))
            if rest and server == servers[0]:
                self._untrained.pull()
            self._has_pulled(server)
        self._spread.put_all()

    def _meet_at(
        self, servers: Collection[int], arrive: Arrive
    ) -> Iterator[tuple[int, bool]]:
        """Arrive at these servers; yields each when all have met there, and whether this
        worker is to load what all go on from. All workers come to the servers in the same
        order: whoever waits for one has done its part at those before."""
        endpoints = self._spread.endpoints
        waiting = [(server, endpoints[server].request(arrive)) for server in servers]
        for server, reception in waiting:
            answer = reception.wait()
            assert isinstance(answer, Met), answer
            yield server, answer.leads

    def _has_pulled(self, server: int) -> None:
        for _ in self._meet_at([server], Arrive(purpose="pulled")):
            pass

    def _load(
        self,
        servers: Collection[int],
        state: dict[torch.Tensor, dict[str, Any]] | None,
        rest: bool,
    ) -> None:
        """Send these servers what all go on from. It takes effect with the parameters, which
        come last."""
        spread = self._spread
        if rest:
            self._untrained.load(servers)
        if state is not None:
            self._states.load(servers, state)
        if spread.was_put:
            # What the script has not written may be out of date here.
            fed = {home for s in servers for home in self._layout.fed_by(s)}
            for reception in [self.ask_for(p, 0) for p in spread.pulled(fed)]:
                reception.wait()
        spread.lay_out()
        waiting = [
            spread.endpoints[server].request(
                Load(bucket=part.bucket), spread.landing_of(part)
            )
            for server, part in spread.held(servers)
        ]
        for reception in waiting:
            reception.wait()

    # ---- pulls ----

    def ask_for(self, part: HeldPart, step: int, looks: bool = False) -> Reception:
        """Pull a part of a bucket as of *step*, or later. *looks*: see `Pull`."""
        pull = Pull(bucket=part.bucket, step=step, looks=looks)
        into = self._spread.landing_of(part)
        return self._spread.endpoint(part).request(pull, into=into)

    def pull(self, step: int = 0) -> None:
        """The servers' parameters become the model's; those of *step*, or newer ones."""
        self.take(self._spread.pulled(), step)
        self._spread.put_all()

    def look(self) -> None:
        """The servers' parameters are put into the model, and what this worker holds, as servers
        know it, stays."""
        spread = self._spread
        held = spread.landing
        spread.landing = [stand_alike(torch.empty_like(h), h) for h in held]
        try:
            parts = spread.pulled()
            for reception in [self.ask_for(part, 0, looks=True) for part in parts]:
                reception.wait()
            spread.put_all()
        finally:
            spread.landing = held

    def take_again(self) -> None:
        """Take all from the servers: what the script has written is not wanted."""
        self.pull()
        self._untrained.pull()

    def take_what_is_final(self) -> None:
        """Nobody trains any more, and this worker has left, maybe before the others."""
        before = max(self._loads)
        self.pull()
        if max(self._loads) > before:  # those that trained longer have loaded
            self._untrained.pull()

    def _take(self, servers: Collection[int], step: int = 0) -> None:
        """Pull what this worker has from these servers, and do not put it in yet."""
        self.take(self._spread.pulled(servers), step)

    def take(self, parts: Sequence[HeldPart], step: int) -> None:
        """Pull *parts*, as of *step* or later, and do not put them in yet."""
        waiting = [self.ask_for(part, step) for part in parts]
        answers = [reception.wait() for reception in waiting]
        for part, answer in zip(parts, answers, strict=True):
            assert isinstance(answer, Parameters), answer
            home = self._spread.home(part)
            self._loads[home] = max(self._loads[home], answer.load)
            self._spread.hear(part, answer)
