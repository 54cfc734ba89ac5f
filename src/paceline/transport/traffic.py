"""What has come to a server, and what has left it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from paceline.interfaces.server_messages import Request
from paceline.transport.payloads import size_of
from paceline.transport.protocol import HEADER_BYTES


@dataclass
class Traffic:
    """Bytes as all runtimes count them, and requests by what they ask for."""

    received_bytes: int = 0
    sent_bytes: int = 0
    requests: Counter[str] = field(default_factory=Counter)

    def came(self, message: Request, payload: torch.Tensor | None) -> None:
        """A request is in."""
        self.requests[type(message).__name__.lower()] += 1
        self.received_bytes += HEADER_BYTES + size_of(payload)

    def left(self, payload: torch.Tensor | None) -> None:
        """An answer is on its way."""
        self.sent_bytes += HEADER_BYTES + size_of(payload)
