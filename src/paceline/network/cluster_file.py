"""Clusters as people write them: a TOML file, or a few words.

::

    [[rack]]
    workers = 4
    link = "1 Gbit/s"       # goodput of each host's link, each direction
    latency = "50 us"       # one way, host to host in the rack
    uplink = "400 Mbit/s"   # rack to core, each direction; left out: never the limit
    speed = [1, 1, 1, 0.5]  # relative compute speed of each worker; left out: all 1
    workers_per_host = 1    # workers that share a host and its link

What happens during a run is written as ``[[rule]]`` tables: see `paceline.network.rules`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import ClusterError, UsageError, unknown
from paceline.network.cluster import Cluster, Rack
from paceline.network.rules import ACTIONS, Rule


def uniform_cluster(workers: int, link: str, latency: str) -> Cluster:
    """The short form: one rack of equal hosts. *link* and *latency* carry units."""
    table = {"workers": workers, "link": link, "latency": latency}
    return Cluster((_rack(table, "the short form"),))


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    Raises `ClusterError`, naming the file, the key, the value and what is allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read the cluster file {path}: {error}") from error
    try:
        return parse_cluster(text)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def parse_cluster(text: str) -> Cluster:
    """Read a cluster from TOML text; raises `ClusterError` as `load_cluster` does."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"not TOML: {error}") from error
    for key in data:
        if key not in ("rack", "rule"):
            raise ClusterError(unknown("top-level key", key, ["rack", "rule"]))
    racks = [_rack(t, f"rack {i}") for i, t in enumerate(_tables(data, "rack"))]
    rules = [_rule(t, f"rule {i}") for i, t in enumerate(_tables(data, "rule"))]
    return Cluster(tuple(racks), tuple(rules))


def _tables(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    tables = data.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ClusterError(
            f"key {key!r}: expected [[{key}]] tables (two brackets), "
            f"got {type(tables).__name__}"
        )
    return tables


def _rule(table: Mapping[str, Any], where: str) -> Rule:
    readers: dict[str, Callable[[str, object], Any]] = {
        "at": _time,
        "step": _whole,
        "rate": _rate,
        "throttle": _text,
        "cut": _text,
        "repair": _text,
        "kill": _whole,
    }
    try:
        for key in table:
            if key not in readers:
                raise ClusterError(unknown("key", key, readers))
        values = {key: readers[key](key, value) for key, value in table.items()}
        actions = [action for action in ACTIONS if action in values]
        if len(actions) != 1:
            raise ClusterError(
                f"expected one of {', '.join(ACTIONS)}, got "
                + (" and ".join(actions) or "none")
            )
        return Rule(action=actions[0], target=values.pop(actions[0]), **values)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def _rack(table: Mapping[str, Any], where: str) -> Rack:
    readers: dict[str, Callable[[str, object], Any]] = {
        "workers": _whole,
        "link": _rate,
        "latency": _time,
        "uplink": _rate,
        "uplink_latency": _time,
        "speed": _factors,
        "cores": _whole,
        "workers_per_host": _whole,
    }
    try:
        for key in table:
            if key not in readers:
                raise ClusterError(unknown("key", key, readers))
        for key in ("workers", "link", "latency"):
            if key not in table:
                raise ClusterError(f"key {key!r} is missing")
        return Rack(**{key: readers[key](key, value) for key, value in table.items()})
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ClusterError(f"key {key!r}: expected a whole number, got {value!r}")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ClusterError(f"key {key!r}: expected text in quotes, got {value!r}")
    return value


def _rate(key: str, value: object) -> float:
    return _quantity(key, value, units.bytes_per_second, "a rate", "1 Gbit/s")


def _time(key: str, value: object) -> float:
    return _quantity(key, value, units.seconds, "a time", "50 us")


def _quantity(key: str, value: object, parse: Any, what: str, example: str) -> float:
    if not isinstance(value, str):
        raise ClusterError(
            f"key {key!r}: expected {what} with its unit in quotes, such as "
            f'"{example}", got {value!r}'
        )
    try:
        number: float = parse(value)
    except UsageError as error:
        raise ClusterError(f"key {key!r}: {error}") from None
    return number


def _factors(key: str, value: object) -> tuple[float, ...]:
    if not (isinstance(value, list) and value) or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in value
    ):
        raise ClusterError(
            f"key {key!r}: expected a list of numbers, one per worker, got {value!r}"
        )
    return tuple(float(v) for v in value)
