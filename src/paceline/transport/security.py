"""Authenticates peers of a server, and encrypts: plain or CURVE.

==========================================  ==============================================
``PACELINE_SECRET`` is set                  CURVE: encrypted, both ends know the secret
else: a loopback address                    plain
else: ``PACELINE_TRUSTED_NETWORK=1``        plain
else                                        refused: nothing listens there unprotected
==========================================  ==============================================

Both ends decide by this table, so the variables must be the same on all machines.

Both CURVE key pairs are derived from the secret by scrypt, so every holder of the secret belongs to
the job. ZeroMQ asks `Security.zap_reply` about each connection before its first message is read.
Plain connections show the server's token there as a password. A server that a job starts has a
token of its own, which workers learn as `paceline.runtimes.real.job_store` describes. A server
named with HOST:PORT has that of ``PACELINE_SERVERS_TOKEN``, or one derived from the secret. A peer
without the token gets no reply but "not of this job".

Threat model
------------
- *CURVE*: a peer without the secret can neither read nor alter messages, nor send any. It can cut
  connections.
- *Plain on loopback*: only the administrator can read messages. Other users of the machine do not have
  the token. A plain server does not prove itself to its workers. If it is named with HOST:PORT, a
  process that took that port first gets the token.
- *Plain on a trusted network*: readers of the network, or of the job's store, can read gradients and
  the token.
- *A peer with token and secret* takes part in the job. The server checks its messages and bounds the
  memory that it keeps for it. ZeroMQ itself collects the frames of a message without a limit to their
  number.
- The liveness connection carries a ticket that is valid once, and nothing else.

Outside of this protection: torch's store and gloo's connections neither authenticate nor encrypt.
An attacker who reaches them, including every user of the machine, finds no token of a server there.
Such an attacker can make the job fail, and alter gloo's sums. They can also run code as the job's
user, since torchrun's agents unpickle their rendezvous. Jobs under ``--survive`` use neither.
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
TOKEN = "PACELINE_SERVERS_TOKEN"
"""The token of servers named with HOST:PORT, if there is no secret to derive it from."""
TRUSTED = "PACELINE_TRUSTED_NETWORK"
SECRET_CHARACTERS = 16
"""The minimum length of the secret, and of the token."""
ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""The address at which ZeroMQ asks whether to admit a connection (ZAP, RFC 27)."""

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
        """Set the options of a server's *socket*; call it before binding."""
        if self.encrypted:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)
        else:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def protect_worker(self, socket: zmq.Socket[Any], token: str) -> None:
        """Set the options of a worker's *socket*; call it before connecting."""
        if self.encrypted:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.worker_public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.worker_secret)
        else:
            socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
            socket.setsockopt(zmq.PLAIN_PASSWORD, token.encode())

    def zap_reply(
        self, question: Sequence[bytes], token: str
    ) -> tuple[list[bytes], bool]:
        """Answer ZeroMQ's authentication request.

        Returns the reply, and whether the peer is admitted.
        """
        version, number, _, _, _, mechanism, *credentials = question
        if self.encrypted and mechanism == b"CURVE":
            # The credential is the public key. CURVE has already verified that the peer holds the
            # secret one.
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
    """Return the keys derived from *secret*. Raises `UsageError` for a short one."""
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


def derived(key: bytes, purpose: str) -> str:
    """Return a token or signature for *purpose*, which only holders of *key* can make."""
    message = f"paceline {purpose}".encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()[:32]


def job_key(environment: Mapping[str, str] | None = None) -> bytes | None:
    """Return the common key of a job's processes, for `derived`; None if the environment has none.

    Raises `UsageError` if it is too short.
    """
    environment = os.environ if environment is None else environment
    if environment.get(SECRET):
        return from_secret(environment[SECRET]).worker_secret
    token = environment.get(TOKEN)
    return _long_enough(token).encode() if token else None


def dedicated_token(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the token of servers that no job has started; None if the environment has none.

    Raises `UsageError` if it is too short.
    """
    environment = os.environ if environment is None else environment
    if environment.get(TOKEN):
        return _long_enough(environment[TOKEN])
    key = job_key(environment)
    return None if key is None else derived(key, "token of dedicated servers")


def _long_enough(token: str) -> str:
    if len(token) < SECRET_CHARACTERS:
        raise UsageError(
            f"{TOKEN}: expected at least {SECRET_CHARACTERS} characters, got "
            f"{len(token)}; `paceline serve` makes one, and prints the line that exports it"
        )
    return token


def choose(address: str, environment: Mapping[str, str] | None = None) -> Security:
    """Return how to protect a server at *address*, by the table at the top.

    Raises `UsageError` if it would be open to a network that is not declared as trusted.
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
        "nothing protects it. To encrypt its connections, set the same secret on every "
        "machine of the job:\n"
        '    export PACELINE_SECRET="$(python -c '
        "'import secrets; print(secrets.token_hex(32))')\"\n"
        "If everybody on that network may read the training, say so on every machine: "
        f"export {TRUSTED}=1"
    )


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach *address*."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
