"""Who may talk to a server, and whether others can read it: plain, or CURVE.

==========================================  ==============================================
``PACELINE_SECRET`` is set                  CURVE: encrypted, both ends know the secret
else: a loopback address                    plain
else: ``PACELINE_TRUSTED_NETWORK=1``        plain
else                                        refused: nothing listens there unprotected
==========================================  ==============================================

Both ends decide by this table, so the variables must be the same on all machines.

Both CURVE key pairs come from the secret by scrypt: whoever knows it is one of us. ZeroMQ
asks `Security.judge` about each connection before the first message of it is read; plain
connections show the job's token there as a password, so that strays and scanners are kept out.

Threat model. CURVE: who does not have the secret can neither read nor alter what is sent,
nor speak; he can still cut connections. Plain: whoever reads the network reads gradients
and the token; loopback is read by the machine's administrator only, and the token keeps
out its other users. Whoever holds token and secret takes part in the job: the server
checks what he says and bounds what it keeps for him, but ZeroMQ itself collects one
message's frames without a limit to their number. The liveness connection carries a ticket
that is good once, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import zmq
from zmq.utils import z85

from paceline.errors import UsageError

SECRET = "PACELINE_SECRET"
TRUSTED = "PACELINE_TRUSTED_NETWORK"
SECRET_CHARACTERS = 16
JUDGE_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether a connection is admitted (ZAP, RFC 27)."""

_USER = b"paceline"
_SALT = b"paceline server CURVE keys, version 1"


@dataclass(frozen=True)
class Security:
    """How the connections of one job are protected; without keys they are plain."""

    server_public: bytes = field(default=b"", repr=False)
    server_secret: bytes = field(default=b"", repr=False)
    worker_public: bytes = field(default=b"", repr=False)
    worker_secret: bytes = field(default=b"", repr=False)

    @property
    def encrypted(self) -> bool:
        return bool(self.server_public)

    def protect_server(self, socket: zmq.Socket[Any]) -> None:
        """Before *socket* is bound."""
        if self.encrypted:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)
        else:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def protect_worker(self, socket: zmq.Socket[Any], token: str) -> None:
        """Before *socket* is connected."""
        if self.encrypted:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.worker_public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.worker_secret)
        else:
            socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
            socket.setsockopt(zmq.PLAIN_PASSWORD, token.encode())

    def judge(self, question: Sequence[bytes], token: str) -> tuple[list[bytes], bool]:
        """ZeroMQ asks about a connection: the reply, and whether it is admitted."""
        version, number, _, _, _, mechanism, *credentials = question
        if self.encrypted and mechanism == b"CURVE":
            # What is given is the key itself; the proof of holding it came before.
            expected, given = z85.decode(self.worker_public), credentials[0]
        elif not self.encrypted and mechanism == b"PLAIN":
            expected, given = token.encode(), credentials[1]
        else:
            expected, given = b"x", b""
        admitted = hmac.compare_digest(expected, given)
        verdict = [b"200", b"OK"] if admitted else [b"400", b"not of this job"]
        return [version, number, *verdict, b"", b""], admitted


PLAIN = Security()


@lru_cache(maxsize=8)
def from_secret(secret: str) -> Security:
    """The keys of everybody who knows *secret*. Raises `UsageError` for a short one."""
    if len(secret) < SECRET_CHARACTERS:
        raise UsageError(
            f"{SECRET}: expected at least {SECRET_CHARACTERS} characters, got "
            f"{len(secret)}; make one with: "
            'python -c "import secrets; print(secrets.token_hex(32))"'
        )
    keys = hashlib.scrypt(secret.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=64)
    server, worker = z85.encode(keys[:32]), z85.encode(keys[32:])
    return Security(
        server_public=zmq.curve_public(server),
        server_secret=server,
        worker_public=zmq.curve_public(worker),
        worker_secret=worker,
    )


def choose(address: str, environment: Mapping[str, str] | None = None) -> Security:
    """How to protect a server at *address*: the table at the top.

    Raises `UsageError` if it would be open to a network that nobody has called trusted.
    """
    environment = os.environ if environment is None else environment
    trusted = environment.get(TRUSTED, "")
    if trusted not in ("", "0", "1"):
        raise UsageError(f"{TRUSTED}: expected 1 or 0, got {trusted!r}")
    if environment.get(SECRET):
        return from_secret(environment[SECRET])
    if trusted == "1" or is_loopback(address):
        return PLAIN
    raise UsageError(
        f"a parameter server at {address} could be reached by the whole network, and "
        "nothing protects it. Either set the same secret on every machine of the job,\n"
        '    export PACELINE_SECRET="$(python -c '
        "'import secrets; print(secrets.token_hex(32))')\"\n"
        "which encrypts its connections, or, if everybody on that network may read "
        f"the training, say so on every machine: export {TRUSTED}=1"
    )


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach *address*."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
