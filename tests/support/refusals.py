"""Requests that a server refuses, as tables: each leaves the server's whole state as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.interfaces import Sender
from paceline.interfaces.server_messages import Join, Request
from paceline.testing.server_checks import difference, state_of


class Refusal(NamedTuple):
    """A request that is refused at a moment, and what tells this refusal from others."""

    moment: Callable[[], Any]
    """Makes a server, with workers that have come so far: a `Case`."""
    message: Request
    words: str
    worker: int = 0
    life: int = 0
    payload: torch.Tensor | None = None

    def check(self) -> None:
        """Only requests of workers that are here are counted."""
        case = self.moment()
        sender = Sender(self.worker, self.life, "", 0)
        joins = isinstance(self.message, Join)
        is_here = not case.server.members.why_unknown(sender, joins)
        counted, before = case.server.counts["requests refused"], state_of(case.server)
        words = case.refusal(self.worker, self.message, self.payload, self.life)
        assert self.words in words
        assert not difference(before, state_of(case.server))
        assert case.server.counts["requests refused"] == counted + is_here
