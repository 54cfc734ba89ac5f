"""``paceline check``: the features that this machine can emulate, and how to get the others."""

from __future__ import annotations

import sys

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.cli import options as o
from paceline.runtimes.emulated.machine_check import Capabilities, capabilities


def check(json: o.Json = False) -> None:
    """Show what this machine can emulate.

    The exit status is 1 where it can emulate nothing.
    """
    found = capabilities()
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found)
    if not found.enough:
        sys.exit(1)


def _print(found: Capabilities) -> None:
    table = Table(title=f"an emulated cluster here: as {found.mode or 'nobody'}")
    for heading in ("what", "what for", "here", "how to get it"):
        table.add_column(heading, overflow="fold")
    for item in found.items:
        here = "yes" if item.present else "NO" if item.required else "no"
        table.add_row(item.name, item.purpose, here, item.remedy)
    Console().print(table)
    print(f"memory for about {found.hosts} hosts with a worker each")
