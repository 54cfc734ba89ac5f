"""Starts a training of a model by a method with its settings.

- `resolve` checks everything that is known before a message is sent, and makes a `TrainingPlan`.
- `start` checks that all ranks agree, connects to servers, and makes the training. Collective.
- `train` does both for the first training of a model, and wraps the user's optimizer.

After the end of a training, `resolve` and `start` may start another one of the same model: so a
method switches.
"""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import cast

import msgspec
import torch

from paceline import methods, spec
from paceline.collectives import registry as collectives
from paceline.collectives.communicator import Communicator
from paceline.collectives.reduce_scatter import check_halves
from paceline.collectives.server_communicator import NoCollectives
from paceline.compression import warmup_message
from paceline.core.broadcast import broadcast_tensors
from paceline.core.context import TrainingContext
from paceline.core.method_hooks import check_declared, check_symmetric
from paceline.core.optimizer import ActiveTraining, DistributedOptimizer
from paceline.core.sampler import Sampler
from paceline.core.settings import (
    Settings,
    default_compression,
    short_spec,
    with_compression,
)
from paceline.core.training import Training
from paceline.errors import ModelMismatchError, UsageError
from paceline.interfaces import (
    AllReduceAlgorithm,
    Comm,
    Endpoint,
    Method,
    Runtime,
    ServerJob,
    UpdatesOnServer,
)
from paceline.interfaces.buckets import strides_in_bucket, wire_bytes, wire_shape
from paceline.interfaces.server_messages import Join
from paceline.interfaces.trainings import TrainingRegistry
from paceline.optim.partitioned import check_servers_can_hold
from paceline.parameter_server.client.remote_model import ServedModel
from paceline.parameter_server.state_machine.compression import (
    check_answers,
    check_pushed,
    spec_of_code,
)
from paceline.torch_internals import is_compiled_whole


@dataclass(frozen=True)
class TrainingInputs:
    """The arguments of `distribute` on one worker. *number* counts the script's trainings, from 0."""

    runtime: Runtime
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    sampler: Sampler | None = None
    number: int = 0

    @property
    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The trainable parameters with their names, in registration order."""
        return [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.numel()
        ]


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of a training, checked as far as one rank alone can check it.

    *spec* is the full one; *short_spec* leaves out default values.
    """

    method: Method
    settings: Settings
    collective: AllReduceAlgorithm
    spec: str
    short_spec: str


@dataclass(frozen=True)
class ConnectedTraining:
    """A training that has started, with its connections to servers.

    *close* releases its other resources, once all workers have ended it.
    """

    training: Training
    endpoints: Sequence[Endpoint]
    close: Callable[[], None]

    def discard(self) -> None:
        """Close it before its first step, because other ranks could not start theirs."""
        self.training.abandon()
        for endpoint in self.endpoints:
            endpoint.close()
        self.close()


def train(
    inputs: TrainingInputs, method: Method, settings: Settings
) -> DistributedOptimizer:
    """Start the first training of a model, and wrap its optimizer. Collective."""
    runtime = inputs.runtime
    runtime.connect()
    plan = resolve(inputs, method, settings)
    _check_not_yet_trained(inputs.model, runtime)
    if is_compiled_whole(inputs.model):
        warnings.warn(
            "the whole model is compiled, so all gradients become ready when backward ends, "
            "and communication overlaps with nothing. Compile its blocks instead: for block "
            "in model.blocks: block.compile()",
            stacklevel=3,
        )
    started = start(inputs, plan)
    runtime.recorder.begin(plan.spec, plan.short_spec)
    active = ActiveTraining(started.training, started.endpoints)
    wrapped = DistributedOptimizer._wrap(inputs.optimizer, active, runtime)
    runtime.registry.begin(inputs.model, wrapped, active, wrapped.finish)
    runtime.registry.hold(started.training, started.close)
    wrapped._end_if_complete()
    return wrapped


def resolve(inputs: TrainingInputs, method: Method, settings: Settings) -> TrainingPlan:
    """Check everything that is known before a message is sent. Not collective.

    Raises:
        UsageError: The method, the settings, the model and the optimizer do not go together.
    """
    runtime, optimizer = inputs.runtime, inputs.optimizer
    named, asked = method, settings.compression
    if inputs.sampler is not None:
        settings = replace(settings, compression=asked.with_epoch(len(inputs.sampler)))
    if runtime.cluster is not None:
        named = methods.grouped(named, runtime.cluster.groups)
    chosen = with_compression(named, settings)
    check_declared(chosen)
    if runtime.weights is not None:
        check_symmetric(chosen)
    for one in (chosen, settings.compression.code):
        if is_dataclass(one):
            spec.check_values(one.name, one)
    settings = _without_averages(runtime, chosen, settings)
    collective = collectives.make(settings.collective)
    _check_compression(chosen, settings, collective, optimizer)
    if getattr(chosen, "sends_halves", False):
        check_halves(collective)
    parameters = inputs.parameters
    if not parameters:
        raise UsageError("the model has no parameter that requires a gradient")
    if chosen.updates_on == "server":
        _check_servers_update_all(chosen, optimizer, parameters)
    own = default_compression(named)
    full = spec.spec_of(named.name, named, **settings.as_keys(own))
    short = short_spec(named, replace(settings, compression=asked))
    return TrainingPlan(chosen, settings, collective, str(full), short)


def start(
    inputs: TrainingInputs, plan: TrainingPlan, *, anew: bool = True
) -> ConnectedTraining:
    """Start the training of a plan. Collective.

    Args:
        inputs: The model, its optimizer and sampler.
        plan: From `resolve`, equal on all ranks.
        anew: Broadcast rank 0's parameters and buffers first. Otherwise all ranks hold equal ones.

    Raises:
        ModelMismatchError: Models or options differ between ranks. Raised on every rank.
    """
    runtime, model, optimizer = inputs.runtime, inputs.model, inputs.optimizer
    method, settings, collective = plan.method, plan.settings, plan.collective
    parameters = inputs.parameters
    device = parameters[0][1].device
    comm = _comm(runtime, method, inputs.number)
    options = f"{plan.spec} with {type(optimizer).__name__}"
    description = describe(model, options)
    if isinstance(comm, Communicator):
        check_ranks_agree(comm, description, device)
        _close_ended_trainings(comm, runtime.registry, device)
    if anew and isinstance(comm, Communicator) and comm.size > 1:
        broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
        if getattr(method, "symmetric", False):
            # All ranks leave this all-reduce together, so their places in the broadcast's tree
            # do not skew the next steps.
            comm.all_reduce(torch.zeros(1, device=device), "max").wait()
    endpoints, job = _servers(runtime, method, settings, collective)
    _check_one_server_clips(job, endpoints)
    served: ServedModel | None = None
    if method.updates_on == "server":
        kept = settings.buffers == "local"
        total = sum(wire_bytes(parameter) for _, parameter in parameters)
        served = ServedModel(
            runtime.rank,
            optimizer,
            endpoints,
            job,
            options,
            description.tensors,
            untrained=[*_frozen(model), *model.buffers()],
            mixed=() if kept else tuple(model.buffers()),
            loads_untrained=runtime.server_only,
            most_bytes=cast(UpdatesOnServer, method).piece_bytes(total),
        )
    elif isinstance(comm, Communicator):
        comm = collectives.attach(collective, runtime, comm, endpoints, device)
        join = Join(options=options)
        for pending_reply in [endpoint.request(join) for endpoint in endpoints]:
            pending_reply.wait()
    context = TrainingContext(
        runtime,
        model,
        parameters,
        method,
        settings,
        comm,
        inputs.sampler,
        optimizer,
        inputs.number,
    )
    training = Training(context, served)
    _report_warmup(context)
    return ConnectedTraining(training, endpoints, comm.close)


def _report_warmup(context: TrainingContext) -> None:
    """Report the first steps, in which some compressors send more than later."""
    size, compression = context.runtime.size, context.settings.compression
    if size == 1:
        return
    shapes = [wire_shape(parameter) for _, parameter in context.parameters]
    sentence = warmup_message(compression, shapes, torch.float32, size)
    if not sentence:
        return
    if compression != compression.with_epoch(1):
        sentence += (
            "; distribute has no sampler, so the number of steps in an epoch is a guess: set "
            "compression.epoch_steps"
        )
    context.report(sentence)


def _without_averages(runtime: Runtime, method: Method, settings: Settings) -> Settings:
    """The *settings*, without the collective if servers update: workers form no averages then."""
    if method.updates_on != "server" or settings.collective == "native":
        return settings
    if runtime.rank == 0:
        print(
            f"paceline: collective={settings.collective!r} is not used: under "
            f"{method.name} servers apply gradients, and workers form no average",
            file=sys.stderr,
        )
    return replace(settings, collective="native")


def _check_compression(
    method: Method,
    settings: Settings,
    collective: AllReduceAlgorithm,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raise `UsageError` if compressed gradients cannot be averaged or pushed."""
    compression, compressor = settings.compression, settings.compression.code
    check_answers(method, compression, settings.replies)
    if not compression.compresses:
        return
    compressor.check_optimizer(optimizer)
    if method.updates_on == "server":
        check_pushed(method, compression, settings.replies)
        return
    if collective.needs == "servers" and not compressor.linear:
        raise UsageError(
            f"compression {compressor.name!r} with collective={collective.name!r}: compressed "
            "gradients are gathered, and servers only add. Use collective='native', or a linear "
            "compressor such as bf16"
        )
    if getattr(method, "sends_halves", False):
        raise UsageError(
            f"compression {compressor.name!r} with method {method.name!r}: the method "
            "sends averages in two halves, which are not compressed. Leave compression out, or use bsp"
        )


def _frozen(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if not p.requires_grad and p.numel()]


def _comm(
    runtime: Runtime, method: Method, number: int
) -> Communicator | NoCollectives:
    """The communicator of the workers of training *number*."""
    if runtime.server_only:
        methods.check_survives(method)
        return NoCollectives(runtime)
    comm = Communicator(runtime, runtime.registry.next_name())
    if comm.size > 1 and runtime.registry.beside(number):
        # Two models may be in the middle of their steps at the same time, so each needs a
        # separate channel.
        comm = comm.channel("gradients")
    return comm


def _close_ended_trainings(
    comm: Communicator, job: TrainingRegistry, device: torch.device
) -> None:
    """Close the groups and threads of trainings that all workers have ended. Collective."""
    if job.holding:
        in_use = torch.tensor(job.in_use, dtype=torch.uint8, device=device)
        comm.all_reduce(in_use, "max").wait()
        job.close_unused(in_use.tolist())


def _servers(
    runtime: Runtime, method: Method, settings: Settings, collective: AllReduceAlgorithm
) -> tuple[Sequence[Endpoint], ServerJob]:
    """This training's servers, if it has any. Collective."""
    holds = cast(UpdatesOnServer, method) if method.updates_on == "server" else None
    groups = None
    # Both may raise an error, on every rank, before a server is started.
    if holds is not None:
        holds.server(runtime.size)
        groups = holds.groups(runtime.size)
    # A single worker does not compress, as under methods that average between workers.
    pushed = holds is not None and runtime.size > 1
    compressed = pushed and settings.compression.compresses
    job = ServerJob(
        method=holds,
        spec=str(spec.spec_of(method.name, method)) if holds is not None else "",
        place=settings.servers,
        clip_norm=settings.clip_norm if method.clips == "mean" else math.inf,
        compression=spec_of_code(settings.compression) if compressed else "",
        replies=settings.replies if compressed else "full",
        groups=groups,
    )
    if holds is None and collective.needs != "servers":
        return (), job
    return runtime.services(job.services), job


def _check_one_server_clips(job: ServerJob, endpoints: Sequence[Endpoint]) -> None:
    """Raise `UsageError` if several servers would have to clip the mean gradient.

    Each knows only the norm of its own shard. All workers have the same servers, so all raise.
    """
    if job.method is None or job.clip_norm == math.inf or len(endpoints) < 2:
        return
    for endpoint in endpoints:
        endpoint.close()
    raise UsageError(
        f"clip_norm={job.clip_norm:g} under {job.method.name} with {len(endpoints)} "
        "servers: servers clip the mean gradient, and each knows only the norm of its own "
        "shard. Use one server (servers='embedded', or one address), or bsp, which clips the "
        "mean on every worker"
    )


def _check_servers_update_all(
    method: Method,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
) -> None:
    """Raise `UsageError` unless servers support the optimizer, and it has all trainable parameters."""
    check_servers_can_hold(optimizer)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, parameter in parameters if id(parameter) not in known]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UsageError(
            f"parameter {missing[0]!r}{more} requires a gradient, but the optimizer does "
            f"not have it: under {method.name} servers update the optimizer's parameters, and "
            "other gradients are not averaged. Freeze it (requires_grad_(False)), give it to "
            "the optimizer, or use bsp, which averages every gradient"
        )


def _check_not_yet_trained(model: torch.nn.Module, runtime: Runtime) -> None:
    mine = {id(parameter) for parameter in model.parameters()}
    for other in runtime.registry.unfinished:
        if any(id(p) in mine for p in other.model.parameters()):
            raise UsageError(
                "distribute was called before for a model with some of these parameters: "
                "their gradients would be averaged twice. Use one optimizer for all of "
                "them, or call finish() on the first"
            )


# ---- checks that all ranks have the same model and options ----


class ModelDescription(msgspec.Struct, array_like=True):
    """The properties that must be equal on all ranks.

    *tensors* are lines such as ``fc.weight float32[10x64]``. They include strides if these decide
    the order in which a gradient's elements are sent.
    """

    options: str
    tensors: list[str]


def describe(model: torch.nn.Module, options: str) -> ModelDescription:
    """Describe the model's tensors, in registration order, and the *options* of training."""
    lines = []
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else " frozen"
        lines.append(f"{name} {_shape(parameter)}{_strides(parameter)}{frozen}")
    for name, buffer in model.named_buffers():
        lines.append(f"buffer {name} {_shape(buffer)}")
    return ModelDescription(options, lines)


def check_ranks_agree(comm: Comm, mine: ModelDescription, device: torch.device) -> None:
    """Raise `ModelMismatchError` on every rank if any rank's description differs.

    The error names the first difference and a rank that has it. If all are equal, it costs one
    all-reduce of 64 bytes, and no memory per rank.
    """
    encoded = msgspec.json.encode(mine)
    digest = hashlib.sha256(encoded).digest()
    # Four numbers: the text's size, which a gather needs, and a digest.
    words = [len(encoded)] + [
        int.from_bytes(digest[i : i + 7], "big") for i in range(0, 21, 7)
    ]
    # The maximum and the minimum of each number: if they are equal, all ranks have equal texts.
    bounds = torch.tensor(
        [*words, *(-word for word in words)], dtype=torch.int64, device=device
    )
    comm.all_reduce(bounds, "max").wait()
    if bool((bounds[:4] == -bounds[4:]).all()):
        return

    own = torch.tensor(words, dtype=torch.int64, device=device)
    everyone = torch.empty(4 * comm.size, dtype=torch.int64, device=device)
    comm.all_gather(everyone, own).wait()
    longest = int(everyone[::4].max())
    text = torch.zeros(longest, dtype=torch.uint8, device=device)
    text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    texts = torch.empty(longest * comm.size, dtype=torch.uint8, device=device)
    comm.all_gather(texts, text).wait()
    descriptions = [
        msgspec.json.decode(bytes(part[: int(length)].tolist()), type=ModelDescription)
        for part, length in zip(
            texts.view(comm.size, longest), everyone[::4], strict=True
        )
    ]
    raise ModelMismatchError(_first_difference(descriptions))


def _first_difference(descriptions: Sequence[ModelDescription]) -> str:
    reference = descriptions[0]
    for rank, other in enumerate(descriptions):
        if other.options != reference.options:
            return (
                f"ranks train with different options: rank 0 has {reference.options!r}, "
                f"rank {rank} has {other.options!r}; call distribute with the same "
                "arguments on every rank"
            )
        for ours, theirs in zip(reference.tensors, other.tensors, strict=False):
            if ours != theirs:
                return (
                    f"ranks hold different models: rank 0 has {ours!r} where rank {rank} "
                    f"has {theirs!r}; build the same model, in the same memory format, on "
                    "every rank"
                )
        if len(other.tensors) != len(reference.tensors):
            longer = max(reference.tensors, other.tensors, key=len)
            extra = longer[min(len(reference.tensors), len(other.tensors))]
            return (
                f"ranks hold different models: rank 0 has {len(reference.tensors)} "
                f"tensors and rank {rank} has {len(other.tensors)}; the first that only "
                f"one of them has is {extra!r}"
            )
    raise AssertionError("digests differ but descriptions do not")


def _shape(tensor: torch.Tensor) -> str:
    sizes = "x".join(str(size) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def _strides(parameter: torch.Tensor) -> str:
    """Strides, unless they are a contiguous tensor's. Dimensions of size 1 do not count."""
    strides = strides_in_bucket(parameter)
    contiguous = torch.empty(parameter.shape, device="meta").stride()
    rows = zip(strides, contiguous, parameter.shape, strict=True)
    if all(own == other or size == 1 for own, other, size in rows):
        return ""
    sizes = zip(strides, parameter.shape, strict=True)
    return " strides " + "x".join(str(s) if size > 1 else "1" for s, size in sizes)
