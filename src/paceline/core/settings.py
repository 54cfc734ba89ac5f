"""The settings that all methods share, and the spec of both: `Settings`, `parse_method`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from paceline import compression, methods, spec
from paceline.bucketing.rules import RULES, check_rule
from paceline.collectives import registry as collectives
from paceline.compression import COMPRESSORS, GradientCompression
from paceline.errors import UsageError, unknown
from paceline.interfaces import Method
from paceline.interfaces.server_messages import Replies
from paceline.optim.clipping import check_clip_norm

ModuleBuffers = Literal["rank0", "local"]
"""The worker whose values the model's buffers (BatchNorm's statistics) get once a step."""

UNSET = GradientCompression()
"""The compression if the user names none. A method's default replaces only this object."""

PLACES = ("auto", "embedded", "per-node", "dedicated")
"""Places of servers, besides addresses."""

_ADDRESS = re.compile(r"[^:+\s]+:[0-9]+")

KEY_VALUES: Sequence[tuple[str, str, Collection[str]]] = (
    ("compression", "compressor", COMPRESSORS),
    ("collective", "collective", collectives.COLLECTIVES),
    ("buckets", "bucket rule", RULES),
)
"""Keys of all methods, the nouns for their values, and the known values."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `distribute` that all methods share, and that specs can name.

    Attributes:
        buckets: Rule that assigns gradients to buckets (`paceline.bucketing.rules`), or bucket lengths in
            tensors, such as ``3+5+2``.
        buffers: ``rank0``: once a step every rank takes rank 0's buffers, as under DDP. ``local``: each rank
            keeps its own.
        check_finite: Raise `GradientError`, which names the parameter, if a mean gradient is not finite. Not for
            scripts with a GradScaler, which expects such gradients.
        collective: All-reduce algorithm of averages (`paceline.collectives`).
        servers: Place of the servers. ``embedded``: beside rank 0. ``per-node``: one on each node.
            ``dedicated``: on hosts of their own. ``auto``: ``dedicated`` if the cluster has hosts for servers, else ``embedded``. Or
            addresses ``HOST:PORT`` joined by ``+``.
        clip_norm: Largest norm of a gradient. The method decides whether this limits the mean or each worker's own gradient.
        replies: Reply of a server to a compressed push: the parameters (``full``), or a compressed difference
            from the worker's parameters (``deltas``). For ``deltas`` a server keeps a copy of the model for each
            worker.
        compression: Compressor of the gradients, pushes or parameter changes that the method sends. `UNSET` is the
            method's default.

    Raises:
        UsageError: A value is unknown or out of range.
    """

    buckets: str = "optimal"
    buffers: ModuleBuffers = "rank0"
    check_finite: bool = False
    collective: str = "native"
    servers: str = "auto"
    clip_norm: float = math.inf
    replies: Replies = "full"
    compression: GradientCompression = UNSET

    def __post_init__(self) -> None:
        """Check the values."""
        check_rule(self.buckets)
        check_clip_norm(self.clip_norm)
        for key, choices in (
            ("buffers", ModuleBuffers),
            ("replies", Replies),
        ):
            value = str(getattr(self, key))
            if value not in get_args(choices):
                raise UsageError(unknown(f"value for {key}", value, get_args(choices)))
        if self.servers not in PLACES and not all(
            _ADDRESS.fullmatch(address) for address in self.servers.split("+")
        ):
            raise UsageError(
                f"servers: expected {', '.join(PLACES)}, or addresses HOST:PORT joined by "
                f"'+', got {self.servers!r}"
            )

    @property
    def use_gradients(self) -> bool:
        """Whether training itself reads all means at the end of backward."""
        return self.check_finite or self.clip_norm < math.inf

    def changed_by(self, keys: Mapping[str, str]) -> Settings:
        """Return a copy with the values that a spec's *keys* name.

        Raises:
            UsageError: A key is unknown; the message lists the known ones.
        """
        chosen, rest = spec.nested("compression", keys)
        known = set(spec.field_types(Settings))
        for key in rest:
            if key not in known:
                raise UsageError(unknown("key", key, known))
        settings = replace(self, **spec.convert_fields(Settings, rest))
        if chosen is None:
            return settings
        return replace(settings, compression=compression.make(chosen))

    def as_keys(self, default: GradientCompression = UNSET) -> dict[str, str]:
        """Return the keys of a full spec: buckets, compression, and what differs from its default.

        *default* is the method's default compression.
        """
        keys = {"buckets": self.buckets} | self.changed_keys(default)
        return keys | compression.keys_of(self.compression)

    def changed_keys(self, default: GradientCompression = UNSET) -> dict[str, str]:
        """Return the keys whose values differ from their defaults."""
        keys = spec.changed(self)
        keys.pop("compression", None)  # compression has keys of its own
        if self.compression == default:
            return keys
        return keys | (compression.keys_of(self.compression) or {"compression": "none"})


def parse_method(
    text: str, settings: Settings | None = None
) -> tuple[Method, Settings]:
    """The method and the settings of a spec, such as ``"bsp:buckets=wfbp"``.

    Args:
        text: The spec.
        settings: Values of the keys that the spec does not name.

    Raises:
        UsageError: A name, key or value is unknown (the message lists the known ones), or a key
            does not apply to the method.
    """
    read = spec.parse(text)
    if read.name not in methods.METHODS:
        for key, kind, known in KEY_VALUES:
            if read.name in known:
                raise UsageError(
                    f"{read.name} is a {kind}, not a method: bsp:{key}={read.name}"
                )
    method, rest = methods.make(read, set(spec.field_types(Settings)))
    settings = (settings or Settings()).changed_by(rest)
    method, settings = reconcile(method, settings)
    collectives.make(settings.collective)
    _check_keys_apply(method, settings, rest)
    return method, settings


def _check_keys_apply(
    method: Method, settings: Settings, keys: Collection[str]
) -> None:
    """Raise `UsageError` for a key that does not apply to the method, unless it has its default."""
    serves = method.updates_on == "server"
    has_servers = serves or collectives.make(settings.collective).needs == "servers"
    usual = Settings()
    for key, means, why in (
        (
            "collective",
            not serves,
            "its servers apply gradients, and workers form no average",
        ),
        ("servers", has_servers, "it has no servers"),
        ("replies", serves, "no server replies with parameters"),
    ):
        value = getattr(settings, key)
        if key in keys and not means and value != getattr(usual, key):
            raise UsageError(
                f"{key}={value} does not apply to method {method.name!r}: {why}. Leave {key} out"
            )


def default_compression(method: Method) -> GradientCompression:
    """The compression of a method if the user names none."""
    own: str | None = getattr(method, "default_compression", None)
    return UNSET if own is None else compression.make(own)


def short_spec(method: Method, settings: Settings) -> str:
    """The spec of a method with its settings, without default values."""
    keys = settings.changed_keys(default_compression(method))
    return str(spec.Spec(method.name, spec.changed(method) | keys))


def reconcile(method: Method, settings: Settings) -> tuple[Method, Settings]:
    """Fill in the settings that the method decides. Raises `UsageError` for a contradiction."""
    settings = _with_collective_of(method, settings)
    if settings.compression is UNSET:
        settings = replace(settings, compression=default_compression(method))
    with_compression(method, settings)
    return method, settings


def with_compression(method: Method, settings: Settings) -> Method:
    """The variant of the method whose messages the settings' compression can compress.

    Raises `UsageError` if there is none.
    """
    chosen = settings.compression
    if not chosen.compresses or not hasattr(method, "compressed_by"):
        return method
    chosen.code.check_differences()
    result: Method = method.compressed_by(chosen.name)
    return result


def _with_collective_of(method: Method, settings: Settings) -> Settings:
    """Apply OSP's own key ``collective``: a value other than "native" replaces the setting."""
    own: str = getattr(method, "collective", "native")
    if own == "native" or method.updates_on == "server":
        return settings
    return replace(settings, collective=own)
