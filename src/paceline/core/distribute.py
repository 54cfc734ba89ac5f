"""`distribute`: one line that makes a training script data-parallel."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.compression import Compressor, GradientCompression, make
from paceline.core.misuse import check_not_parallel
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
from paceline.interfaces import Method, Runtime
from paceline.interfaces.server_messages import Replies
from paceline.runtimes.join import join_runtime
from paceline.tools.auto.config import (
    CHOSEN_BY_AUTO,
    FIRST,
    AutoConfig,
    check_auto_allowed,
    parse_auto,
    report_single_worker,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from paceline.tools.auto.method_switching import SwitchableTraining


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    method: str | Method | SwitchableTraining | None = None,
    buckets: str = "optimal",
    buffers: ModuleBuffers = "rank0",
    check_finite: bool = False,
    collective: str = "native",
    compression: str | Compressor | GradientCompression | None = None,
    servers: str = "auto",
    sampler: Sampler | None = None,
    clip_norm: float | None = None,
    replies: Replies = "full",
) -> DistributedOptimizer:
    """Train *model* data-parallel, and return the optimizer to use from now on.

    Every rank calls this with the same model, options and kind of optimizer. All ranks start
    from rank 0's parameters and buffers. A spec on the command line (``--method``) wins over these
    arguments.

    Args:
        model: The plain model, on its device, without DistributedDataParallel. Its trainable
            parameters are fixed from here on.
        optimizer: The optimizer of the model's parameters. Use the returned one in its place.
        method: When and how workers synchronize: a name (``"bsp"``, the default), a spec
            (``"bsp:buckets=wfbp"``), or a method object. ``"auto"`` tries methods while it trains,
            and keeps the fastest (docs/how-to/use-auto.md).
        buckets: How gradients are grouped into buckets (`paceline.bucketing`). ``"optimal"`` plans
            them from times measured in the first steps, and keeps the plan if a trial is faster
            than DDP's buckets. Others are ``"ddp"``, ``"single"``, ``"wfbp"``, ``"mg-wfbp"``, and
            bucket lengths in tensors, such as ``"3+5+2"``. Measured plans differ from run to run,
            and so does the order of sums on three workers or more: use a fixed rule for
            bit-equal runs.
        buffers: Once a step, the model's buffers (BatchNorm's statistics) become rank 0's
            (``"rank0"``, as under DDP), or stay each rank's own (``"local"``).
        check_finite: Raise `GradientError`, which names the parameter, when a mean gradient is not
            finite. Leave it off with a GradScaler.
        collective: How averages are formed: ``"native"``, ``"parameter-server"``,
            ``"hierarchical"``, ... (docs/reference/collectives.md).
        compression: How gradients are compressed where workers average them or push them to servers,
            and parameter changes where workers average models (docs/reference/compressors.md). A name
            (``"bf16"``), a spec (``"int8:error_feedback=true"``), or a compressor object. An object
            has the error feedback that its name has by default: ``GradientCompression(TopK())`` has
            none, and ``GradientCompression(Int8(), error_feedback=True)`` has it. The default is
            ``"none"``, except for methods with a default compression. A single worker does not
            compress.
        servers: Where servers run: ``"embedded"`` (one beside rank 0), ``"per-node"``,
            ``"dedicated"`` (on separate hosts), ``"auto"`` (dedicated if there are any, else
            embedded), or ``"HOST:PORT+HOST:PORT"``.
        sampler: Weight each worker's gradient by the samples in its batch. The script runs one
            backward pass per batch of the sampler.
        clip_norm: The largest gradient norm; larger gradients are scaled down to it, as
            ``torch.nn.utils.clip_grad_norm_`` does. ``paceline list methods`` says which gradient is
            clipped: the mean, or each worker's own before it is sent. In the second case nothing
            is sent before backward has ended.
        replies: Reply of servers to compressed pushes: the parameters (``"full"``), or compressed
            differences from each worker's parameters (``"deltas"``), of which they keep a copy.

    Returns:
        The optimizer, wrapped: `DistributedOptimizer`.

    Raises:
        UsageError: The arguments do not go together, or cannot work here.
        ModelMismatchError: Models or options differ between ranks. Raised on every rank.

    Example:
        ::

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = paceline.distribute(model, optimizer)
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss_of(model(inputs), labels).backward()
                optimizer.step()
            optimizer.finish()
    """
    _check_arguments(model, optimizer)
    runtime = join_runtime()
    settings = Settings(
        buckets=buckets,
        buffers=buffers,
        check_finite=check_finite,
        collective=collective,
        compression=_as_compression(compression),
        servers=servers,
        clip_norm=math.inf if clip_norm is None else clip_norm,
        replies=replies,
    )
    report_as_asked(runtime)
    inputs = TrainingInputs(
        runtime, model, optimizer, sampler, len(runtime.registry.trainings)
    )
    override = runtime.registry.options.method
    if override is None and _is_switchable(method):
        return method.train(inputs, settings)
    auto = parse_auto(override or (method if isinstance(method, str) else None))
    if auto is not None:
        return _train_auto(auto, inputs, settings, overrides=override is not None)
    return train(inputs, *_read_method(runtime, method, settings))


def _train_auto(
    config: AutoConfig, inputs: TrainingInputs, settings: Settings, *, overrides: bool
) -> DistributedOptimizer:
    """Train under ``method="auto"``; *overrides*: the command line asks for it, not the script."""
    from paceline.tools.auto.method_switching import (
        SwitchableTraining,  # it needs much that others do not
    )

    runtime = inputs.runtime
    if overrides:
        usual = Settings()
        own = {key: getattr(usual, key) for key in CHOSEN_BY_AUTO}
        settings = replace(settings, **own)
    beside = settings.changed_keys()
    beside = {key: beside[key] for key in CHOSEN_BY_AUTO if key in beside}
    others = bool(runtime.registry.unfinished)
    check_auto_allowed(runtime, chosen_beside=beside, others=others)
    runtime.connect()
    if runtime.size == 1:
        report_single_worker(runtime)
    if runtime.size == 1 or runtime.registry.options.profile is not None:
        return train(inputs, *parse_method(FIRST, settings))
    return SwitchableTraining(config).train(inputs, settings)


def _is_switchable(method: object) -> TypeIs[SwitchableTraining]:
    """Whether *method* switches between methods."""
    if method is None or isinstance(method, str):
        return False
    from paceline.tools.auto.method_switching import (
        SwitchableTraining,  # it needs much that others do not
    )

    return isinstance(method, SwitchableTraining)


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
    check_not_parallel(model)
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
    runtime: Runtime,
    method: str | Method | SwitchableTraining | None,
    settings: Settings,
) -> tuple[Method, Settings]:
    """The method and the settings; the command line's spec wins over the script's."""
    override = runtime.registry.options.method
    if override is None and method is not None and not isinstance(method, str):
        assert not _is_switchable(method)
        return reconcile(method, settings)
    text = override or method or "bsp"
    assert isinstance(text, str)
    if override is not None and method is not None and runtime.rank == 0:
        print(
            f"paceline: --method {override} overrides the script's {method!r}",
            file=sys.stderr,
        )
    return parse_method(text, settings)


def _as_compression(
    given: str | Compressor | GradientCompression | None,
) -> GradientCompression:
    if given is None:
        return UNSET
    if isinstance(given, str):
        return make(given)
    if isinstance(given, GradientCompression):
        return given
    if not isinstance(given, Compressor):
        raise UsageError(
            "compression: expected a name, a spec, a compressor or a GradientCompression, got "
            f"{given!r}; a compressor is made as in TopK(density=0.01)"
        )
    return GradientCompression.by_default(given)
