"""The connection on which a worker registers its job at an aggregator, and its words.

Lines of JSON over TCP, bounded; nothing is unpickled. The aggregator speaks first:

========== ============ ===================================================================
from       words        what
========== ============ ===================================================================
aggregator `Challenge`  a nonce
worker     `Register`   what it asks for, with an HMAC of it and of the nonce
aggregator `Granted`    the job's number and lease, with an HMAC; or `Refused`, and the end
worker     `Goodbye`    it needs nothing more
aggregator `Ended`      another worker is lost: the job is over
========== ============ ===================================================================

*Who may register*: who has the aggregator's token, which is never sent. Both ends prove that
they have it; the key of the job's datagrams is derived from it and from the job's name.

*Who is lost*: whose connection ends without a goodbye. Its job can then complete nothing more:
it ends for all, at once, and its slots are free. Nothing is inferred from silence.

Threat model. Who does not have the token can neither register, nor forge a datagram, nor free a
slot; he can flood the port, as any. Who reads the network reads sums and contributions, as the
aggregator must. Who has the token *and* reads or guesses another job's name can forge its
datagrams: jobs that distrust each other that far need aggregators of their own.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from paceline.collectives.in_network.jobs import Rules, Terms
from paceline.errors import PeerLostError, UsageError
from paceline.timeouts import timeouts
from paceline.transport import liveness
from paceline.transport.security import TRUSTED, derived, is_loopback

VERSION = 1
LINE_BYTES = 16384


class Challenge(msgspec.Struct, tag="challenge", kw_only=True):
    """*nonce*: to be part of the proof."""

    version: int
    nonce: str


class Register(
    msgspec.Struct, tag="register", kw_only=True, forbid_unknown_fields=True
):
    """A worker's wish: see `Terms`. *port*: of its datagrams; *host*: theirs, where it is not
    that of this connection; *next*: host and port of each next agent, or of what is behind for
    slots in turn: servers, or the aggregators before them. *routes*: bits, host and port, of
    workers that do not register here, and of the way to them."""

    job: str
    worker: int
    workers: int
    port: int
    nonce: str
    host: str = ""
    next: list[tuple[str, int]] = []
    slots: int = 1
    fewest: int = 1
    elements: int = 1
    rules: Rules = "slots"
    here: int = 0
    expected: list[int] = []
    routes: list[tuple[int, str, int]] = []
    proof: str = ""

    def terms(self) -> Terms:
        """What all workers of the job ask for alike."""
        return Terms(
            name=self.job,
            workers=self.workers,
            slots=self.slots,
            fewest=self.fewest,
            elements=self.elements,
            rules=self.rules,
            here=self.here,
            expected=tuple(self.expected),
        )


class Granted(msgspec.Struct, tag="granted", kw_only=True):
    """The job's *number*, and how many slots it has. *capacity*: the values that a row
    of the aggregator has."""

    number: int
    slots: int
    capacity: int
    proof: str = ""


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """Why nothing is granted, for a person to read."""

    reason: str


class Goodbye(msgspec.Struct, tag="goodbye"):
    """Nothing more is needed."""


class Ended(msgspec.Struct, tag="ended", kw_only=True):
    """The job is over: another worker is lost."""

    reason: str


FromWorker = Register | Goodbye
FromAggregator = Challenge | Granted | Refused | Ended


def line_of(words: msgspec.Struct) -> bytes:
    """*words* as they travel."""
    return msgspec.json.encode(words) + b"\n"


_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_aggregator: msgspec.json.Decoder[FromAggregator] = msgspec.json.Decoder(
    FromAggregator
)


def from_worker(line: bytes) -> FromWorker:
    """Raises `msgspec.MsgspecError` for what is none of the words."""
    return _from_worker.decode(line)


def proof_of(token: str, nonce: str, words: Register | Granted) -> str:
    """What only who has the *token* can say of these *words* to who has made the *nonce*."""
    bare = msgspec.structs.replace(words, proof="")
    text = msgspec.json.encode(bare).decode()
    return derived(token.encode(), f"aggregator {nonce} {text}")


def is_proven(token: str, nonce: str, words: Register | Granted) -> bool:
    """Whether the words are from somebody with the token, and for this nonce."""
    return hmac.compare_digest(
        proof_of(token, nonce, words).encode(), words.proof.encode()
    )


def check_may_be_read(
    address: str, environment: Mapping[str, str] | None = None
) -> None:
    """Raise `UsageError` where an aggregator at *address* would show a network what nobody
    has said it may read."""
    environment = os.environ if environment is None else environment
    if is_loopback(address) or environment.get(TRUSTED) == "1":
        return
    raise UsageError(
        f"an aggregator at {address}: its datagrams are signed, but anybody on that network "
        "can read them, for what adds up must see. If everybody there may read the training, "
        f"say so: export {TRUSTED}=1"
    )


class Registration:
    """A worker's end of the connection. It blocks, until it is granted or refused."""

    def __init__(self, host: str, port: int, token: str) -> None:
        """Raises `PeerLostError` where nobody answers at *host*."""
        self._where = f"the aggregator at {host}:{port}"
        self._token = token
        self._read = b""
        try:
            self.socket = socket.create_connection(
                (host, port), timeouts.aggregator_connect
            )
        except OSError as error:
            raise PeerLostError(f"{self._where} cannot be reached: {error}") from None
        liveness.watch(self.socket)

    def register(self, wish: Register) -> Granted:
        """Raises `UsageError` with the aggregator's reason, and `PeerLostError`."""
        challenge = self._hear()
        if not isinstance(challenge, Challenge) or challenge.version != VERSION:
            raise UsageError(
                f"{self._where} does not speak version {VERSION} of this protocol: is it an "
                "aggregator, and of the same paceline?"
            )
        wish = msgspec.structs.replace(wish, nonce=os.urandom(16).hex())
        wish.proof = proof_of(self._token, challenge.nonce, wish)
        self._say(wish)
        answer = self._hear()
        if isinstance(answer, Refused):
            raise UsageError(f"{self._where} refuses: {answer.reason}")
        if not isinstance(answer, Granted) or not is_proven(
            self._token, wish.nonce, answer
        ):
            raise UsageError(f"{self._where} has not shown that it has the token")
        self.socket.setblocking(False)
        return answer

    def check(self) -> None:
        """Raise `PeerLostError` where the job has ended, or the aggregator has."""
        try:
            data = self.socket.recv(LINE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(error)
        else:
            self._read += data
            if b"\n" in self._read:
                words = self._decoded(self._read.partition(b"\n")[0])
                if isinstance(words, Ended):
                    raise PeerLostError(f"{self._where}: {words.reason}")
            if not data:
                self._lost(None)

    def close(self, *, well: bool) -> None:
        """End the connection: with a goodbye, or as a loss."""
        try:
            if well:
                self.socket.setblocking(True)
                self._say(Goodbye())
        except (OSError, PeerLostError):
            pass  # it has ended before us
        finally:
            self.socket.close()

    def _say(self, words: msgspec.Struct) -> None:
        try:
            self.socket.sendall(line_of(words))
        except OSError as error:
            self._lost(error)

    def _hear(self) -> FromAggregator:
        while b"\n" not in self._read:
            try:
                data = self.socket.recv(LINE_BYTES)
            except OSError as error:
                self._lost(error)
            if not data or len(self._read) > LINE_BYTES:
                self._lost(None)
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return self._decoded(line)

    def _decoded(self, line: bytes) -> FromAggregator:
        try:
            return _from_aggregator.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{self._where} says what is none of an aggregator's words: {error}"
            ) from None

    def _lost(self, error: OSError | None) -> NoReturn:
        raise PeerLostError(f"{self._where} {liveness.how_it_ended(error)}") from None
