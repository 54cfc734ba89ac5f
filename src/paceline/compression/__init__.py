"""Compression of gradients: the registry of compressors, and the specs that name them.

`make` turns a spec such as ``"int8:error_feedback=true"`` into a `GradientCompression`: a compressor
of `COMPRESSORS`, with error feedback and uncompressed first steps if the spec or its defaults say so.

- `base`: `Compressor` and its base classes; a bucket as one flat tensor.
- `error_feedback`: `GradientCompression`.
- `casts`: bf16 and fp16.
- `quantization`: int8 and int4.
- `top_k`, `gd_top_k`, `dgc`: the largest elements; `sparse`: selects and encodes them.
- `powersgd`: products of thin factors.
- `contrib`: compressors that researchers compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.compression.base import (
    COMMON,
    AllToAll,
    Compressor,
    CompressorSummary,
    Gather,
    GatheredCompressor,
    Leg,
    NoCompression,
    PerWorkerCompressor,
    RankInfo,
    Request,
    Rounds,
    Shape,
    SkipsSmallTensors,
    State,
    StateKind,
    Sum,
)
from paceline.compression.casts import BF16, FP16
from paceline.compression.contrib.ef21 import EF21
from paceline.compression.contrib.ef_sign import EFSign
from paceline.compression.contrib.qsgd import QSGD
from paceline.compression.dgc import DGC
from paceline.compression.error_feedback import GradientCompression
from paceline.compression.gd_top_k import GDTopK
from paceline.compression.powersgd import PowerSGD
from paceline.compression.quantization import Int4, Int8
from paceline.compression.top_k import TopK
from paceline.errors import UnknownNameError, UsageError, unknown
from paceline.spec import (
    Spec,
    changed,
    convert,
    convert_fields,
    field_types,
    parse,
    spec_of,
)

__all__ = [
    "BF16",
    "COMMON",
    "COMPRESSORS",
    "CONTRIB",
    "DGC",
    "EF21",
    "FP16",
    "QSGD",
    "AllToAll",
    "Compressor",
    "CompressorSummary",
    "EFSign",
    "GDTopK",
    "Gather",
    "GatheredCompressor",
    "GradientCompression",
    "Int4",
    "Int8",
    "Leg",
    "NoCompression",
    "PerWorkerCompressor",
    "PowerSGD",
    "RankInfo",
    "Request",
    "Rounds",
    "Shape",
    "SkipsSmallTensors",
    "State",
    "StateKind",
    "Sum",
    "TopK",
    "full_spec",
    "keys_of",
    "make",
    "shared_keys",
    "warmup_message",
]

COMPRESSORS: dict[str, type[Compressor]] = {
    BF16.name: BF16,
    DGC.name: DGC,
    EF21.name: EF21,
    EFSign.name: EFSign,
    FP16.name: FP16,
    GDTopK.name: GDTopK,
    NoCompression.name: NoCompression,
    Int4.name: Int4,
    Int8.name: Int8,
    PowerSGD.name: PowerSGD,
    QSGD.name: QSGD,
    TopK.name: TopK,
}

CONTRIB = frozenset({EF21.name, EFSign.name, QSGD.name})
"""Compressors for comparison, which no measurement recommends: `plan` and `auto` do not try them."""

ERROR_FEEDBACK, DECAY, WARMUP_STEPS = "error_feedback", "decay", "warmup_steps"


def shared_keys(cls: Any) -> dict[str, str]:
    """The keys that a registered class takes besides its own fields, with their defaults.

    A class with a field ``warmup_steps``, such as DGC, has its own warm-up instead of the shared one.
    """
    if cls is NoCompression:
        return {}
    keys = {}
    if not hasattr(cls, WARMUP_STEPS):
        keys[WARMUP_STEPS] = str(cls.warmup_steps_by_default)
    if cls.takes_error_feedback:
        keys |= {
            ERROR_FEEDBACK: str(cls.error_feedback_by_default).lower(),
            DECAY: "1.0",
        }
    return keys


def make(spec: str | Spec) -> GradientCompression:
    """Make the compression that a spec such as ``"int8:error_feedback=true"`` names.

    Raises:
        UsageError: A name or a key is unknown, or a value is of the wrong type or out of its
            range.
    """
    spec = parse(spec) if isinstance(spec, str) else spec
    if spec.name not in COMPRESSORS:
        raise UnknownNameError(unknown("compression", spec.name, COMPRESSORS))
    cls: Any = COMPRESSORS[spec.name]
    owner = f"compression {spec.name!r}"
    shared = shared_keys(cls)
    own = {key: text for key, text in spec.values.items() if key not in shared}
    known = set(field_types(cls)) | set(shared)
    for key in own:
        if key in (ERROR_FEEDBACK, DECAY) and cls is not NoCompression:
            raise UsageError(
                f"{owner}: {key}={own[key]}, but it takes no error feedback, since it keeps "
                "its own memory of errors or is unbiased. Leave that key out"
            )
        if key not in known:
            raise UsageError(f"{owner}: {unknown('key', key, known)}")
    shared_values = {key: spec.values.get(key, text) for key, text in shared.items()}
    try:
        return GradientCompression(
            cls(**convert_fields(cls, own)),
            convert(ERROR_FEEDBACK, shared_values.get(ERROR_FEEDBACK, "false"), bool),
            convert(DECAY, shared_values.get(DECAY, "1.0"), float),
            convert(WARMUP_STEPS, shared_values.get(WARMUP_STEPS, "0"), int),
        )
    except UsageError as error:
        raise UsageError(f"{owner}: {error}") from None


def full_spec(compression: GradientCompression) -> str:
    """Return a spec with every key: measured compression times are stored under it.

    Warm-up and the length of an epoch are no part of it: times are those of steady state, in the
    middle of an epoch.
    """
    code = compression.code.steady_state().with_epoch(None)
    shared = _shared_values(compression)
    shared.pop(WARMUP_STEPS, None)
    if shared.get(ERROR_FEEDBACK) == "false":
        del shared[DECAY]
    return str(Spec(code.name, spec_of(code.name, code).values | shared))


def keys_of(compression: GradientCompression) -> dict[str, str]:
    """Return the keys of a method's spec that name the compression, and its values that differ from defaults.

    Empty without compression.
    """
    if not compression.compresses:
        return {}
    code = compression.code
    defaults = shared_keys(type(code))
    values = changed(code)
    for key, text in _shared_values(compression).items():
        if text != defaults.get(key):
            values[key] = text
    nested = {f"compression.{key}": value for key, value in values.items()}
    return {"compression": code.name} | nested


def warmup_message(
    compression: GradientCompression,
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    workers: int,
) -> str:
    """Return a sentence on the bytes of the first steps, for gradients with these *shapes*.

    Empty if the first steps send no more than later ones.
    """
    code = compression.code
    stages = code.warmup_wire_bytes(shapes, dtype, workers)
    steps = sum(count for count, _ in stages)
    whole = sum(map(math.prod, shapes)) * dtype.itemsize
    if not steps or not whole:
        return ""
    later = sum(leg.size for leg in code.wire_bytes(shapes, dtype, workers))
    early = sum(count * leg.size for count, legs in stages for leg in legs) / steps
    return (
        f"compression {code.name} sends more in its first {steps} steps: "
        f"{early / whole:.1%} of a gradient's bytes, and {later / whole:.1%} later"
    )


def _shared_values(compression: GradientCompression) -> dict[str, str]:
    """The values of the keys that compressors share."""
    values = {
        WARMUP_STEPS: str(compression.warmup_steps),
        ERROR_FEEDBACK: str(compression.error_feedback).lower(),
        DECAY: str(compression.decay),
    }
    return {key: values[key] for key in shared_keys(type(compression.code))}
