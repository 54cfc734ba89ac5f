"""The kernel's programs, compiled where they are needed: once for each size of datagrams.

What is compiled lies in a cache folder (``$XDG_CACHE_HOME/paceline``), named after all that it was
made of.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.errors import UsageError

SOURCE = Path(__file__).parent
MAIN = "aggregate.bpf.c"
OTHERWISE = "; --path sockets works everywhere"
_INSTALL = (
    "install clang and libbpf with its headers (Debian and Ubuntu: apt install clang "
    "libbpf-dev; Fedora: dnf install clang libbpf-devel)"
)


def compiled(elements: int) -> Path:
    """The object file for datagrams of at most so many *elements*. Raises `UsageError`."""
    clang = shutil.which("clang")
    if clang is None:
        raise UsageError(f"--path xdp needs clang: {_INSTALL}{OTHERWISE}")
    machine = platform.machine()
    words = [
        *(clang, "-O2", "-g", "-target", "bpf", "-mcpu=v3", f"-DELEMENTS={elements}"),
        *("-Wall", "-Werror", "-Wno-address-of-packed-member"),
        f"-I/usr/include/{machine}-linux-gnu",  # where Debian has asm/types.h
        *("-c", str(SOURCE / MAIN)),
    ]
    made_of = hashlib.sha256("\0".join(words).encode())
    for part in sorted(SOURCE.glob("*.[ch]")):
        made_of.update(part.read_bytes())
    made_of.update(_said([clang, "--version"]).encode())
    folder = _cache()
    found = folder / f"xdp-{made_of.hexdigest()[:24]}.o"
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            made = Path(beside, "made.o")
            _said([*words, "-o", str(made)])
            made.replace(found)  # whole, or not at all
    return found


def missing_library(error: OSError) -> UsageError:
    """What to say where libbpf cannot be loaded."""
    return UsageError(f"--path xdp needs libbpf 1.0 ({error}): {_INSTALL}{OTHERWISE}")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def _said(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(
            f"clang could not compile the kernel's programs; {_INSTALL}{OTHERWISE}. It said:\n"
            f"{done.stderr[-2000:]}"
        )
    return done.stdout
