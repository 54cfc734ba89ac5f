"""Quantities as people write them: ``"1 Gbit/s"``, ``"50 us"``, ``"8 MiB"``.

Inside paceline times are seconds, sizes bytes and rates bytes per second; this file is
the only place where other units exist.
"""

from __future__ import annotations

import math
import re

from paceline.errors import UsageError

_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
_SIZES = {
    "B": 1.0,
    "kB": 1e3,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(
            f"expected a {what} such as {example!r}, got {text!r}: "
            "write a number and a unit"
        )
    number = float(match[1])
    if not math.isfinite(number):
        raise UsageError(f"expected a finite {what}, got {text!r}")
    return number, match[2]


def seconds(text: str) -> float:
    """Parse a time, in seconds. ``"50us"`` and ``"50 us"`` are the same."""
    number, unit = _split(text, "time", "50 us")
    if unit not in _TIMES:
        raise UsageError(
            f"expected a time such as '50 us', got {text!r}: "
            f"the unit is one of {', '.join(_TIMES)}"
        )
    return number * _TIMES[unit]


def size(text: str) -> int:
    """Parse a size, in bytes: ``"256 MB"``, ``"8MiB"``."""
    number, unit = _split(text, "size", "256 MB")
    if unit not in _SIZES or number < 0:
        raise UsageError(
            f"expected a size such as '256 MB', got {text!r}: "
            f"the unit is one of {', '.join(_SIZES)}"
        )
    return round(number * _SIZES[unit])


def bytes_per_second(text: str) -> float:
    """Parse a rate, in bytes per second: ``"1 Gbit/s"``, ``"1gbit"``, ``"1 Gbps"``, ``"125 MB/s"``.

    The letter's case tells bits from bytes (``Mbps`` is bits, ``MBps`` and ``MB/s`` are bytes) and otherwise
    does not matter: people write Gbit, gbit and GBit. What ``mb/s`` means nobody knows.
    """
    number, unit = _split(text, "rate", "1 Gbit/s")
    stem = unit.removesuffix("/s").removesuffix("ps")
    bits = f"{stem}it" if unit.endswith("bps") else stem
    if bits.lower() in _BITS:
        return number * _BITS[bits.lower()] / 8
    if stem != unit and stem in _SIZES:
        return number * _SIZES[stem]
    raise UsageError(
        f"expected a rate such as '1 Gbit/s', got {text!r}: the unit is one of "
        "bit/s, kbit/s, Mbit/s, Gbit/s (or bps, kbps, Mbps, Gbps), or in bytes B/s, kB/s, MB/s, "
        "GB/s (or Bps, kBps, MBps, GBps)"
    )


def show_rate(rate: float) -> str:
    """A rate in bytes per second, as people write it."""
    bits = rate * 8
    for name, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:g} {name}"
    return f"{bits:g} bit/s"


def show_seconds(value: float) -> str:
    """A time in seconds, as people write it: three significant digits."""
    value = _three_digits(value)
    for name, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size:
            return f"{_three_digits(value / size):g} {name}"
    return f"{value:g} s" if value else "0 s"


def show_age(seconds: float) -> str:
    """How long ago something was, in its largest unit: ``"3 hours"``."""
    for name, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // size)
        if count:
            return show_count(count, name)
    return "less than a minute"


def show_bytes(value: float) -> str:
    """A size in bytes, as people write it: three significant digits."""
    value = _three_digits(value)
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{_three_digits(value / size):g} {name}"
    return f"{value:g} B"


def show_count(number: int, noun: str) -> str:
    """A number of things: ``"1 worker"``, ``"2 workers"``."""
    return f"{number} {noun}" + "s" * (number != 1)


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
