"""Calculates how many hosts this machine's memory can hold."""

from __future__ import annotations

from pathlib import Path

from paceline import units
from paceline.runtimes.emulated.errors import EmulationError

HOST_BYTES = 400_000
"""Kernel memory of a host: a network namespace, its veth pair and its queues (measured: 300 kB)."""
NEIGHBOUR_BYTES = 600
"""Memory of each host's neighbour entry for each other host."""
WORKER_BYTES = 250_000_000
"""Memory of a worker that has imported torch, without its model (measured)."""


def available() -> int:
    """Return the bytes that new processes may take, by the kernel or the container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    table = dict(line.split(":") for line in lines)
    free = int(table["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        # There is no limit, or none that is visible.
        return free
    return min(free, max(0, limit - used))


def needed(hosts: int, processes: int, process_bytes: int) -> int:
    """Return the bytes of *hosts* hosts and *processes* processes of *process_bytes* in them."""
    network = hosts * (HOST_BYTES + NEIGHBOUR_BYTES * (hosts - 1))
    return network + processes * process_bytes


def most_hosts(free: int, process_bytes: int) -> int:
    """Return the largest number of hosts that *free* bytes hold, with a process in each."""
    hosts = free // (HOST_BYTES + process_bytes)
    while hosts and needed(hosts, hosts, process_bytes) > free:
        hosts -= 1
    return hosts


def check(hosts: int, processes: int, process_bytes: int) -> None:
    """Raise `EmulationError` if this machine's memory cannot hold so many hosts and processes."""
    free = available()
    need = needed(hosts, processes, process_bytes)
    if need > free:
        raise EmulationError(
            f"expected a cluster that fits into memory: {hosts} hosts with {processes} "
            f"processes of {units.show_bytes(process_bytes)} need "
            f"{units.show_bytes(need)}, and {units.show_bytes(free)} are free, enough for "
            f"{most_hosts(free, process_bytes)} hosts. Use fewer, or the simulated runtime, "
            "which holds thousands"
        )
