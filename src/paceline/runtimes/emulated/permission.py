"""Finds out which permission is missing, and how to get it."""

from __future__ import annotations

import os
from pathlib import Path

_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user/max_user_namespaces", "0", "10000"),
    ("user/max_net_namespaces", "0", "10000"),
)
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def how_to_get_permission(refusal: str) -> str:
    """Return the message for a user who may not make namespaces; *refusal* is the kernel's error."""
    who = "root without CAP_SYS_ADMIN" if os.geteuid() == 0 else f"user {os.geteuid()}"
    return (
        "expected the right to make network namespaces (an emulated cluster is made of "
        f"them), but {who} was refused: {refusal}. One of these helps: "
        + "; ".join(remedies(Path("/proc/sys"), _in_container()))
    )


def remedies(switches: Path, in_container: bool) -> list[str]:
    """Return the remedies on this machine, most likely first; *switches* is /proc/sys."""
    found = []
    for name, bad, good in _SWITCHES:
        try:
            value = (switches / name).read_text().strip()
        except OSError:
            # This kernel has no such switch.
            continue
        if value == bad:
            dotted = name.replace("/", ".")
            found.append(f"allow user namespaces: sudo sysctl -w {dotted}={good}")
    if in_container:
        found.append(
            "start the container with docker run --cap-add NET_ADMIN --cap-add SYS_ADMIN "
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        )
    if os.geteuid() != 0:
        found.append("run the command as root (sudo)")
    return found or ["ask the machine's administrator for CAP_SYS_ADMIN"]


def _in_container() -> bool:
    return any(Path(mark).exists() for mark in _CONTAINER_MARKS)
