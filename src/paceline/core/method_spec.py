"""What a spec chooses: a method, and the settings that go with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from paceline import methods, spec
from paceline.bucketing import RULES
from paceline.collectives import registry as collectives
from paceline.compression import COMPRESSORS, Identity, make
from paceline.core.settings import UNSAID, Settings
from paceline.errors import UsageError
from paceline.interfaces import Compressor, Method

VALUES: Sequence[tuple[str, str, Collection[str]]] = (
    ("compression", "compression", COMPRESSORS),
    ("collective", "collective", collectives.COLLECTIVES),
    ("buckets", "bucket rule", RULES),
)
"""Keys of all methods, what their values are called, and which there are."""


def read_spec(text: str, settings: Settings | None = None) -> tuple[Method, Settings]:
    """The method and the settings of a spec; *settings* are those that it does not name.

    Raises `UsageError` that names what is unknown and what there is, and for a key that means nothing
    to that method.
    """
    read = spec.parse(text)
    if read.name not in methods.METHODS:
        for key, kind, known in VALUES:
            if read.name in known:
                raise UsageError(
                    f"{read.name} is a {kind} and no method: bsp:{key}={read.name}"
                )
    chosen, rest = methods.make(read, set(spec.field_types(Settings)))
    settings = (settings or Settings()).changed_by(rest)
    chosen, settings = fitted(chosen, settings)
    collectives.make(settings.collective)
    _check_meaning(chosen, settings, rest)
    return chosen, settings


def _check_meaning(method: Method, settings: Settings, keys: Collection[str]) -> None:
    """Raise `UsageError` for one of a spec's *keys* that the method makes nothing of, unless it says what is so
    by default."""
    serves = method.updates_on == "server"
    has_servers = serves or collectives.make(settings.collective).needs_servers
    usual = Settings()
    for key, means, why in (
        (
            "collective",
            not serves,
            "its servers take gradients, and no average is formed",
        ),
        ("servers", has_servers, "it has no servers"),
        ("replies", serves, "no server answers with parameters"),
    ):
        value = getattr(settings, key)
        if key in keys and not means and value != getattr(usual, key):
            raise UsageError(
                f"{key}={value} means nothing to method {method.name!r}: {why}. Leave {key} out"
            )


def own_compression(method: Method) -> Compressor:
    """What a method's means are compressed with where the user says nothing."""
    own: str | None = getattr(method, "default_compression", None)
    return UNSAID if own is None else make(own)


def brief_spec(method: Method, settings: Settings) -> str:
    """What of the two is not as by default."""
    keys = settings.changed_keys(own_compression(method))
    return str(spec.Spec(method.name, spec.changed(method) | keys))


def fitted(method: Method, settings: Settings) -> tuple[Method, Settings]:
    """The two, as they go together. Raises `UsageError` where they do not."""
    settings = _with_collective_of(method, settings)
    if settings.compression is UNSAID:
        settings = replace(settings, compression=own_compression(method))
    compressed(method, settings)
    return method, settings


def compressed(method: Method, settings: Settings) -> Method:
    """The method as it is under the settings' compression. Raises `UsageError` where what it
    sends cannot be compressed."""
    compressor = settings.compression
    if compressor == Identity() or not hasattr(method, "compressed_by"):
        return method
    compressor.suits_differences()
    result: Method = method.compressed_by(compressor)
    return result


def _with_collective_of(method: Method, settings: Settings) -> Settings:
    """OSP has a key ``collective`` of its own: of those forms in which workers meet, all but
    "native" also say how averages are formed."""
    own: str = getattr(method, "collective", "native")
    if own == "native" or method.updates_on == "server":
        return settings
    return replace(settings, collective=own)
