"""What the tests of the emulated runtime share."""

import os
import select
from pathlib import Path

from tests.support.hanging import SECONDS


def descendants(pid):
    """The processes that descend from one, orphans of a keeper included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended meanwhile
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, front = set(), {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front}
        found |= front
    return found


def parent_of(pid):
    """The process that it is a child of."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def network_of(pid):
    """The network namespace a process is in."""
    return os.readlink(f"/proc/{pid}/ns/net")


def networks():
    """All network namespaces that a process is in."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.add(network_of(entry.name))
            except OSError:
                continue
    return found


class Watch:
    """Waits for the ends of processes that are not our children."""

    def __init__(self, pids):
        self._descriptors = [os.pidfd_open(pid) for pid in pids]

    def wait(self):
        """Returns when all have ended; fails after `SECONDS`."""
        for descriptor in self._descriptors:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(SECONDS * 1000), "a process is left"
            os.close(descriptor)


def connect(network, source, destination, seconds=SECONDS):
    """A connection between two hosts: both ends."""
    address = network.hosts[destination].address
    with network.socket(destination) as listener:
        listener.bind((address, 0))
        listener.listen(1)
        listener.settimeout(seconds)
        sender = network.socket(source)
        try:
            sender.settimeout(seconds)
            sender.connect((address, listener.getsockname()[1]))
            receiver, _ = listener.accept()
        except BaseException:
            sender.close()
            raise
    receiver.settimeout(seconds)
    return sender, receiver
