"""Reads and writes clusters: a TOML file, or a few arguments.

::

    [[rack]]
    workers = 4
    link = "1 Gbit/s"
    latency = "50 us"

    [[rule]]                # an event of a link or a worker during a run
    [[server]]              # a dedicated host for a parameter server
    [processor]             # the processor time of messages

``docs/reference/cluster-file.md`` describes every key.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline import units
from paceline.cluster.cluster import ACTIONS, Cluster, Processor, Rack, Rule, ServerHost
from paceline.errors import ClusterError, UsageError, unknown

T = TypeVar("T")


def uniform_cluster(workers: int, link: str, latency: str, servers: int = 0) -> Cluster:
    """Return a cluster of one rack with equal hosts.

    Args:
        workers: Workers, one on each host.
        link: Goodput of a host's link, with its unit: ``"1 Gbit/s"``.
        latency: One-way latency between two hosts, with its unit: ``"50 us"``.
        servers: More hosts, for parameter servers.

    Raises:
        ClusterError: A value is out of range, or lacks its unit.

    Example:
        ::

            cluster = uniform_cluster(8, "1 Gbit/s", "50 us")
    """
    table = {"workers": workers, "link": link, "latency": latency}
    rack = _read(Rack, table, "the short form")
    return Cluster((rack,), servers=(ServerHost(),) * servers)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    docs/reference/cluster-file.md has its keys.

    Args:
        path: The file.

    Raises:
        ClusterError: The file cannot be read, or describes no cluster. The message names the file, the
            key, the value and the values that are allowed.

    Example:
        ::

            cluster = load_cluster("cluster.toml")
            print(cluster.workers)
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
    """Read a cluster from TOML text.

    Args:
        text: The text of a cluster file.

    Raises:
        ClusterError: It describes no cluster. The message names the key, the value and the values that
            are allowed.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"not TOML: {error}") from error
    for key in data:
        if key not in TABLE_KEYS:
            raise ClusterError(unknown("top-level key", key, TABLE_KEYS))
    processor = None
    if "processor" in data:
        processor = _read(Processor, data["processor"], "processor")
    return Cluster(
        tuple(_read_all(Rack, data, "rack")),
        tuple(_read_all(_rule, data, "rule")),
        processor,
        tuple(_read_all(ServerHost, data, "server")),
    )


def _read_all(make: Callable[..., T], data: Mapping[str, Any], key: str) -> list[T]:
    """Read all ``[[key]]`` tables by *make*."""
    tables = data.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ClusterError(
            f"key {key!r}: expected [[{key}]] tables (two brackets), "
            f"got {type(tables).__name__}"
        )
    return [_read(make, table, f"{key} {i}") for i, table in enumerate(tables)]


def _read(make: Callable[..., T], table: object, where: str) -> T:
    """Read one table by *make*. Raises `ClusterError`, whose message names the table (*where*)."""
    readers = _READERS[make]
    try:
        if not isinstance(table, dict):
            raise ClusterError(
                f"expected a [{where}] table, got {type(table).__name__}"
            )
        for key in table:
            if key not in readers:
                raise ClusterError(unknown("key", key, readers))
        for key in _REQUIRED.get(make, ()):
            if key not in table:
                raise ClusterError(f"key {key!r} is missing")
        return make(**{key: readers[key](key, value) for key, value in table.items()})
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def _rule(**values: Any) -> Rule:
    actions = [action for action in ACTIONS if action in values]
    if len(actions) != 1:
        raise ClusterError(
            f"expected one of {', '.join(ACTIONS)}, got "
            + (" and ".join(actions) or "none")
        )
    return Rule(action=actions[0], target=values.pop(actions[0]), **values)


# ---- values ----


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ClusterError(f"key {key!r}: expected a whole number, got {value!r}")
    return value


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ClusterError(f"key {key!r}: expected true or false, got {value!r}")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ClusterError(f"key {key!r}: expected text in quotes, got {value!r}")
    return value


def _rate(key: str, value: object) -> float:
    return _quantity(key, value, units.bytes_per_second, "a rate", "1 Gbit/s")


def _rates(key: str, value: object) -> float | tuple[float, ...]:
    if isinstance(value, list):
        return tuple(_rate(key, one) for one in value)
    return _rate(key, value)


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


def _texts(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ClusterError(
            f"key {key!r}: expected a list of names in quotes, one per host, got {value!r}"
        )
    return tuple(value)


def _group(key: str, value: object) -> str | tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ClusterError(
            f"key {key!r}: expected a name in quotes, or a list of them, one per worker, got "
            f"{value!r}"
        )
    return tuple(value) if isinstance(value, list) else str(value)


_READERS: dict[Callable[..., object], dict[str, Callable[[str, object], Any]]] = {
    Rack: {
        "workers": _whole,
        "link": _rates,
        "latency": _time,
        "uplink": _rate,
        "uplink_latency": _time,
        "speed": _factors,
        "cores": _whole,
        "workers_per_host": _whole,
        "names": _texts,
        "group": _group,
        "burst": _time,
        "aggregates": _flag,
        "aggregation_rate": _rate,
        "slots": _whole,
    },
    Processor: {
        "message": _time,
        "message_while_computing": _time,
        "byte": _time,
        "cores": _whole,
    },
    ServerHost: {"rack": _whole, "link": _rate},
    _rule: {
        "at": _time,
        "step": _whole,
        "rate": _rate,
        "throttle": _text,
        "cut": _text,
        "repair": _text,
        "kill": _whole,
    },
}
"""For each kind of table: its keys, and the functions that read their values."""
_REQUIRED: dict[Callable[..., object], tuple[str, ...]] = {
    Rack: ("workers", "link", "latency")
}

TABLE_KEYS = {
    name: tuple(_READERS[make])
    for name, make in (
        ("rack", Rack),
        ("processor", Processor),
        ("server", ServerHost),
        ("rule", _rule),
    )
}
"""For each name of a table: the keys that it may have."""


# ---- writing ----


def cluster_toml(cluster: Cluster, comment: str = "", *, exact: bool = False) -> str:
    """Return *cluster* as text that `parse_cluster` reads; *comment* goes above it.

    *exact*: write numbers to the last bit, for programs.
    """
    rate_text = _exact_rate if exact else _short_rate
    time_text = _exact_time if exact else _short_time
    digits = ".17g" if exact else ".4g"
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for rack in cluster.racks:
        lines += ["", "[[rack]]", *_rack_lines(rack, rate_text, time_text, digits)]
    if cluster.processor is not None:
        lines += ["", "[processor]"]
        lines.append(f"message = {_quoted(time_text(cluster.processor.message))}")
        if cluster.processor.message_while_computing is not None:
            busy = _quoted(time_text(cluster.processor.message_while_computing))
            lines.append(f"message_while_computing = {busy}")
        lines.append(f"byte = {_quoted(time_text(cluster.processor.byte))}")
        if cluster.processor.cores is not None:
            lines.append(f"cores = {cluster.processor.cores}")
    for server in cluster.servers:
        lines += ["", "[[server]]", f"rack = {server.rack}"]
        if server.link is not None:
            lines.append(f"link = {_quoted(rate_text(server.link))}")
    for rule in cluster.rules:
        target = rule.target if isinstance(rule.target, int) else _quoted(rule.target)
        lines += ["", "[[rule]]", f"{rule.action} = {target}"]
        if rule.rate is not None:
            lines.append(f"rate = {_quoted(rate_text(rule.rate))}")
        if rule.at is not None:
            lines.append(f"at = {_quoted(time_text(rule.at))}")
        else:
            lines.append(f"step = {rule.step}")
    return "\n".join(lines).strip() + "\n"


def _rack_lines(
    rack: Rack,
    rate_text: Callable[[float], str],
    time_text: Callable[[float], str],
    digits: str,
) -> list[str]:
    same = len(set(rack.links)) == 1
    rates = [_quoted(rate_text(rate)) for rate in rack.links]
    lines = [
        f"workers = {rack.workers}",
        f"link = {rates[0] if same else '[' + ', '.join(rates) + ']'}",
        f"latency = {_quoted(time_text(rack.latency))}",
    ]
    if rack.uplink is not None:
        lines.append(f"uplink = {_quoted(rate_text(rack.uplink))}")
    if rack.uplink_latency:
        lines.append(f"uplink_latency = {_quoted(time_text(rack.uplink_latency))}")
    if set(rack.speed) != {1.0}:
        lines.append(f"speed = [{', '.join(f'{s:{digits}}' for s in rack.speed)}]")
    if rack.cores != 1:
        lines.append(f"cores = {rack.cores}")
    if rack.workers_per_host != 1:
        lines.append(f"workers_per_host = {rack.workers_per_host}")
    if rack.names:
        lines.append(f"names = [{', '.join(map(_quoted, rack.names))}]")
    if any(rack.groups):
        groups = [_quoted(name) for name in rack.groups]
        same = len(set(groups)) == 1
        lines.append(f"group = {groups[0] if same else '[' + ', '.join(groups) + ']'}")
    if rack.burst:
        lines.append(f"burst = {_quoted(time_text(rack.burst))}")
    if rack.aggregates:
        lines.append("aggregates = true")
    if rack.aggregation_rate is not None:
        rate = rate_text(rack.aggregation_rate)
        lines.append(f"aggregation_rate = {_quoted(rate)}")
    if rack.slots is not None:
        lines.append(f"slots = {rack.slots}")
    return lines


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML quotes strings like JSON


def _short_rate(rate: float) -> str:
    return f"{8 * rate / 1e6:.6g} Mbit/s"


def _short_time(seconds: float) -> str:
    return f"{1e6 * seconds:.6g} us"


def _exact_rate(rate: float) -> str:
    return f"{rate:.17g} B/s"


def _exact_time(seconds: float) -> str:
    return f"{seconds:.17g} s"
