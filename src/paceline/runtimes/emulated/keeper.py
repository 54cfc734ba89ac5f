"""Holds an emulated cluster in one process: when it ends, the kernel removes the cluster.

Two processes start with the cluster, which no other process knows::

    launcher ......... guard --- keeper (process 1 of a namespace of process numbers)
                                   |--- processes in hosts, their children, ...

- The *keeper* makes the network, starts processes in hosts and answers requests. When process 1 of
  a namespace ends, the kernel kills every other process in it with SIGKILL, also descendants and
  detached processes. The keeper has ended only when all of them have.
- The *guard* waits for the end of the launcher and of the keeper, and then ends too. The kernel
  kills the keeper when the guard ends, for whatever reason.

So no process survives the launcher, the guard or the keeper, though each may be killed with
SIGKILL. The guard watches a descriptor of the launcher (pidfd). It does not rely on the end of a
connection, since a forked child of the launcher may hold a copy of it. It does not rely on a
parent-death signal of its own either, since that one comes when the *thread* that started it ends.

Both run in a session of their own, so they get no Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

from paceline.runtimes.emulated import namespaces
from paceline.runtimes.emulated.control_messages import (
    INTERFACE,
    NETWORK,
    Answer,
    AskStatus,
    Build,
    Built,
    ControlChannel,
    Cut,
    Done,
    Failed,
    HostPlan,
    LinkPlan,
    Mode,
    OpenSocket,
    Probe,
    Probed,
    Ready,
    Repair,
    Request,
    SetRate,
    Spawn,
    Spawned,
    Status,
)
from paceline.runtimes.emulated.errors import KernelLacksError
from paceline.runtimes.emulated.kernel_features import FEATURES
from paceline.runtimes.emulated.shaping import Bucket, Shaper, segment_bytes


class Processes:
    """The keeper's child processes, by a number that is never used twice.

    The keeper is also the first process of its process-number namespace. So orphans become its
    children, and it collects them, too.
    """

    def __init__(self, proc: Path) -> None:
        """*proc* is a /proc with the process numbers of the rest of the machine."""
        self._proc = proc
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._codes: dict[int, int] = {}
        self._started = 0

    def spawn(
        self, request: Spawn, namespace: int, streams: list[int]
    ) -> tuple[Spawned, int]:
        """Start a process in a network namespace, with the given standard streams.

        Returns the response, and a descriptor of the process. Raises `OSError`.
        """
        standard_input, output, errors = streams
        with namespaces.inside(namespace):
            child = subprocess.Popen(
                request.arguments,
                env=dict(request.environment),
                cwd=request.directory,
                stdin=standard_input,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self._started += 1
        self._running[child.pid] = (self._started, child)
        descriptor = os.pidfd_open(child.pid)
        return Spawned(
            process=self._started, pid=self._machine_pid(descriptor)
        ), descriptor

    def collect(self) -> None:
        """Record the exit status of all processes that have ended, orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number, child = self._running.pop(pid, (0, None))
            if child is not None:
                child.returncode = os.waitstatus_to_exitcode(status)
                self._codes[number] = child.returncode

    def code(self, process: int) -> int | None:
        """Return the exit status of a process; None while it runs."""
        self.collect()
        return self._codes.get(process)

    def _machine_pid(self, descriptor: int) -> int:
        """Return the process number outside the namespace.

        Only a process that has not been collected has one, so call this right after the start.
        """
        text = (self._proc / "self" / "fdinfo" / str(descriptor)).read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("Pid:"))
        return int(line.split()[1])


_LOOPBACK = 1
_CORE = "core"
_CONGESTION_CONTROL = "cubic"
_PERMANENT = 0x80


@contextlib.contextmanager
def needs(feature: str) -> Iterator[None]:
    """Turn the kernel's refusal into a `KernelLacksError` that names the feature."""
    try:
        yield
    except NetlinkError as error:
        raise KernelLacksError(
            f"expected a kernel with {feature}, but it answered: {error}. An emulated "
            f"cluster {FEATURES[feature].how_to_get()}"
        ) from error


class NetworkBuilder:
    """All namespaces, links and rules of one emulated cluster."""

    def __init__(self) -> None:
        self._netlink = IPRoute()
        self._hosts: list[int] = []
        self._links: list[LinkPlan] = []
        self._shapers: list[Shaper] = []

    def build(self, request: Build) -> bool:
        """Make the network; return False if the kernel cannot delay packets.

        Raises `KernelLacksError` or `NetlinkError`. Everything made before the error ends with the
        keeper.
        """
        delayed = "netem" not in self.probe(["netem"])
        self._links = request.links
        _without_ipv6()
        self._netlink.link("set", index=_LOOPBACK, state="up")
        self._bridge(_CORE)
        for rack in range(request.racks):
            self._bridge(f"rack{rack}")
            with needs("veth"):
                self._netlink.link(
                    "add", ifname=f"u{rack}", kind="veth", peer={"ifname": f"d{rack}"}
                )
            self._plug(f"u{rack}", f"rack{rack}")
            self._plug(f"d{rack}", _CORE)
        for number, host in enumerate(request.hosts):
            self._hosts.append(namespaces.new_network())
            self._wire(number, host)
        for number in range(len(request.hosts)):
            self._furnish(number, request)
        for link in request.links:
            with self._netlink_of(link) as netlink:
                index = self._index(netlink, link.device)
                delay = link.delay if delayed else 0.0
                shaper = Shaper(index, link.rate, delay)
                with needs("tbf"):
                    shaper.install(netlink)
                _limit_segments(netlink, index, link.rate)
                self._shapers.append(shaper)
        return delayed

    def set_rate(self, link: int, rate: float) -> None:
        """Shape a link to another wire rate."""
        with self._netlink_of(self._links[link]) as netlink:
            shaper = self._shapers[link]
            _limit_segments(netlink, shaper.index, rate)
            shaper.set_rate(netlink, rate)

    def cut(self, link: int) -> None:
        """Drop every packet on a link."""
        with self._netlink_of(self._links[link]) as netlink:
            self._shapers[link].cut(netlink)

    def repair(self, link: int) -> None:
        """Let packets flow again."""
        with self._netlink_of(self._links[link]) as netlink:
            self._shapers[link].repair(netlink)

    def namespace(self, host: int) -> int:
        """Return the descriptor that holds a host's network namespace."""
        return self._hosts[host]

    def open_socket(self, host: int) -> socket.socket:
        """Return a TCP socket in a host. It stays there even if another process uses it."""
        with namespaces.inside(self._hosts[host]):
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def probe(self, features: list[str]) -> dict[str, str]:
        """Try features in a scratch namespace; return the missing ones, with the kernel's messages."""
        scratch = namespaces.new_network()
        with namespaces.inside(scratch), IPRoute() as netlink:
            return {
                feature: text
                for feature in features
                if (text := _try_feature(netlink, feature)) is not None
            }

    def _bridge(self, name: str) -> None:
        with needs("bridge"):
            self._netlink.link(
                "add",
                ifname=name,
                kind="bridge",
                br_stp_state=0,
                br_forward_delay=0,
                br_mcast_snooping=0,
            )
        index = self._index(self._netlink, name)
        self._netlink.link("set", index=index, state="up")

    def _plug(self, name: str, bridge: str) -> None:
        self._netlink.link(
            "set",
            index=self._index(self._netlink, name),
            master=self._index(self._netlink, bridge),
            state="up",
        )

    def _wire(self, number: int, host: HostPlan) -> None:
        """Connect a host to its rack's bridge by a veth pair."""
        with namespaces.inside(self._hosts[number]):
            _without_ipv6()
        with needs("veth"):
            self._netlink.link(
                "add",
                ifname=f"h{number}",
                kind="veth",
                peer={
                    "ifname": INTERFACE,
                    "address": host.hardware_address,
                    "net_ns_fd": self._hosts[number],
                },
            )
        self._plug(f"h{number}", f"rack{host.rack}")

    def _furnish(self, number: int, request: Build) -> None:
        """Give a host its addresses, and those of all other hosts.

        All namespaces share one neighbour table of the kernel, which is too small to learn them.
        """
        with self._inside(number) as netlink:
            index = self._index(netlink, INTERFACE)
            netlink.link("set", index=_LOOPBACK, state="up")
            address = request.hosts[number].address
            netlink.addr("add", index=index, address=address, prefixlen=32)
            netlink.link("set", index=index, state="up")
            _route(netlink, index, address)
            for other, host in enumerate(request.hosts):
                if other != number:
                    netlink.neigh(
                        "add",
                        dst=host.address,
                        lladdr=host.hardware_address,
                        ifindex=index,
                        state=_PERMANENT,
                    )

    @contextlib.contextmanager
    def _inside(self, host: int) -> Iterator[Any]:
        with namespaces.inside(self._hosts[host]), IPRoute() as netlink:
            yield netlink

    @contextlib.contextmanager
    def _netlink_of(self, link: LinkPlan) -> Iterator[Any]:
        if link.host is None:
            yield self._netlink
        else:
            with self._inside(link.host) as netlink:
                yield netlink

    @staticmethod
    def _index(netlink: Any, name: str) -> int:
        index: int = netlink.link_lookup(ifname=name)[0]
        return index


def _without_ipv6() -> None:
    """Turn off neighbour discovery in the background.

    If /proc/sys is read-only, its few packets do no harm.
    """
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def _route(netlink: Any, index: int, address: str) -> None:
    """Add a route to all hosts, with Linux's usual congestion control if the kernel has it.

    This machine may prefer another one for itself, such as bbr, which a cluster would not have.
    """
    route = {"dst": NETWORK, "oif": index, "scope": "link", "prefsrc": address}
    try:
        wanted = {"cc_algo": _CONGESTION_CONTROL}
        netlink.route("add", **route, metrics=wanted)
    except NetlinkError:
        netlink.route("add", **route)


def _limit_segments(netlink: Any, index: int, rate: float) -> None:
    """Let senders pass on about a millisecond of data in one segment (see `shaping`)."""
    netlink.link("set", index=index, gso_max_size=segment_bytes(rate))


def _try_feature(netlink: Any, feature: str) -> str | None:
    """Return the kernel's error message if it lacks a feature; None if it has it."""
    try:
        if feature == "bridge":
            netlink.link("add", ifname="scratch-bridge", kind="bridge")
            return None
        if not netlink.link_lookup(ifname="scratch"):
            netlink.link(
                "add", ifname="scratch", kind="veth", peer={"ifname": "scratch-peer"}
            )
        index = netlink.link_lookup(ifname="scratch")[0]
        if feature == "tbf":
            bucket = Bucket.of(1e6)
            netlink.tc(
                "replace",
                "tbf",
                index,
                rate=bucket.rate,
                burst=bucket.burst,
                limit=bucket.limit,
            )
        elif feature == "netem":
            netlink.tc("replace", "netem", index, delay=1000)
    except NetlinkError as error:
        return str(error)
    return None


def main(connection: int, launcher: int) -> int:
    """Run the guard.

    *connection* is the keeper's end of the connection to the launcher. *launcher* is a descriptor
    of that process.
    """
    line = ControlChannel(socket.socket(fileno=connection))
    # Reset the launcher's signal settings, which processes in hosts must not inherit.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        mode = namespaces.isolate()
    except OSError as error:
        line.send(Failed(kind="permission", text=str(error)))
        return 1
    guard = os.pidfd_open(os.getpid())
    keeper = os.fork()
    if keeper == 0:
        status = 1
        try:
            namespaces.die_with(guard)
            Keeper(line).serve(mode)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    watch = select.poll()
    watch.register(launcher, select.POLLIN)
    watch.register(os.pidfd_open(keeper), select.POLLIN)
    watch.poll()
    os.kill(keeper, signal.SIGKILL)
    # This returns when every process of the namespace has ended.
    os.waitpid(keeper, 0)
    return 0


class Keeper:
    """Answers requests until the connection ends."""

    def __init__(self, line: ControlChannel) -> None:
        self._line = line
        # Open /proc before another one is mounted over it.
        machine = os.open("/proc", os.O_DIRECTORY | os.O_PATH | os.O_CLOEXEC)
        self._own_proc = namespaces.mount_own_proc()
        self._processes = Processes(Path(f"/proc/self/fd/{machine}"))
        self._switchboard = NetworkBuilder()

    def serve(self, mode: Mode) -> None:
        """Send `Ready`, then answer requests; collect child processes as they end."""
        ended, wake = socket.socketpair()
        ended.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._line.send(Ready(mode=mode, own_proc=self._own_proc))
        selector = selectors.DefaultSelector()
        selector.register(ended, selectors.EVENT_READ)
        selector.register(self._line, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is ended:
                    ended.recv(4096)
                    self._processes.collect()
                elif not self._answer_one():
                    return

    def _answer_one(self) -> bool:
        """Answer one request; False if the client has closed the connection."""
        try:
            request, descriptors = self._line.receive_request()
        except (EOFError, OSError):
            return False
        sent: list[int] = []
        try:
            answer = self._answer(request, descriptors, sent)
        except KernelLacksError as error:
            answer = Failed(kind="kernel", text=str(error))
        except Exception as error:
            answer = Failed(kind="other", text=f"{type(error).__name__}: {error}")
        finally:
            _close(descriptors)
        try:
            self._line.send(answer, sent)
        except OSError:
            return False
        finally:
            _close(sent)
        return True

    def _answer(
        self, request: Request, descriptors: list[int], sent: list[int]
    ) -> Answer:
        """Carry out a request; add descriptors to send with the response to *sent*."""
        match request:
            case Build():
                return Built(delayed=self._switchboard.build(request))
            case SetRate():
                self._switchboard.set_rate(request.link, request.rate)
            case Cut():
                self._switchboard.cut(request.link)
            case Repair():
                self._switchboard.repair(request.link)
            case OpenSocket():
                sent.append(self._switchboard.open_socket(request.host).detach())
            case Spawn():
                return self._spawn(request, descriptors, sent)
            case AskStatus():
                return Status(code=self._processes.code(request.process))
            case Probe():
                return Probed(missing=self._switchboard.probe(list(FEATURES)))
        return Done()

    def _spawn(self, request: Spawn, streams: list[int], sent: list[int]) -> Answer:
        namespace = self._switchboard.namespace(request.host)
        try:
            spawned, descriptor = self._processes.spawn(request, namespace, streams)
        except OSError as error:
            filename = error.filename
            if isinstance(filename, bytes):
                filename = os.fsdecode(filename)
            return Failed(
                kind="spawn",
                text=error.strerror or str(error),
                number=error.errno or 0,
                filename=filename,
            )
        sent.append(descriptor)
        return spawned


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
