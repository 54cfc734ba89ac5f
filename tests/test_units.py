"""Quantities: what people write, and what they read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import units
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 s", 1.0),
        ("50us", 50e-6),
        ("50 us", 50e-6),
        (" 50  µs ", 50e-6),
        ("2.5 ms", 2.5e-3),
        (".5 ms", 0.5e-3),
        ("3. ns", 3e-9),
        ("2 min", 120.0),
        ("1e-3 s", 1e-3),
        ("+1 s", 1.0),
        ("-1 s", -1.0),  # whether a sign makes sense is for whoever asked
        ("0 s", 0.0),
    ],
)
def test_seconds(text: str, expected: float) -> None:
    assert units.seconds(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8 bit/s", 1),
        ("8 kbit/s", 1e3),
        ("1 Gbit/s", 125e6),
        ("1gbit", 125e6),
        ("1 GBit", 125e6),
        ("100 Mbitps", 12.5e6),
        ("100 mbit/s", 12.5e6),
        ("1 Tbit/s", 125e9),
        ("125 MB/s", 125e6),
        ("125 MiB/s", 125 * 1024**2),
        ("7 B/s", 7),
        ("8 bps", 1),
        ("8 kbps", 1e3),
        ("100 Mbps", 12.5e6),
        ("100mbps", 12.5e6),
        ("1 Gbps", 125e6),
        ("1Tbps", 125e9),
        ("125 MBps", 125e6),
        ("1 GBps", 1e9),
        ("8 kBps", 8e3),
    ],
)
def test_bytes_per_second(text: str, expected: float) -> None:
    assert units.bytes_per_second(text) == expected


@pytest.mark.parametrize(
    ("parse", "text", "allowed"),
    [
        (units.seconds, "50", "ns"),
        (units.seconds, "50 Us", "us"),
        (units.seconds, "50 us ago", "a number and a unit"),
        (units.seconds, "soon", "a number and a unit"),
        (units.seconds, "", "a number and a unit"),
        (units.seconds, "1_000 us", "us"),
        (units.seconds, "1e999 s", "finite"),
        (units.seconds, "nan s", "a number and a unit"),
        (units.bytes_per_second, "100", "Mbit/s"),
        (units.bytes_per_second, "100 MB", "MB/s"),
        (units.bytes_per_second, "100 mb/s", "MB/s"),
        (units.bytes_per_second, "1 Gb", "Gbit/s"),
        (units.bytes_per_second, "1 GBph", "Gbit/s"),
        (units.bytes_per_second, "1 Gbit/h", "Gbit/s"),
        (units.bytes_per_second, "inf Gbit/s", "a number and a unit"),
    ],
)
def test_refused_text_is_quoted_with_what_is_allowed(parse, text, allowed) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert repr(text) in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.show_rate, 125e6, "1 Gbit/s"),
        (units.show_rate, 12.5e6, "100 Mbit/s"),
        (units.show_rate, 125e3, "1 Mbit/s"),
        (units.show_rate, 1e3, "8 kbit/s"),
        (units.show_rate, 1, "8 bit/s"),
        (units.show_rate, 0, "0 bit/s"),
        (units.show_seconds, 1.5, "1.5 s"),
        (units.show_seconds, 0.25, "250 ms"),
        (units.show_seconds, 50e-6, "50 us"),
        (units.show_seconds, -0.25, "-250 ms"),
        (units.show_seconds, 3e-9, "3e-09 s"),
        (units.show_seconds, 0.0, "0 s"),
        (units.show_seconds, 0.34854, "349 ms"),
        (units.show_seconds, 0.99964, "1 s"),
        (units.show_seconds, 4321.0, "4320 s"),
        (units.show_age, 59.9, "less than a minute"),
        (units.show_age, 60, "1 minute"),
        (units.show_age, 7200, "2 hours"),
        (units.show_age, 90000, "1 day"),
        (units.show_bytes, 2.5e9, "2.5 GB"),
        (units.show_bytes, 2e6, "2 MB"),
        (units.show_bytes, 1500, "1.5 kB"),
        (units.show_bytes, 12, "12 B"),
        (units.show_bytes, 0, "0 B"),
        (units.show_bytes, 1058740, "1.06 MB"),
    ],
)
def test_show(show, value: float, text: str) -> None:
    assert show(value) == text


def test_show_count() -> None:
    shown = [units.show_count(number, "worker") for number in (0, 1, 2)]
    assert shown == ["0 workers", "1 worker", "2 workers"]


@given(st.floats(min_value=1e-6, max_value=1e15))
def test_what_is_shown_can_be_read_back(value: float) -> None:
    for show, parse, digits in (
        (units.show_rate, units.bytes_per_second, 6),
        (units.show_seconds, units.seconds, 3),
        (units.show_bytes, lambda text: units.bytes_per_second(f"{text}/s"), 3),
    ):
        assert parse(show(value)) == pytest.approx(value, rel=10.0 ** (1 - digits))
