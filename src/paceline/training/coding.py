"""Sums of gradients through a compressor: each round of its code is one collective.

A compressor's ``average`` is a generator. What it yields is sent; it goes on with the
result, as the work that is chained to that (`Pending.then`), so in the same order on all
ranks, and while backward still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.interfaces import Comm, Pending
from paceline.interfaces.compression import Coding, Compressor, Gather, State, Sum
from paceline.training.presence import Presence


class Codes:
    """*compressor*, with its state of each tensor, by name, on the worker of *rank*."""

    def __init__(self, compressor: Compressor, presence: Presence, rank: int) -> None:
        self.compressor, self._presence, self._rank = compressor, presence, rank
        self.states: dict[str, State] = {}

    def sum(
        self, comm: Comm, parts: Sequence[torch.Tensor], names: Sequence[str]
    ) -> Pending | None:
        """*parts* (each this worker's share) become their sums over *comm*. Returns None
        where the compressor has nothing to send."""
        states = [
            self._state(name, part) for name, part in zip(names, parts, strict=True)
        ]
        return _Chain(self.compressor.average(parts, states, comm.size), comm).begin()

    def _state(self, name: str, part: torch.Tensor) -> State:
        own = self.compressor.state == "own"
        if own and not self._presence.active:
            # A worker that only keeps company sends zeros, and nothing that it kept back.
            return self.compressor.init(part, name, self._rank)
        if name not in self.states:
            self.states[name] = self.compressor.init(part, name, self._rank)
        return self.states[name]


class _Chain:
    """One sum under way."""

    def __init__(self, rounds: Coding, comm: Comm) -> None:
        self._rounds, self._comm = rounds, comm
        self._result: torch.Tensor | None = None

    def begin(self) -> Pending | None:
        return self._next(lambda: next(self._rounds))

    def _next(self, go_on: Callable[[], Sum | Gather]) -> Pending | None:
        try:
            with torch.no_grad():
                message = go_on()
        except StopIteration:
            return None
        return self._send(message).then(self._continue)

    def _continue(self) -> Pending | None:
        result = self._result
        assert result is not None
        return self._next(lambda: self._rounds.send(result))

    def _send(self, message: Sum | Gather) -> Pending:
        code = message.code
        if isinstance(message, Sum):
            self._result = code
            return self._comm.all_reduce(code, "sum")
        workers = self._comm.size
        everyone = code.new_empty((workers, *code.shape))
        self._result = everyone
        return self._comm.all_gather(everyone.view(-1), code.reshape(-1))
