"""The optimizer's state, which lives on servers, from one worker's side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from paceline.interfaces import Reception
from paceline.interfaces.buckets import (
    in_strides_of,
    stand_in_for,
    stands_in,
    wire_bytes,
)
from paceline.interfaces.server_messages import LoadState, OptimizerState, PullState
from paceline.parameter_server.client.partition import HeldPart, Spread
from paceline.parameter_server.state_machine.store import is_per_element

MOST_STATES = 4
"""No optimizer of torch has more tensors of its parameter's shape."""
LATE_CHANNEL = "late"
"""What travels beside the steps: late pushes, and the state that tentative steps need."""


class _Asked(NamedTuple):
    """A request for the state of some of a part's *units*, which lands in *into*."""

    reception: Reception
    part: HeldPart
    units: Sequence[int]
    into: torch.Tensor


class States:
    """The optimizer's state of a model that is *spread* over servers."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        self._asked: list[_Asked] = []

    # ---- all of it ----

    def whole(self) -> dict[torch.Tensor, dict[str, Any]]:
        """By parameter, in torch's own form."""
        spread = self._spread
        found: dict[int, dict[str, list[Any]]] = {}
        for part in spread.pulled():
            into = torch.empty(
                8 * (part.stop - part.start),
                dtype=spread.buckets[part.bucket].buffer.dtype,
            )
            request = spread.endpoint(part).request
            answer = request(PullState(bucket=part.bucket), into=into).wait()
            assert isinstance(answer, OptimizerState), answer
            for unit, entries in zip(part.units, answer.entries, strict=True):
                mine = found.setdefault(unit.parameter, {})
                for name, value in entries:
                    whole = isinstance(value, int)
                    at = int(value)
                    mine.setdefault(name, []).append(
                        into[at : at + unit.elements].clone() if whole else value
                    )
        return {
            spread.owners[number]: {
                name: _merged(values, spread.owners[number])
                for name, values in entries.items()
            }
            for number, entries in found.items()
        }

    def keep(self) -> None:
        """Training is over: the optimizer takes over its state from the servers."""
        self._spread.optimizer.state.update(self.whole())

    def load(
        self, servers: Collection[int], state: dict[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Send these servers their parts of a *state* in torch's own form."""
        for server, part in self._spread.held(servers):
            entries: list[list[tuple[str, int | float]]] = []
            buffer = self._spread.buckets[part.bucket].buffer
            parts, offset = [buffer.new_empty(0)], 0
            for unit in part.units:
                mine: list[tuple[str, int | float]] = []
                owner = self._spread.owners[unit.parameter]
                for name, value in state.get(owner, {}).items():
                    if is_per_element(value, owner):
                        mine.append((name, offset))
                        flat = value.detach().reshape(-1)
                        parts.append(flat[unit.start : unit.stop])
                        offset += unit.elements
                    elif value is not None:
                        mine.append((name, float(value)))
                entries.append(mine)
            message = LoadState(bucket=part.bucket, entries=entries)
            request = self._spread.endpoints[server].request
            request(message, torch.cat(parts)).wait()

    # ---- of some units ----

    def ask(self, units: Sequence[tuple[int, int]], step: int) -> None:
        """Ask for the state of some units (bucket and number), with all updates before
        *step* in it."""
        places: dict[HeldPart, list[int]] = {}
        for bucket, number in units:
            part = self._spread.part_of(bucket, number)
            places.setdefault(part, []).append(number - part.first)
        for part, mine in places.items():
            buffer = self._spread.buckets[part.bucket].buffer
            size = sum(part.units[number].elements for number in mine)
            into = torch.empty(MOST_STATES * size, dtype=buffer.dtype)
            if stands_in(buffer):
                # What Adam has: nobody knows yet.
                stands = wire_bytes(buffer) * size // max(1, buffer.numel())
                stand_in_for(2 * stands, into)
            message = PullState(bucket=part.bucket, units=mine, step=step)
            request = self._spread.endpoint(part).request
            reception = request(message, into=into, channel=LATE_CHANNEL)
            self._asked.append(_Asked(reception, part, mine, into))

    def arrived(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Wait for all that was asked for: bucket, number, and the entries by name."""
        waiting, self._asked = self._asked, []
        found = []
        for asked in waiting:
            answer = asked.reception.wait()
            assert isinstance(answer, OptimizerState), answer
            for number, entries in zip(asked.units, answer.entries, strict=True):
                size, state = asked.part.units[number].elements, dict[str, Any]()
                for name, value in entries:
                    if isinstance(value, int):
                        state[name] = asked.into[value : value + size]
                    else:
                        state[name] = torch.tensor(value, dtype=torch.float32)
                found.append((asked.part.bucket, asked.part.first + number, state))
        return found


def _merged(values: list[Any], parameter: torch.Tensor) -> Any:
    if isinstance(values[0], torch.Tensor):
        return in_strides_of(parameter, torch.cat(values).view(parameter.shape))
    return torch.tensor(values[0], dtype=torch.float32)
