"""Publishes addresses, tokens and texts of workers through torch's store, which keeps no secrets.

Every process that reaches MASTER_PORT may read and write torch's store, other users of the machine
included. So tokens are transferred in one of three ways. All workers choose the same one by this
table:

=============================================  ==========================================
``PACELINE_SECRET``, or else                   The store has a signed address. The token is
``PACELINE_SERVERS_TOKEN``, is set             derived from the variable and from a number
                                               beside the address.
else: all workers are on this machine          The publisher has both in an anonymous file
                                               (``memfd``); the store says where it is.
else, and on systems without ``memfd``         Both are in the store.
=============================================  ==========================================

The second way relies on the kernel: only processes of the same user, and the administrator's, open
another process's descriptors. A reader accepts the file only if it is its own user's, a memfd, and
sealed, which no other user can make. The kernel removes the file with its process.

The last way keeps out scanners, but not readers of the store. Servers use it only under
``PACELINE_TRUSTED_NETWORK=1``: see `paceline.transport.security`.

Addresses are `ListenAddress`es. A machine may know its own name as an address that other machines
cannot use: 127.0.1.1 in Debian's ``/etc/hosts``, or "localhost" from some launchers. Then paceline
listens on all addresses, as torch's store does, and each worker connects to MASTER_ADDR as that
worker resolves it.
"""

from __future__ import annotations

import enum
import fcntl
import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from paceline.errors import UsageError
from paceline.transport.security import SECRET, derived, is_loopback, job_key

LOOPBACK = "127.0.0.1"
AT_MASTER = ""
"""A published address that means MASTER_ADDR, as each reader resolves it."""


@dataclass(frozen=True)
class ListenAddress:
    """*bind*: the address to listen at; *advertise*: the address for other workers."""

    bind: str
    advertise: str


def resolve(name: str) -> str:
    """Return an address of *name*: of IP version 4, if it has one. Raises `OSError`."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_own(address: str) -> bool:
    """Return whether this machine can listen at the address."""
    try:
        with socket.create_server((address, 0), family=family_of(address)):
            return True
    except OSError:
        return False


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def on_master(
    size: int,
    environment: Mapping[str, str] | None = None,
    *,
    resolve: Callable[[str], str] = resolve,
    is_own: Callable[[str], bool] = is_own,
) -> ListenAddress:
    """Return the address at which worker 0 of *size* listens, on the machine of MASTER_ADDR.

    It is the address that MASTER_ADDR has on this machine, and no other one, if the other workers
    can use it. Otherwise it is all addresses. A loopback address is used as it is in two cases: all
    workers are on this machine, or nothing says where they are and MASTER_ADDR is written as a
    loopback address. Raises `OSError` if MASTER_ADDR cannot be resolved.
    """
    environment = os.environ if environment is None else environment
    master = environment.get("MASTER_ADDR", LOOPBACK)
    address = resolve(master)
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        local = environment.get("LOCAL_WORLD_SIZE")
        if local is None:
            usable = master in ("localhost", address)
        else:
            usable = int(local) >= size
    else:
        # The address may belong to a service, or to a router in front of this machine.
        usable = is_own(address)
    if usable:
        return ListenAddress(bind=address, advertise=address)
    return ListenAddress(
        bind="::" if ":" in address else "0.0.0.0", advertise=AT_MASTER
    )


def toward_master(environment: Mapping[str, str] | None = None) -> ListenAddress:
    """Return the address at which a worker of another machine listens.

    It is on the network that leads to worker 0.
    """
    environment = os.environ if environment is None else environment
    master = resolve(environment.get("MASTER_ADDR", LOOPBACK))
    with socket.socket(family_of(master), socket.SOCK_DGRAM) as probe:
        # This sends nothing: it only looks up the route.
        probe.connect((master, 1))
        address = str(probe.getsockname()[0])
    return ListenAddress(bind=address, advertise=address)


def host_to_connect(
    published: str, environment: Mapping[str, str] | None = None
) -> str:
    """Return the host to connect to for a published address."""
    environment = os.environ if environment is None else environment
    return published or environment.get("MASTER_ADDR", LOOPBACK)


_LARGEST_BYTES = 4096


class Store(Protocol):
    """The methods of torch's store that are used: a key-value store that all ranks reach."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Address(msgspec.Struct, kw_only=True):
    """The address of a listener and its token; or, with *fault*, why there is none."""

    host: str = ""
    port: int = 0
    token: str = ""
    fault: str = ""


class PublishedAddress(msgspec.Struct, kw_only=True):
    """A published *address*, without its token if readers of the store must not know that.

    Otherwise *process* and *descriptor* name the file that has it.
    """

    address: Address | None = None
    number: str = ""
    signature: str = ""
    process: int = 0
    descriptor: int = -1


class PublishedText(msgspec.Struct, kw_only=True):
    """A published text, which is no secret."""

    text: str
    signature: str = ""


class SealedAddress(msgspec.Struct, kw_only=True):
    """The content of an anonymous file; *name* has the job and the key."""

    name: str
    address: Address


class TokenTransfer(enum.Enum):
    """The ways of transferring tokens, see the table at the top."""

    SIGNED = enum.auto()
    HERE = enum.auto()
    OPEN = enum.auto()


def token_transfer_of(size: int, environment: Mapping[str, str]) -> TokenTransfer:
    """Return the way for a job of *size* workers.

    Raises `UsageError` for a secret that is too short.
    """
    if job_key(environment) is not None:
        return TokenTransfer.SIGNED
    local = environment.get("LOCAL_WORLD_SIZE")
    if local is not None:
        all_here = int(local) >= size
    else:
        all_here = size == 1 or is_loopback(environment.get("MASTER_ADDR", "localhost"))
    return (
        TokenTransfer.HERE
        if all_here and hasattr(os, "memfd_create")
        else TokenTransfer.OPEN
    )


class JobStore:
    """One worker's access to the store, for a job of *size* workers."""

    def __init__(
        self, store: Store, size: int, environment: Mapping[str, str] | None = None
    ) -> None:
        """Choose the way of transfer. Raises `UsageError` for a secret that is too short."""
        environment = os.environ if environment is None else environment
        self._store = store
        self._job = environment.get("MASTER_PORT", "")
        self._key = job_key(environment)
        self._token_transfer = token_transfer_of(size, environment)
        # The key is a token, the value its number.
        self._numbers: dict[str, str] = {}
        self._files: list[int] = []

    def new_token(self) -> str:
        """Return a new token, for an address to publish."""
        number = secrets.token_hex(16)
        if self._key is None:
            return number
        token = derived(self._key, f"token {number}")
        self._numbers[token] = number
        return token

    def publish_address(self, name: str, address: Address) -> None:
        """Publish *address* to all workers. Its token, if any, is a `new_token`."""
        published = self._published(name, address)
        self._store.set(name, msgspec.json.encode(published).decode())

    def address(self, name: str) -> Address:
        """Wait for the address published under *name*, and return it.

        Raises `UsageError` if another user has published it, or this worker cannot reach it.
        """
        text = self._store.get(name)
        try:
            published = msgspec.json.decode(text, type=PublishedAddress)
        except msgspec.MsgspecError as error:
            raise _not_ours(name, error) from None
        address = published.address
        if address is not None and address.fault:
            return address
        if self._token_transfer is TokenTransfer.HERE:
            return self._read_file(name, published)
        if address is None:
            raise UsageError(
                f"{name}: its address was published for the workers of one machine, and this worker "
                f"is on another: set the same {SECRET} for all"
            )
        if self._key is None:
            return address
        if not hmac.compare_digest(
            published.signature.encode(),
            self._signature(self._key, name, address, published.number).encode(),
        ):
            raise _not_signed(name)
        address.token = derived(self._key, f"token {published.number}")
        return address

    def publish(self, name: str, text: str) -> None:
        """Publish *text* to all workers; every reader of the store can read it.

        With a key it is signed.
        """
        published = PublishedText(text=text)
        if self._key is not None:
            published.signature = self._text_signature(self._key, name, text)
        self._store.set(name, msgspec.json.encode(published).decode())

    def get(self, name: str) -> str:
        """Wait for the text published under *name*, and return it.

        Raises `UsageError` if another user has published it.
        """
        try:
            published = msgspec.json.decode(self._store.get(name), type=PublishedText)
        except msgspec.MsgspecError as error:
            raise _not_ours(name, error) from None
        if self._key is not None and not hmac.compare_digest(
            published.signature.encode(),
            self._text_signature(self._key, name, published.text).encode(),
        ):
            raise _not_signed(name)
        return published.text

    def close(self) -> None:
        """Close this worker's publications: no worker reads them any more."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files.clear()

    def _published(self, name: str, address: Address) -> PublishedAddress:
        if address.fault:
            return PublishedAddress(address=Address(fault=address.fault))
        if self._token_transfer is TokenTransfer.HERE:
            try:
                descriptor = _sealed(
                    SealedAddress(name=self._named(name), address=address)
                )
            except OSError as error:
                # A sandbox may forbid it.
                return PublishedAddress(
                    address=Address(
                        fault=f"{name}: its token cannot be handed over here ({error}): "
                        f"set the same {SECRET} for all workers"
                    )
                )
            self._files.append(descriptor)
            return PublishedAddress(process=os.getpid(), descriptor=descriptor)
        if self._key is None:
            return PublishedAddress(address=address)
        number = self._numbers.get(address.token, "")
        public = Address(host=address.host, port=address.port)
        signature = self._signature(self._key, name, public, number)
        return PublishedAddress(address=public, number=number, signature=signature)

    def _named(self, name: str) -> str:
        """Return a name within this job: another job has another port."""
        return f"{self._job}/{name}"

    def _signature(self, key: bytes, name: str, address: Address, number: str) -> str:
        words = [self._named(name), address.host, address.port, number]
        return derived(key, f"address {msgspec.json.encode(words).decode()}")

    def _text_signature(self, key: bytes, name: str, text: str) -> str:
        words = [self._named(name), text]
        return derived(key, f"words {msgspec.json.encode(words).decode()}")

    def _read_file(self, name: str, published: PublishedAddress) -> Address:
        path = f"/proc/{published.process}/fd/{published.descriptor}"
        try:
            return _read_sealed(path, self._named(name))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{name}: this worker cannot read what process {published.process} has "
                f"published ({error}): workers of one machine that are different users', or "
                f"in different containers, need the same {SECRET}"
            ) from None


def _not_ours(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"what lies in the job's store as {name!r} is none of ours ({error}): is the same "
        "paceline installed everywhere?"
    )


def _not_signed(name: str) -> UsageError:
    return UsageError(
        f"{name}: what lies in the job's store is not signed with this worker's "
        f"{SECRET}: set the same for all. If it is, somebody else writes there"
    )


def _seals() -> int:
    return (
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )


def _sealed(sheet: SealedAddress) -> int:
    """Return a descriptor of an anonymous file that no process can change. Raises `OSError`."""
    flags = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
    descriptor = os.memfd_create("paceline", flags)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, msgspec.json.encode(sheet))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read_sealed(path: str, name: str) -> Address:
    """Return the address in such a file.

    Raises `OSError` or `ValueError` if it is not a sealed file of this user.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise ValueError(f"it is user {status.st_uid}'s")
        # This raises OSError for files that cannot be sealed.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise ValueError("it can be changed")
        sheet = msgspec.json.decode(
            os.pread(descriptor, _LARGEST_BYTES, 0), type=SealedAddress
        )
    finally:
        os.close(descriptor)
    if sheet.name != name:
        raise ValueError(f"it is {sheet.name!r}")
    return sheet.address
