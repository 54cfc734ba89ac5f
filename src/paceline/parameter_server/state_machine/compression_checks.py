"""Which codes may travel between workers and servers that update."""

from __future__ import annotations

from typing import cast

import torch

from paceline.compression import COMPRESSORS, Identity, keys_of, make
from paceline.errors import UsageError
from paceline.interfaces import COMMON, Compressor, Method, PerWorkerCompressor
from paceline.interfaces.server_messages import Replies
from paceline.spec import nested


def spec_of_code(compressor: Compressor) -> str:
    """What a server makes it from. Raises `UsageError` for one that is not registered as it
    is."""
    spec, _ = nested("compression", keys_of(compressor))
    if spec is None or spec.name not in COMPRESSORS or make(spec) != compressor:
        raise UsageError(
            f"compression {compressor.name!r}: a server makes its compressor from a name and "
            "keys, and under these finds another one, or none, in "
            "paceline.compression.COMPRESSORS: register it there, or take a method whose "
            "workers form means, such as bsp"
        )
    return str(spec)


def check_answers(method: Method, compressor: Compressor, replies: Replies) -> None:
    """Raise `UsageError` for differences where nobody answers with them."""
    if replies == "full":
        return
    if method.updates_on != "server":
        raise UsageError(
            f"replies={replies} with method {method.name!r}: its workers update, and no server "
            "answers with parameters; leave that out, or take a method whose servers update"
        )
    if compressor == Identity():
        raise UsageError(
            f"replies={replies} without compression: a difference would be as large as the "
            "parameters are; add compression, such as int8 or top-k"
        )


def check_pushed(method: Method, compressor: Compressor, replies: Replies) -> None:
    """Raise `UsageError` for what cannot be pushed under a *method* whose servers update, or
    be answered by them."""
    if not getattr(method, "pushes_codes", False):
        raise UsageError(
            f"compression {compressor.name!r} with method {method.name!r}: it pushes parts of "
            "buckets, which change from step to step, and works out from what it has sent what "
            "its servers make of them; leave compression out, or take a method that pushes whole "
            "buckets"
        )
    check_decodes_per_worker(compressor)
    spec_of_code(compressor)
    if replies == "deltas":
        check_brings_nearer(compressor)


def check_decodes_per_worker(compressor: Compressor) -> PerWorkerCompressor:
    """Raise `UsageError` unless a server can decode what one worker sends."""
    if not compressor.decodes_per_worker:
        raise UsageError(
            f"compression {compressor.name!r} with servers that update: they take what each "
            "worker pushes by itself, and this code means something only among those of all "
            "workers, or begins later: take one that stands alone from the first step on, such "
            "as top-k, qsgd, int8 or bf16; or a method whose workers form means, such as bsp"
        )
    return cast(PerWorkerCompressor, compressor)


_PROBE = 64, 256
"""The shape of a tensor that a code is tried on."""


def check_brings_nearer(compressor: Compressor) -> None:
    """Raise `UsageError` for a code that is no code of differences: these would grow from one to
    the next where it is further from a tensor than zeros are, and make no sense to one that
    adds up what it is given."""
    code = check_decodes_per_worker(compressor.for_replies())
    if not (code.takes_error_feedback or code.unbiased):
        raise UsageError(
            f"replies=deltas with compression {compressor.name!r}: it keeps a memory of "
            "gradients, and what a difference leaves out is in the next one already; take "
            "replies=full, or a code without memory, such as top-k"
        )
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(_PROBE, generator=generator)
    state = code.init(tensor, "probe", 0)
    if "steps" in state.get(COMMON, {}):  # who counts them sends other things in others
        raise UsageError(
            f"replies=deltas with compression {compressor.name!r}: what it sends changes "
            "from step to step, and the answers to a worker are no steps of its own; take "
            "replies=full, or a code that is always the same, such as top-k"
        )
    decoded = torch.empty_like(tensor)
    code.decode(code.encode([tensor], [state]), [decoded])
    left = float((tensor - decoded).norm() / tensor.norm())
    if left >= 1:
        raise UsageError(
            f"replies=deltas with compression {compressor.name!r}: what its code of a "
            f"tensor leaves out is {left:.2g} times as large as the tensor, so that "
            "differences would grow: take a finer code (more levels, smaller blocks), or "
            "replies=full"
        )
