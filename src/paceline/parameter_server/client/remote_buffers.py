"""What a model holds and nobody trains, from one worker's side: frozen parameters, buffers.

All of it travels as bytes at a load, and to workers that join. Buffers also travel in every
step, and are mixed on the server.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from paceline.interfaces import Endpoint, Reception
from paceline.interfaces.server_messages import (
    Blend,
    Blended,
    LoadRest,
    PullBuffers,
    PullRest,
    Rest,
)
from paceline.parameter_server.client.partition import Spread
from paceline.parameter_server.state_machine.untrained_tensors import MOST_BYTES


class Untrained:
    """The *tensors* of a model that is *spread* over servers; *mixed*: those buffers that
    every step mixes, none where each worker keeps its own."""

    def __init__(
        self,
        spread: Spread,
        tensors: Sequence[torch.Tensor],
        mixed: Sequence[torch.Tensor],
    ) -> None:
        self._spread = spread
        self._tensors = [t for t in tensors if t.layout == torch.strided]
        self._bytes = sum(t.numel() * t.element_size() for t in self._tensors)
        self._floats = [b for b in mixed if b.is_floating_point() and b.numel()]
        whole = [b for b in mixed if not (b.is_floating_point() or b.is_complex())]
        self._counters = [b for b in whole if b.numel()]
        self._blending: Reception | None = None
        self._blended = torch.empty(0, dtype=torch.float64)

    @property
    def _endpoint(self) -> Endpoint:
        """This worker's end of the server that it has them from."""
        return self._spread.endpoints[self._spread.layout.home(self._spread.first)]

    # ---- all of it ----

    def load(self, servers: Collection[int]) -> None:
        """Send what this worker holds to those of these servers that have it."""
        holders = self._spread.layout.holders(self._spread.first)
        ends = [self._spread.endpoints[s] for s in holders if s in servers]
        flat = torch.cat([torch.empty(0, dtype=torch.uint8), *map(_raw, self._tensors)])
        waiting = [
            end.request(LoadRest(start=start), flat[start:][:MOST_BYTES])
            for end in ends
            for start in range(0, self._bytes, MOST_BYTES)
        ]
        for reception in waiting:
            reception.wait()

    def pull(self) -> None:
        """Take what the server holds, if anybody has loaded it."""
        into = torch.empty(self._bytes, dtype=torch.uint8)
        waiting = [
            self._endpoint.request(
                PullRest(start=start, most=MOST_BYTES), into=into[start:][:MOST_BYTES]
            )
            for start in range(0, self._bytes, MOST_BYTES)
        ]
        answers = [reception.wait() for reception in waiting]
        if not answers or not all(isinstance(a, Rest) and a.whole for a in answers):
            return
        sizes = [t.numel() * t.element_size() for t in self._tensors]
        with torch.no_grad():
            for tensor, part in zip(self._tensors, into.split(sizes), strict=True):
                # A copy: a part may begin where no number of this type may.
                value = part.clone().view(tensor.dtype).view(tensor.shape)
                if not torch.equal(_raw(tensor), part):
                    tensor.copy_(value)
        self.pull_buffers()

    def pull_buffers(self) -> None:
        """Buffers as they were mixed since then."""
        if not (self._floats or self._counters):
            return
        into = self._flat()
        before = into.clone()
        self._endpoint.request(PullBuffers(), into=into).wait()
        if not torch.equal(before, into):
            self._blended = into
            self._put()

    # ---- buffers, in each step ----

    def blend(self, weight: float) -> None:
        """Send BatchNorm's statistics, to be mixed with everybody's, and ask for them."""
        if not (self._floats or self._counters):
            return
        self._blended = self._flat()
        message = Blend(weight=weight, floats=sum(b.numel() for b in self._floats))
        self._blending = self._endpoint.request(message, self._blended, self._blended)

    def arrived(self) -> None:
        """Wait for them, if they are under way, and put them in."""
        if self._blending is not None:
            answer = self._blending.wait()
            assert isinstance(answer, Blended), answer
            self._blending = None
            self._put()

    def _flat(self) -> torch.Tensor:
        tensors = [*self._floats, *self._counters]
        return torch.cat([t.detach().reshape(-1).double() for t in tensors]).cpu()

    def _put(self) -> None:
        tensors = [*self._floats, *self._counters]
        parts = self._blended.split([tensor.numel() for tensor in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                # Whole numbers beyond 2^53 are rounded on their way: what has not changed
                # stays as it is.
                if not torch.equal(tensor.detach().reshape(-1).double().cpu(), part):
                    tensor.copy_(part.view(tensor.shape))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
