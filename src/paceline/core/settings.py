"""What a user chooses beside the method: the arguments of `distribute` that specs share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from paceline import compression, spec
from paceline.bucketing import check_rule
from paceline.compression import Identity
from paceline.errors import UsageError, unknown
from paceline.interfaces import Compressor
from paceline.interfaces.server_messages import Replies
from paceline.parameter_server.optim.clipping import check_clip_norm

ModuleBuffers = Literal["rank0", "local"]


UNSAID = Identity()
"""The compression of who names none: this one alone gives way to that which a method has by
itself."""

PLACES = ("auto", "embedded", "per-node", "dedicated")
_ADDRESS = re.compile(r"[^:+\s]+:[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """*buckets*: the rule that groups gradients into buckets. *buffers*: what becomes of the
    model's buffers (BatchNorm's statistics) once a step: every rank takes rank 0's, or
    keeps its own. *check_finite*: raise an error that names the parameter
    when a gradient is not finite (not together with a GradScaler, which expects such
    gradients and skips the step). *collective*: how averages are formed: a
    row of `paceline.collectives`, which checks the name. *compression*: what is sent of them; its own
    keys are ``compression.KEY``; `UNSAID` is what the method has by itself, mostly none. *servers*: where servers are: beside rank 0
    ("embedded"), one on each host ("per-node"), on hosts of their own ("dedicated"; "auto":
    where there are any, else embedded), or addresses HOST:PORT joined by "+".
    *clip_norm*: the largest norm that a gradient may have; of which one, the method says
    (`Method.clips`). *replies*: where servers update and gradients are compressed, whether a push is
    answered with the parameters as they are ("full"), or with a code of their difference from what the
    worker holds ("deltas"): then servers keep a copy of that for each worker."""

    buckets: str = "optimal"
    buffers: ModuleBuffers = "rank0"
    check_finite: bool = False
    collective: str = "native"
    servers: str = "auto"
    clip_norm: float = math.inf
    replies: Replies = "full"
    compression: Compressor = UNSAID

    def __post_init__(self) -> None:
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
        """Whether all means are waited for where backward ends, as they are looked at there."""
        return self.check_finite or self.clip_norm < math.inf

    def changed_by(self, keys: Mapping[str, str]) -> Settings:
        """These settings, but those that a spec's *keys* name. Raises `UsageError` that says
        what is unknown and what there is."""
        chosen, rest = spec.nested("compression", keys)
        known = set(spec.field_types(Settings))
        for key in rest:
            if key not in known:
                raise UsageError(unknown("key", key, known))
        settings = replace(self, **spec.convert_fields(Settings, rest))
        if chosen is None:
            return settings
        return replace(settings, compression=compression.make(chosen))

    def as_keys(self, own: Compressor = UNSAID) -> dict[str, str]:
        """The keys of a full spec: the bucket rule, the compression, and what differs from
        the default. *own*: the compression that the method has by itself."""
        coded = compression.keys_of(self.compression)
        return {"buckets": self.buckets} | self.changed_keys(own) | coded

    def changed_keys(self, own: Compressor = UNSAID) -> dict[str, str]:
        """Those that differ from the default."""
        keys = spec.changed(self)
        keys.pop("compression", None)  # which has keys of its own
        if self.compression == own:
            return keys
        return keys | (compression.keys_of(self.compression) or {"compression": "none"})
