"""Sums of gradients through a compressor: each round of its code is one collective.

A compressor's ``average`` is a generator. What it yields is sent; it goes on with the
result, as the work that is chained to that (`Pending.then`), so in the same order on all
ranks, and while backward still runs.

Virtual time passes for coding where the first code is made, and for all that follows where
the result is waited for: the works in between are instants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.errors import UsageError
from paceline.interfaces import Coding, Comm, Compressor, Gather, Pending, State, Sum
from paceline.tensors import stand_in_for, wire_bytes
from paceline.training.presence import Presence


class Codes:
    """*compressor*, with its state of each tensor, by name, on the worker of *rank*.
    *charge* is told how many bytes were read or written for codes, if that takes time."""

    def __init__(
        self,
        compressor: Compressor,
        presence: Presence,
        rank: int,
        charge: Callable[[float], None],
    ) -> None:
        self.compressor, self._presence, self._rank = compressor, presence, rank
        self._charge = charge
        self._parts_of: dict[torch.dtype, list[float]] = {}
        self.states: dict[str, State] = {}
        self.was_used = False
        """Whether anything was sent through it."""

    def sum(
        self,
        comm: Comm,
        buffer: torch.Tensor,
        parts: Sequence[torch.Tensor],
        names: Sequence[str],
    ) -> Pending | None:
        """*buffer* (this worker's share) becomes its sum over *comm*; it consists of *parts*
        with these *names*. Returns None where the compressor has nothing to send."""
        self.was_used = True
        states = [self._state(n, part) for n, part in zip(names, parts, strict=True)]
        return self._begin(comm, buffer, parts, states)

    def try_out(self, comm: Comm, buffer: torch.Tensor) -> Pending | None:
        """The same, of a *buffer* whose contents do not matter: it leaves no state."""
        state = self.compressor.init(buffer, "", self._rank)
        return self._begin(comm, buffer, [buffer], [state])

    def _begin(
        self,
        comm: Comm,
        buffer: torch.Tensor,
        parts: Sequence[torch.Tensor],
        states: Sequence[State],
    ) -> Pending | None:
        size = wire_bytes(buffer)
        stands_in = size != buffer.numel() * buffer.element_size()
        sizes = [part * size for part in self._parts(buffer.dtype)] if stands_in else []
        rounds = self.compressor.average(parts, states, comm.size)
        before, after = self.compressor.passes(comm.size)
        self._charge(before * size)
        pending = _Chain(rounds, comm, sizes).begin()
        return pending and _Decoded(pending, lambda: self._charge(after * size))

    def _parts(self, dtype: torch.dtype) -> list[float]:
        """How large each round's code of a large tensor is, over that tensor."""
        if dtype not in self._parts_of:
            tensor = torch.linspace(0, 1, _LARGE).to(dtype)
            whole = tensor.numel() * tensor.element_size()
            sizes = _sizes_of_codes(self.compressor, tensor, self._rank)
            self._parts_of[dtype] = [size / whole for size in sizes]
        return self._parts_of[dtype]

    def _state(self, name: str, part: torch.Tensor) -> State:
        kind = self.compressor.state
        if kind == "none":
            return {}
        if not name:
            raise UsageError(
                f"compression {self.compressor.name!r} keeps something of each tensor from "
                "step to step, and this method sends parts of buckets, which change: take "
                "one without state (bf16, fp16, int8:rounding=nearest), or bsp"
            )
        if kind == "own" and not self._presence.active:
            # A worker that only keeps company sends zeros, and nothing that it kept back.
            return self.compressor.init(part, name, self._rank)
        if name not in self.states:
            self.states[name] = self.compressor.init(part, name, self._rank)
        return self.states[name]


_LARGE = 4096
"""Elements of which a code's fixed part is small."""


def _sizes_of_codes(
    compressor: Compressor, tensor: torch.Tensor, rank: int
) -> list[int]:
    """Bytes of the code of each round, where one worker alone codes *tensor*."""
    rounds = compressor.average([tensor], [compressor.init(tensor, "", rank)], 1)
    sizes: list[int] = []
    answer: torch.Tensor | None = None
    while True:
        try:
            message = next(rounds) if answer is None else rounds.send(answer)
        except StopIteration:
            return sizes
        code = message.code
        sizes.append(code.numel() * code.element_size())
        answer = code.unsqueeze(0) if isinstance(message, Gather) else code


class _Chain:
    """One sum under way. *sizes*: what each round's code is to count as on the network,
    where the gradient stands for a larger one."""

    def __init__(self, rounds: Coding, comm: Comm, sizes: Sequence[float]) -> None:
        self._rounds, self._comm, self._sizes = rounds, comm, iter(sizes)
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
        code, size = message.code, next(self._sizes, None)
        if size is not None:
            stand_in_for(round(size), code)
        if isinstance(message, Sum):
            self._result = code
            return self._comm.all_reduce(code, "sum")
        workers = self._comm.size
        everyone = code.new_empty(workers * code.numel())
        if size is not None:
            stand_in_for(workers * round(size), everyone)
        self._result = everyone.view(workers, -1)
        return self._comm.all_gather(everyone, code)


class _Decoded:
    """The `Pending` of a sum, which takes the time of decoding once it is in."""

    __slots__ = ("_charge", "_pending")

    def __init__(self, pending: Pending, charge: Callable[[], None]) -> None:
        self._pending = pending
        self._charge: Callable[[], None] | None = charge

    def wait(self) -> None:
        self._pending.wait()
        if self._charge is not None:
            charge, self._charge = self._charge, None
            charge()

    def then(self, work: Callable[[], Pending | None]) -> Pending:
        return self._pending.then(work)
