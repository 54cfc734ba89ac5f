"""What is sent of a mean: the registry of compressors, one row each.

``COMPRESSORS`` maps a compressor's name to its class, `make` turns a spec into a compressor.
Every lossy one may have residuals (`Residuals`): the practical wraps the pure.
"""

from __future__ import annotations

from typing import Any

from paceline.compression.casts import BF16, FP16
from paceline.compression.identity import Identity
from paceline.compression.int8 import Int8
from paceline.compression.residuals import Residuals
from paceline.errors import UsageError, unknown
from paceline.interfaces import Compressor
from paceline.spec import Spec, changed, convert, convert_fields, field_types, parse

__all__ = ["BF16", "COMPRESSORS", "FP16", "Identity", "Int8", "Residuals"]
__all__ += ["keys_of", "make"]

COMPRESSORS: dict[str, type[Compressor]] = {
    BF16.name: BF16,
    FP16.name: FP16,
    Identity.name: Identity,
    Int8.name: Int8,
}

RESIDUALS = "residuals"
"""The key that every lossy compressor takes."""


def make(spec: str | Spec) -> Compressor:
    """The compressor that a spec such as ``"int8:rounding=nearest,residuals=true"`` names.

    Raises `UsageError` for an unknown name, an unknown key, or a value of the wrong type.
    """
    spec = parse(spec) if isinstance(spec, str) else spec
    if spec.name not in COMPRESSORS:
        raise UsageError(unknown("compression", spec.name, COMPRESSORS))
    cls: Any = COMPRESSORS[spec.name]
    owner = f"compression {spec.name!r}"
    values = dict(spec.values)
    known = set(field_types(cls))
    lossy = cls is not Identity
    residuals = lossy and convert(RESIDUALS, values.pop(RESIDUALS, "false"), bool)
    for key in values:
        if key not in known:
            message = unknown("key", key, known | ({RESIDUALS} if lossy else set()))
            raise UsageError(f"{owner}: {message}")
    pure: Compressor = cls(**convert_fields(cls, values, owner))
    return Residuals(pure) if residuals else pure


def keys_of(compressor: Compressor) -> dict[str, str]:
    """The keys of a method's full spec that say which compressor this is, and what of it is
    not as by default; nothing for `Identity`."""
    if compressor == Identity():
        return {}
    pure = compressor.code if isinstance(compressor, Residuals) else compressor
    values = changed(pure)
    if pure is not compressor:
        values = values | {RESIDUALS: "true"}
    nested = {f"compression.{key}": value for key, value in values.items()}
    return {"compression": pure.name} | nested
