"""The one program of all local updates: what its presets differ in are its options.

    round:  H inner steps of each worker;  D_i = x - x_i;  D = sum w_i D_i / sum w_i
    outer:  u <- b*u + D;   x <- x - eta*(D + b*u) (Nesterov), or x - eta*u
    start:  x_i <- x;  or, tau steps late,  x_i <- alpha*x_i + (1 - alpha)*x

Theory of operation
-------------------
All is done after the update. What has been trained is counted in each step (`Since`), and in
the steps of a round a part of the model leaves (`send`) and comes back as a mean (`land`), at
once or `delay` steps later. Which part leaves is a function of the step's number alone, which
is equal on all workers: nobody has to agree on it.

A worker that is out of data goes on through the rounds, and weighs in the next one what it
has trained since the last. In the round in which nobody trains any more the mean is taken
plainly, without outer momentum, and so is what is left when that is over (`finish`).

Codes are of differences alone: parameters are as large as they are whatever has moved, so a code
of them would be off by more than that. A code may leave much of them to a later round, so the
round that none follows is formed once more without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from paceline.interfaces import (
    Clips,
    Compressor,
    Consistency,
    GradientSeen,
    Rounds,
    Run,
    UpdatesOn,
)
from paceline.methods.local_updates.fragments import LocalState, make_parts
from paceline.methods.local_updates.groups import own_group
from paceline.methods.local_updates.optimizer_state import require_moments
from paceline.methods.local_updates.options import Options
from paceline.methods.local_updates.rounds import land, send
from paceline.methods.local_updates.saved_state import load, redistributed, saved
from paceline.methods.local_updates.whole_model import mean_of_all, settle


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Options):
    """Workers step by themselves, and average what they have become every so many steps."""

    consistency: ClassVar[Consistency] = "local"
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "local"
    clips: ClassVar[Clips] = "own"
    averages_buffers: ClassVar[bool] = True

    @property
    def rounds(self) -> Rounds:
        if self.has_groups:
            return Rounds(
                every=self.group_every,
                groups=True,
                agree_every=self.every // self.group_every,
            )
        if self.delay or self.fragments > 1:
            return Rounds(every=self.turn, agree_every=1)
        return Rounds(every=self.turn, each_until=self.each_until, after_update=True)

    @property
    def consolidates_together(self) -> bool:
        """Without an anchor the result is the mean of all models."""
        return not self.keeps_anchor

    def compressed_by(self, compressor: Compressor) -> Self:
        """With differences, which alone are compressed."""
        return self.with_differences()

    def init(self, run: Run) -> LocalState:
        if self.state == "average":
            require_moments(self, run)
        run.set_period(self.every)
        sentence = self.about_gain()
        if sentence is not None:
            run.say(sentence)
        return LocalState(make_parts(self, run), group=own_group(self, run))

    # ---- steps ----

    @torch.no_grad()
    def after_update(self, state: LocalState, run: Run) -> None:
        if run.active:
            state.count(run.weight * run.comm.size)
        while state.flights and run.step >= state.flights[0].due:
            land(self, state, run, state.flights.pop(0))
        if run.meets:
            self._hold_round(state, run)

    def _hold_round(self, state: LocalState, run: Run) -> None:
        done = run.step + 1
        if state.group is not None and done % self.every:
            flight = send(
                self, state, run, 0, since=state.since_group, among=state.group
            )
            land(self, state, run, flight, in_group=True)
            return
        # One fragment a round, each in its turn: all workers have had as many rounds.
        number = sum(part.rounds for part in state.parts) % self.fragments
        part = state.parts[number]
        flight = send(self, state, run, number, since=part.since)
        state.since_group.begin(done)
        if self.delay:
            state.flights.append(flight)
        else:
            land(self, state, run, flight)

    # ---- the end, and what is shown in between ----

    @torch.no_grad()
    def finish(self, state: LocalState, run: Run) -> None:
        source = run.participate_until_all_finish()
        while state.flights:
            land(self, state, run, state.flights.pop(0))
        settle(self, state, run)
        if source is not None:
            run.broadcast_model(source)

    @torch.no_grad()
    def consolidate(self, state: LocalState, run: Run) -> Callable[[], None]:
        if not self.keeps_anchor:
            return mean_of_all(state, run)
        return state.show_anchors()

    @torch.no_grad()
    def loaded(self, state: LocalState, run: Run) -> None:
        state.begin_anew(run.step)

    # ---- restarts ----

    def save_state(self, state: LocalState, run: Run) -> dict[str, Any]:
        return saved(state, run)

    @torch.no_grad()
    def load_state(self, state: LocalState, run: Run, saved: dict[str, Any]) -> None:
        load(self, state, run, saved)

    def redistribute_state(
        self, state: LocalState, run: Run, parts: Iterable[dict[str, Any]]
    ) -> dict[str, Any]:
        return redistributed(parts)
