"""`distribute`: one line that makes a training script data-parallel."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.compression import Exactly, as_by_default, make
from paceline.core.misuse import check_trained_by_nobody_else
from paceline.core.optimizer import DistributedOptimizer
from paceline.core.sampler import Sampler
from paceline.core.settings import (
    UNSET,
    ModuleBuffers,
    Settings,
    parse_method,
    reconcile,
)
from paceline.core.step_loggers import report_as_asked
from paceline.core.training_setup import TrainingInputs, train
from paceline.errors import UsageError
from paceline.interfaces import Compressor, Method, Runtime
from paceline.interfaces.server_messages import Replies
from paceline.runtimes.join import join_runtime
from paceline.tools.auto.config import (
    CHOSEN_BY_AUTO,
    FIRST,
    check_wish,
    say_alone,
    wish_of,
)
from paceline.tools.auto.config import Auto as Wish

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from paceline.tools.auto.method_switching import Auto


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    method: str | Method | Auto | None = None,
    buckets: str = "optimal",
    buffers: ModuleBuffers = "rank0",
    check_finite: bool = False,
    collective: str = "native",
    compression: str | Compressor | Exactly | None = None,
    servers: str = "auto",
    sampler: Sampler | None = None,
    clip_norm: float | None = None,
    replies: Replies = "full",
) -> DistributedOptimizer:
    """Train *model* data-parallel; returns the optimizer to use from now on.

    *method* is a name (``"bsp"``, the default), a spec (``"bsp:buckets=wfbp"``), a method object, or
    ``"auto"``: the best is found out while it trains (docs/auto.md);
    *buckets* the rule that groups gradients into buckets (see `paceline.bucketing`):
    ``"optimal"``, planned from measured times in the first steps and kept if it is faster
    than DDP's in a trial; ``"ddp"``, ``"single"``, ``"wfbp"``, ``"mg-wfbp"``, or bucket
    lengths such as ``"3+5+2"``. Measured plans, and so the order of sums on three workers
    or more, differ from run to run: take a fixed rule for bit-equal runs. *buffers*: once a step the model's buffers (BatchNorm's statistics) become
    rank 0's (``"rank0"``, as under DDP) or stay each rank's own (``"local"``). *check_finite*: raise
    `GradientError` naming the parameter when a mean gradient is not finite; leave it off
    with a GradScaler. *sampler*: weight gradients by the samples that it deals out, one
    backward pass a batch. *collective*: how averages are formed, ``"native"``,
    ``"parameter-server"``, ``"hierarchical"`` ... (see docs/collectives.md). *compression*: what is sent of gradients where workers form means
    of them, or of what parameters have moved where workers average these, or of what is
    pushed to servers that update: a name (``"bf16"``), a spec
    (``"int8:error_feedback=true"``, see docs/compressors.md) or a compressor object, which has the
    error feedback that its name has by default: ``Exactly(TopK())`` has none, and
    ``ErrorFeedback(Int8())`` has it. Unsaid, it is
    ``"none"``, but for a method with a code of its own. A worker alone sends nothing, and loses
    nothing. *servers*: where servers are, ``"embedded"`` (one beside rank 0),
    ``"per-node"``, ``"dedicated"`` (on hosts of their own), ``"auto"`` (dedicated where
    there are any, else embedded) or ``"HOST:PORT+HOST:PORT"``.
    *clip_norm*: scale gradients down to this norm before they are
    applied, as ``torch.nn.utils.clip_grad_norm_`` does: the mean gradient, or
    (``paceline list methods`` says where) each worker's own before it is sent, and then all of it leaves
    after backward. *replies*: where servers update and gradients are compressed, they answer
    with parameters (``"full"``), or with compressed ``"deltas"`` from what each worker holds, of
    which they keep a copy. A spec given on the command line wins over all of these.

    Every rank calls this with the same model, options and kind of optimizer, and all
    start from rank 0's parameters and buffers. Raises `UsageError` for what cannot work,
    `ModelMismatchError` on every rank where ranks differ.
    """
    _check_arguments(model, optimizer)
    runtime = join_runtime()
    settings = Settings(
        buckets=buckets,
        buffers=buffers,
        check_finite=check_finite,
        collective=collective,
        compression=_made(compression),
        servers=servers,
        clip_norm=math.inf if clip_norm is None else clip_norm,
        replies=replies,
    )
    report_as_asked(runtime)
    inputs = TrainingInputs(
        runtime, model, optimizer, sampler, len(runtime.job.trainings)
    )
    override = runtime.job.options.method
    if override is None and _changes(method):
        return method.train(inputs, settings)
    wish = wish_of(override or (method if isinstance(method, str) else None))
    if wish is not None:
        return _train_by(wish, inputs, settings, overrides=override is not None)
    return train(inputs, *_read_method(runtime, method, settings))


def _train_by(
    wish: Wish, inputs: TrainingInputs, settings: Settings, *, overrides: bool
) -> DistributedOptimizer:
    """What the user leaves to paceline; *overrides*: by the command line, which wins over the script."""
    from paceline.tools.auto.controlled_training import (
        changing,  # it needs much that others do not
    )

    runtime = inputs.runtime
    if overrides:
        usual = Settings()
        own = {key: getattr(usual, key) for key in CHOSEN_BY_AUTO}
        settings = replace(settings, **own)
    beside = settings.changed_keys()
    beside = {key: beside[key] for key in CHOSEN_BY_AUTO if key in beside}
    check_wish(runtime, chosen_beside=beside, others=bool(runtime.job.unfinished))
    runtime.connect()
    if runtime.size == 1:
        say_alone(runtime)
    if runtime.size == 1 or runtime.job.options.profile is not None:
        return train(inputs, *parse_method(FIRST, settings))
    return changing(wish, settings).train(inputs, settings)


def _changes(method: object) -> TypeIs[Auto]:
    """Whether it is no method, but goes from one to another."""
    if method is None or isinstance(method, str):
        return False
    from paceline.tools.auto.method_switching import (
        Auto,  # it needs much that others do not
    )

    return isinstance(method, Auto)


def _check_arguments(model: object, optimizer: object) -> None:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UsageError(
            "the model is wrapped in DistributedDataParallel, which averages gradients "
            "itself: pass the plain model (model.module) to distribute"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"distribute(model, ...): expected a torch.nn.Module, got {type(model).__name__}"
        )
    check_trained_by_nobody_else(model)
    if isinstance(optimizer, DistributedOptimizer):
        raise UsageError("the optimizer was given to distribute before: wrap it once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "distribute(model, optimizer): expected a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}"
        )
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise UsageError(
                    f"parameter {position} of the optimizer's group {number} "
                    f"(shape {tuple(parameter.shape)}) is not one of the model's: its "
                    "gradient would not be averaged. Pass the module that owns all of them"
                )


def _read_method(
    runtime: Runtime, method: str | Method | Auto | None, settings: Settings
) -> tuple[Method, Settings]:
    """The method object and the settings, the command line's before the script's."""
    override = runtime.job.options.method
    if override is None and method is not None and not isinstance(method, str):
        assert not _changes(method)
        return reconcile(method, settings)
    text = override or method or "bsp"
    assert isinstance(text, str)
    if override is not None and method is not None and runtime.rank == 0:
        print(
            f"paceline: --method {override} overrides the script's {method!r}",
            file=sys.stderr,
        )
    return parse_method(text, settings)


def _made(compression: str | Compressor | Exactly | None) -> Compressor:
    if compression is None:
        return UNSET
    if isinstance(compression, str):
        return make(compression)
    return as_by_default(compression)
