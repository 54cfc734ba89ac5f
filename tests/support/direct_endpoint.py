"""An `Endpoint` whose server answers at once, in the same call."""

from __future__ import annotations

import torch

from paceline.interfaces import Sender
from paceline.interfaces.server_messages import ReplyMessage, Request
from paceline.parameter_server.state_machine.server import ParameterServer


class Direct:
    """An `Endpoint` of a server that has only this worker, which answers at once."""

    name = "server"

    def __init__(self, server: ParameterServer, life: int) -> None:
        self.server, self.life, self.number = server, life, 0

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> Received:
        sender = Sender(0, self.life, channel, self.number)
        self.number += 1
        sent = None if payload is None else payload.clone()
        (answer,) = self.server.on_request(sender, message, sent, 0.0)
        if into is not None and answer.payload is not None:
            into[: answer.payload.numel()] = answer.payload
        return Received(answer.message)

    def close(self) -> None:
        pass


class Received:
    def __init__(self, message: ReplyMessage) -> None:
        self.message = message

    def wait(self) -> ReplyMessage:
        return self.message
