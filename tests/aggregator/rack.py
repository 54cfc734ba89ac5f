"""A rack of network namespaces: an aggregator's host and workers' at one switch (a bridge).

A namespace is entered by a thread, which alone is then there; its sockets stay there.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import struct
import subprocess

from paceline.aggregator.xdp import libbpf

SCHED_CLS, TCX_EGRESS = 3, 47
CLONE_NEWNET = 0x40000000
AGGREGATOR, ANOTHER = AGGREGATORS = "10.77.0.100", "10.77.0.101"


def why_not():
    """Why there can be no namespaces here; nothing, where there can."""
    if not shutil.which("ip"):
        return "no ip"
    if os.geteuid() != 0:
        return "namespaces need root"
    return ""


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def address_of(worker):
    return f"10.77.0.{worker + 1}"


@contextlib.contextmanager
def inside(name):
    """This thread is in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{name}") as there:
        assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, ctypes.get_errno()
        try:
            yield
        finally:
            assert libc.setns(here.fileno(), CLONE_NEWNET) == 0, ctypes.get_errno()


def lose_at(interface, part):
    """A descriptor: while it is open, that part of what is to leave there is lost.

    Not every kernel has netem. This is a program of BPF in the kernel's own words: a random
    number, less than a bound: drop (2); else go on (-1).
    """
    lib = libbpf.library()
    bound = int(part * 2**32)
    words = (
        *((0x85, 0, 0, 7), (0xA6, 0, 2, bound)),
        *((0xB7, 0, 0, -1), (0x95, 0, 0, 0), (0xB7, 0, 0, 2), (0x95, 0, 0, 0)),
    )
    code = b"".join(struct.pack("<BBhi", *word) for word in words)
    lib.bpf_prog_load.argtypes = (
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p),
        *(ctypes.c_size_t, ctypes.c_void_p),
    )
    program = lib.bpf_prog_load(SCHED_CLS, b"lose", b"MIT", code, len(words), None)
    assert program >= 0, ctypes.get_errno()
    index = socket.if_nametoindex(interface)
    link = lib.bpf_link_create(program, index, TCX_EGRESS, None)
    os.close(program)
    assert link >= 0, ctypes.get_errno()
    return link


def enter(name):
    """This process is in the namespace from now on."""
    with open(f"/run/netns/{name}") as there:
        assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0


class Rack:
    """Names of namespaces: `aggregator`, `another` one, and `workers`; their interfaces are
    eth0."""

    def __init__(self, workers):
        base = f"pl{os.getpid()}"
        self.hub, self.aggregator, self.another = f"{base}h", f"{base}a", f"{base}b"
        self.workers = [f"{base}w{worker}" for worker in range(workers)]
        self._all = (self.hub, self.aggregator, self.another, *self.workers)

    def __enter__(self):
        try:
            for name in self._all:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
            ip("-n", self.hub, "link", "set", "br0", "up")
            self._plug(self.aggregator, "pa", AGGREGATOR)
            self._plug(self.another, "pb", ANOTHER)
            for worker, name in enumerate(self.workers):
                self._plug(name, f"p{worker}", address_of(worker))
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise OSError(error.stderr.decode()) from None
        return self

    def _plug(self, name, port, address):
        ip(
            *("-n", self.hub, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", name),
        )
        ip("-n", self.hub, "link", "set", port, "master", "br0", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")

    @contextlib.contextmanager
    def behind_a_bridge(self):
        """The aggregator's interface is a bridge, br0, of which eth0 is a port."""
        at, whole = ("-n", self.aggregator), f"{AGGREGATOR}/24"
        ip(*at, "link", "add", "br0", "type", "bridge")
        ip(*at, "addr", "del", whole, "dev", "eth0")
        ip(*at, "link", "set", "eth0", "master", "br0")
        ip(*at, "link", "set", "br0", "up")
        ip(*at, "addr", "add", whole, "dev", "br0")
        yield
        ip(*at, "link", "del", "br0")
        ip(*at, "addr", "add", whole, "dev", "eth0")

    @contextlib.contextmanager
    def losing(self, part):
        """Of all packets that leave the switch, this part is lost."""
        ports = ["pa", "pb", *(f"p{worker}" for worker in range(len(self.workers)))]
        with contextlib.ExitStack() as stack:
            with inside(self.hub):
                for port in ports:
                    stack.callback(os.close, lose_at(port, part))
            yield

    def __exit__(self, *_):
        for name in self._all:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
