"""The kernel's side of an aggregator: two programs, and the maps that say whom they serve."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from paceline.aggregator.jobs import Job
from paceline.aggregator.packets import MOST_WORKERS, Array
from paceline.aggregator.protocol import all_bits
from paceline.aggregator.xdp import libbpf
from paceline.aggregator.xdp.build import OTHERWISE, compiled, missing_library
from paceline.aggregator.xdp.layout import (
    CONFIG,
    COUNT,
    COUNTS,
    END,
    HEADER_WORDS,
    job_type,
    room,
    slot_type,
)
from paceline.errors import UsageError

MOST_ELEMENTS = 858
"""A packet has to lie in one page, with what the kernel puts before and behind it."""
Address = tuple[str, int]
_NOT_IN_THE_DRIVER = {errno.EOPNOTSUPP, 524, errno.EINVAL, errno.ENOMEM}
"""What drivers say that cannot have XDP, at all or as they are set up; 524: the kernel's own
ENOTSUPP."""


class Kernel:
    """The programs, loaded, with so many *slots* for datagrams of at most *elements*."""

    def __init__(self, slots: int, elements: int) -> None:
        """Raises `UsageError` where clang, libbpf, a permission or the kernel is in the way."""
        if elements > MOST_ELEMENTS:
            raise UsageError(
                f"datagrams of {elements} values: --path xdp has up to {MOST_ELEMENTS}, so that "
                f"a packet lies in one page: say --mtu 3498, or less{OTHERWISE}"
            )
        path = compiled(elements)
        try:
            library = libbpf.library()
        except (OSError, AttributeError) as error:
            raise missing_library(OSError(str(error))) from None
        try:
            self.objects = libbpf.Objects(library, str(path), {"slots": slots})
        except libbpf.BpfError as error:
            raise _refused(error) from None
        self._elements = elements
        self._processors = library.libbpf_num_possible_cpus()
        self._jobs = self.objects.map("jobs", job_type(elements))
        self.slots = self.objects.map("slots", slot_type(elements))
        self._configs = self.objects.map("configs", CONFIG)
        self._counts = self.objects.map("counts", COUNT)
        self._serials: dict[int, int] = {}
        self._begun = 0
        self._links: list[int] = []
        self.cookie = 0

    def serve(self, address: Address) -> None:
        """Datagrams to this address are the aggregator's."""
        config = np.zeros((), CONFIG)
        self.cookie = secrets.randbits(64)
        config["cookie"] = self.cookie
        config["address"], config["port"] = _number(address[0]), address[1]
        self._configs[0] = config

    def attach(self, interface: str) -> str:
        """Let them deal with what comes by *interface*; how: "native", in the device's
        driver, or "generic". Raises `UsageError`."""
        try:
            index = socket.if_nametoindex(interface)
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"--interface {interface}: expected one of this machine's: {names}"
            ) from None
        attach, how = self.objects.attach, "native"
        try:
            self._links.append(attach("answer", index, libbpf.TCX_INGRESS))
            try:
                self._links.append(attach("receive", index, libbpf.XDP, libbpf.NATIVE))
            except libbpf.BpfError as error:
                if error.errno not in _NOT_IN_THE_DRIVER:
                    raise
                how = "generic"
                self._links.append(attach("receive", index, libbpf.XDP, libbpf.GENERIC))
        except libbpf.BpfError as error:
            self.detach()
            raise _refused(error, interface) from None
        return how

    def detach(self) -> None:
        """Let the interface be as it was."""
        for link in self._links:
            with contextlib.suppress(OSError):
                os.close(link)
        self._links.clear()

    def close(self) -> None:
        """Detach, and let go of everything."""
        self.detach()
        self.objects.close()

    # ---- jobs ----

    def place(
        self, job: Job, workers: Mapping[int, Address], agents: Iterable[Address]
    ) -> None:
        """The job is here, with those of its *workers* that have registered, and sums that
        leave the rack go to *agents* in turn; again, when there is more to know."""
        value = np.zeros((), job_type(self._elements))
        known = job.number in self._serials
        if not known:
            self._begun += 1
            self._serials[job.number] = self._begun
        value["serial"] = self._serials[job.number]
        value["all"] = all_bits(job.terms.workers)
        value["first"], value["slots"] = job.lease.start, len(job.lease)
        value["elements"] = job.terms.elements
        value["key"] = np.frombuffer(job.seal.last_key, np.uint8)
        value["multipliers"] = job.seal.multipliers(HEADER_WORDS + room(self._elements))
        for worker, address in workers.items():
            value["workers"][worker] = _end(address)
        if known:
            value["workers"]["mac"] = self._jobs.read(job.number)[0]["workers"]["mac"]
        ends = [_end(address) for address in agents][:MOST_WORKERS]
        value["agents"] = len(ends)
        value["next"][: len(ends)] = ends
        self._jobs[job.number] = value

    def forget(self, job: Job) -> None:
        """The job is over: its datagrams are strangers' from now on."""
        if self._serials.pop(job.number, None) is not None:
            del self._jobs[job.number]

    def serial(self, job: Job) -> int:
        """How many jobs have been here, when it came."""
        return self._serials[job.number]

    def counts(self) -> Counter[str]:
        """What the programs have counted, by word."""
        found: Counter[str] = Counter()
        for place, word in enumerate(COUNTS):
            number = int(self._counts.read(place, self._processors).sum())
            if number:
                found[word] = number
        return found

    def nanoseconds(self) -> dict[str, tuple[int, int]]:
        """By program: for how long it has run, and how often. Only while the kernel measures
        that: ``sysctl kernel.bpf_stats_enabled=1``."""
        return {
            program: _run_time(self.objects.program(program))
            for program in ("receive", "answer")
        }


def _end(address: Address) -> Array:
    end = np.zeros((), END)
    end["address"], end["port"] = _number(address[0]), address[1]
    return end


def _number(host: str) -> int:
    return int.from_bytes(socket.inet_aton(host), "big")


def _run_time(program: int) -> tuple[int, int]:
    with open(f"/proc/self/fdinfo/{program}") as lines:
        known = dict(line.split(":", 1) for line in lines)
    return int(known["run_time_ns"]), int(known["run_cnt"])


def _refused(error: libbpf.BpfError, interface: str = "") -> UsageError:
    what = f" at {interface}" if interface else ""
    if error.errno in (errno.EPERM, errno.EACCES) and not error.log:
        return UsageError(
            f"--path xdp{what}: the kernel does not allow this ({error}): run it as root, or with "
            f"CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON{OTHERWISE}"
        )
    if error.errno in (errno.EBUSY, errno.EEXIST):
        return UsageError(
            f"--path xdp{what}: another XDP program is there already (ip link show){OTHERWISE}"
        )
    said = (
        f"; the verifier's last words: {error.log.strip()[-500:]}" if error.log else ""
    )
    return UsageError(
        f"--path xdp{what}: {error}. It needs Linux 6.6 with BPF, and an interface whose MTU is "
        f"not above 3498{OTHERWISE}{said}"
    )
