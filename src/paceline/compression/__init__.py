"""What is sent of a mean: the registry of compressors, one row each.

``COMPRESSORS`` maps a compressor's name to its class, `make` turns a spec into a compressor.
Every lossy one may begin later (`Later`), and all but those with a memory of their own may
have residuals (`ErrorFeedback`): the practical wraps the pure.

- `no_compression`, `casts`: all of it, or 16 bits of each number.
- `quantization`, `quantizer`, `blocks`: int8 and int4, block by block.
- `top_k`, `gd_top_k`, `dgc`: the largest elements.
- `powersgd`: products of thin factors.
- `sparse`, `selection`, `value_bins`: values with their places, and how these are chosen and packed.
- `per_worker`: base of compressors whose output can be decompressed per worker.
- `packing`: a bucket's tensors in one flat buffer.
- `wrapper`, `error_feedback`, `dense_warmup`: wrappers: error feedback, dense first steps.
- `counter_random`: random numbers from a key and a counter.
- `contrib`: compressors that researchers compare with.
- `docs_table`: the docs' table of compressors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.compression.casts import BF16, FP16
from paceline.compression.contrib.ef21 import EF21
from paceline.compression.contrib.ef_sign import EFSign
from paceline.compression.contrib.qsgd import QSGD
from paceline.compression.dense_warmup import Later
from paceline.compression.dgc import DGC
from paceline.compression.error_feedback import ErrorFeedback
from paceline.compression.gd_top_k import GDTopK
from paceline.compression.no_compression import Identity
from paceline.compression.powersgd import PowerSGD
from paceline.compression.quantization import Int4, Int8
from paceline.compression.top_k import TopK
from paceline.compression.wrapper import Wrapper, pure
from paceline.errors import UnknownNameError, UsageError, unknown
from paceline.interfaces import Compressor, Shape
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
    "COMPRESSORS",
    "CONTRIB",
    "DGC",
    "EF21",
    "FP16",
    "QSGD",
    "EFSign",
    "GDTopK",
]
__all__ += ["ErrorFeedback", "Identity", "Int4", "Int8", "Later", "PowerSGD", "TopK"]
__all__ += [
    "Exactly",
    "as_by_default",
    "full_spec",
    "keys_of",
    "make",
    "pure",
    "shared_keys",
    "warm_up_of",
]

COMPRESSORS: dict[str, type[Compressor]] = {
    BF16.name: BF16,
    DGC.name: DGC,
    EF21.name: EF21,
    EFSign.name: EFSign,
    FP16.name: FP16,
    GDTopK.name: GDTopK,
    Identity.name: Identity,
    Int4.name: Int4,
    Int8.name: Int8,
    PowerSGD.name: PowerSGD,
    QSGD.name: QSGD,
    TopK.name: TopK,
}

CONTRIB = frozenset({EF21.name, EFSign.name, QSGD.name})
"""Compressors to compare with, which no measurement recommends: `plan` and `auto` do not search them."""

ERROR_FEEDBACK, DECAY, WARMUP_STEPS = "error_feedback", "decay", "warmup_steps"


def shared_keys(cls: Any) -> dict[str, str]:
    """The keys that a registered class takes beside its own fields, with their defaults."""
    if cls is Identity:
        return {}
    keys = {WARMUP_STEPS: str(cls.warmup_steps_by_default)}
    if cls.takes_error_feedback:
        keys |= {
            ERROR_FEEDBACK: str(cls.error_feedback_by_default).lower(),
            DECAY: "1.0",
        }
    return keys


def make(spec: str | Spec) -> Compressor:
    """The compressor that a spec such as ``"int8:error_feedback=true"`` names.

    Raises `UsageError` for an unknown name, an unknown key, or a value of the wrong type or
    out of its range.
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
        if key in (ERROR_FEEDBACK, DECAY) and cls is not Identity:
            raise UsageError(
                f"{owner}: {key}={own[key]}, but it takes no residuals: it has a memory of "
                "its own, or its codes are right in the mean; leave that key out"
            )
        if key not in known:
            raise UsageError(f"{owner}: {unknown('key', key, known)}")
    values = shared | spec.values
    try:
        code: Compressor = cls(**convert_fields(cls, own))
        if values.get(ERROR_FEEDBACK) is not None:
            code = _with_residuals(code, values)
        steps = convert(WARMUP_STEPS, values.get(WARMUP_STEPS, "0"), int)
        if steps < 0:
            raise UsageError(f"{WARMUP_STEPS}: expected 0 or more, got {steps}")
    except UsageError as error:
        raise UsageError(f"{owner}: {error}") from None
    return Later(code, steps) if steps else code


@dataclass(frozen=True)
class Exactly:
    """A compressor object as it is, for ``distribute(compression=Exactly(TopK()))``: without
    the error feedback, and the first steps without compression, that it has by default."""

    code: Compressor


def as_by_default(given: Compressor | Exactly) -> Compressor:
    """The compressor that a user's object stands for.

    Error feedback and first dense steps go with its class by default, as for a name: see
    `make`. An object in a wrapper of one's own (`ErrorFeedback`, `Later`) says itself what it has.
    """
    if isinstance(given, Exactly):
        return given.code
    if isinstance(given, type) or not isinstance(given, Compressor):
        raise UsageError(
            "compression: expected a name, a spec or a compressor object, got "
            f"{given!r}; an object is made as in TopK(density=0.01)"
        )
    if isinstance(given, Wrapper):
        return given
    feedback = given.error_feedback_by_default and given.takes_error_feedback
    code = ErrorFeedback(given) if feedback else given
    steps = given.warmup_steps_by_default
    return Later(code, steps) if steps else code


def _with_residuals(code: Compressor, values: dict[str, str]) -> Compressor:
    decay = convert(DECAY, values[DECAY], float)
    if convert(ERROR_FEEDBACK, values[ERROR_FEEDBACK], bool):
        return ErrorFeedback(code, decay)
    if decay != 1.0:
        raise UsageError(
            f"{DECAY}={decay} is of residuals, and there are none: add error_feedback=true"
        )
    return code


def full_spec(compressor: Compressor) -> str:
    """What `make` makes the same of, with every key: also those that are as by default. How
    many steps come first is no part of it, and how many an epoch has neither: it is what it is long
    after its start, in the middle of an epoch."""
    settled = compressor.settled().in_epochs(None)
    code, said = pure(settled), _said(settled)
    del said[WARMUP_STEPS]
    if said.get(ERROR_FEEDBACK) == "false":
        del said[DECAY]
    return str(Spec(code.name, spec_of(code.name, code).values | said))


def warm_up_of(
    compressor: Compressor, shapes: Sequence[Shape], dtype: torch.dtype, workers: int
) -> str:
    """A sentence on how much more *compressor* sends in its first steps, of gradients of these
    *shapes*; empty where it does not."""
    stages = compressor.warm_up_traffic(shapes, dtype, workers)
    steps = sum(count for count, _ in stages)
    whole = sum(map(math.prod, shapes)) * dtype.itemsize
    if not steps or not whole:
        return ""
    later = sum(leg.size for leg in compressor.traffic(shapes, dtype, workers))
    early = sum(count * leg.size for count, legs in stages for leg in legs) / steps
    return (
        f"compression {pure(compressor).name} sends more in its first {steps} steps: "
        f"{early / whole:.1%} of a gradient's bytes, and {later / whole:.1%} later"
    )


def keys_of(compressor: Compressor) -> dict[str, str]:
    """The keys of a method's full spec that say which compressor this is, and what of it is
    not as by default; nothing for `Identity`."""
    if compressor == Identity():
        return {}
    code = pure(compressor)
    shared, said = shared_keys(type(code)), _said(compressor)
    values = changed(code)
    values |= {key: text for key, text in said.items() if text != shared.get(key)}
    nested = {f"compression.{key}": value for key, value in values.items()}
    return {"compression": code.name} | nested


def _said(compressor: Compressor) -> dict[str, str]:
    """What its wrappers say, in the keys that compressors share."""
    code = pure(compressor)
    said = {WARMUP_STEPS: "0"}
    if ERROR_FEEDBACK in shared_keys(type(code)):
        said |= {ERROR_FEEDBACK: "false", DECAY: "1.0"}
    wrapped: Any = compressor
    while wrapped is not code:
        if isinstance(wrapped, Later):
            said[WARMUP_STEPS] = str(wrapped.steps)
        else:
            said |= {ERROR_FEEDBACK: "true", DECAY: str(wrapped.decay)}
        wrapped = wrapped.code
    return said
