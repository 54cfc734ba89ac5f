"""`distribute`: one line that makes a training script data-parallel."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from paceline import collectives, methods, spec
from paceline.collectives.alone import AloneComm
from paceline.collectives.comm import TorchComm
from paceline.collectives.halves import check_halves
from paceline.compression import Identity, make
from paceline.errors import UsageError
from paceline.exchange import broadcast_tensors
from paceline.guards import check_trained_by_nobody_else
from paceline.interfaces import (
    Collective,
    Compressor,
    Endpoint,
    Method,
    ServerJob,
    UpdatesOnServer,
    World,
)
from paceline.job import Job
from paceline.messages import Answers, Join
from paceline.optimizer import DistributedOptimizer
from paceline.pieces import check_servers_can_hold
from paceline.sampler import Sampler
from paceline.server.code_checks import check_answers, check_pushed, spec_of_code
from paceline.server.remote import RemoteParameters
from paceline.settings import UNSAID, ModuleBuffers, Settings, Sums
from paceline.startup import check_same_everywhere, describe
from paceline.tensors import wire_bytes
from paceline.torch_private import is_compiled_whole
from paceline.training import MakeRemote, Training
from paceline.training.method_hooks import check_declared, check_hooks
from paceline.worlds.join import join_world


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    method: str | Method | None = None,
    fusion: str = "optimal",
    buffers: ModuleBuffers = "rank0",
    check_finite: bool = False,
    collective: str = "native",
    compression: str | Compressor | None = None,
    servers: str = "auto",
    sums: Sums = "rank",
    sampler: Sampler | None = None,
    clip_norm: float | None = None,
    answers: Answers = "dense",
) -> DistributedOptimizer:
    """Train *model* data-parallel; returns the optimizer to use from now on.

    *method* is a name (``"bsp"``, the default), a spec (``"bsp:fusion=wfbp"``) or a method object;
    *fusion* the rule that groups gradients into buckets (see `paceline.fusion`):
    ``"optimal"``, planned from measured times in the first steps and kept if it is faster
    than DDP's in a trial; ``"ddp"``, ``"single"``, ``"wfbp"``, ``"mg-wfbp"``, or bucket
    lengths such as ``"3+5+2"``. Measured plans, and so the order of sums on three workers
    or more, differ from run to run: take a fixed rule for bit-equal runs. *buffers*: once a step the model's buffers (BatchNorm's statistics) become
    rank 0's (``"rank0"``, as under DDP), their mean over ranks (``"mean"``; whole numbers:
    their maximum) or stay each rank's own (``"local"``). *check_finite*: raise
    `GradientError` naming the parameter when a mean gradient is not finite; leave it off
    with a GradScaler. *sampler*: weight gradients by the samples that it deals out, one
    backward pass a batch. *collective*: how averages are formed, ``"native"``,
    ``"parameter-server"``, ``"hierarchical"`` ... (see docs/collectives.md). *compression*: what is sent of gradients where workers form means
    of them, or of what parameters have moved where workers average these, or of what is
    pushed to servers that update: a name (``"bf16"``), a spec
    (``"int8:residuals=true"``, see docs/compressors.md) or a compressor object. Unsaid, it is
    ``"none"``, but for a method with a code of its own. A worker alone sends nothing, and loses
    nothing. *servers*: where servers are, ``"embedded"`` (one beside rank 0),
    ``"per-node"``, ``"dedicated"`` (on hosts of their own), ``"auto"`` (dedicated where
    there are any, else embedded) or ``"HOST:PORT+HOST:PORT"``.
    *sums*: servers add up in ``"rank"`` order, so that bits repeat, or as gradients come
    (``"arrival"``), which holds less. *clip_norm*: scale gradients down to this norm before they are
    applied, as ``torch.nn.utils.clip_grad_norm_`` does: the mean gradient, or
    (``paceline methods`` says where) each worker's own before it is sent, and then all of it leaves
    after backward. *answers*: where servers update and gradients are compressed, they answer
    with parameters (``"dense"``), or with compressed ``"differences"`` from what each worker holds, of
    which they keep a copy. A spec given on the command line wins over all of these.

    Every rank calls this with the same model, options and kind of optimizer, and all
    start from rank 0's parameters and buffers. Raises `UsageError` for what cannot work,
    `ModelMismatchError` on every rank where ranks differ.
    """
    _check_arguments(model, optimizer)
    world = join_world()
    world.connect()
    settings = Settings(
        fusion=fusion,
        buffers=buffers,
        check_finite=check_finite,
        collective=collective,
        compression=_made(compression),
        servers=servers,
        sums=sums,
        clip_norm=math.inf if clip_norm is None else clip_norm,
        answers=answers,
    )
    named, settings = _resolve(world, method, settings)
    if world.cluster is not None:
        named = methods.grouped(named, world.cluster.groups)
    chosen = _compressed(named, settings)
    check_declared(chosen)
    check_hooks(chosen)
    settings = _without_averages(world, chosen, settings)
    forming = collectives.make(settings.collective)
    _check_compression(chosen, settings, forming, optimizer)
    if getattr(chosen, "sends_halves", False):
        check_halves(forming)
    parameters = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    ]
    if not parameters:
        raise UsageError("the model has no parameter that requires a gradient")

    if chosen.updates_on == "server":
        _check_servers_update_all(chosen, optimizer, parameters)
    _check_not_yet_trained(model, world)
    comm = _comm(world, chosen)
    own = own_compression(named)
    full_spec = str(spec.spec_of(named.name, named, **settings.as_keys(own)))
    options = f"{full_spec} with {type(optimizer).__name__}"
    description = describe(model, options)
    device = parameters[0][1].device
    if isinstance(comm, TorchComm):
        check_same_everywhere(comm, description, device)
        _let_go_of_earlier(comm, world.job, device)
    if is_compiled_whole(model):
        warnings.warn(
            "the whole model is compiled, so all gradients become ready at once when "
            "backward ends, and communication overlaps with nothing; compile its blocks "
            "instead: for block in model.blocks: block.compile()",
            stacklevel=2,
        )
    if isinstance(comm, TorchComm) and comm.size > 1:
        broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
    endpoints, job = _servers(world, chosen, settings, forming)
    remote: MakeRemote | None = None
    if chosen.updates_on == "server":
        kept = settings.buffers == "local"
        total = sum(wire_bytes(parameter) for _, parameter in parameters)
        remote = partial(
            RemoteParameters,
            world.rank,
            optimizer,
            endpoints,
            job,
            options,
            description.tensors,
            [*_frozen(model), *model.buffers()],
            () if kept else tuple(model.buffers()),
            world.alone,
            most_bytes=cast(UpdatesOnServer, chosen).piece_bytes(total),
        )
    elif isinstance(comm, TorchComm):
        comm = collectives.over(forming, world, comm, endpoints, device)
        join = Join(options=options, sums=settings.sums)
        for reception in [endpoint.request(join) for endpoint in endpoints]:
            reception.wait()
    training = Training(
        world, model, parameters, chosen, settings, comm, sampler, remote, optimizer
    )
    brief = spec.Spec(named.name, spec.changed(named) | settings.changed_keys(own))
    world.journal.begin(full_spec, str(brief))
    wrapped = DistributedOptimizer._wrap(optimizer, training, world, endpoints)
    world.job.begin(model, wrapped, training, comm.close)
    world.job.at_exit(wrapped.finish)
    return wrapped


def _without_averages(world: World, method: Method, settings: Settings) -> Settings:
    """Where servers update nobody forms averages: *settings* without what says how."""
    if method.updates_on != "server" or settings.collective == "native":
        return settings
    if world.rank == 0:
        print(
            f"paceline: collective={settings.collective!r} is not used: under "
            f"{method.name} servers take gradients, and nobody forms their average",
            file=sys.stderr,
        )
    return replace(settings, collective="native")


def _check_compression(
    method: Method,
    settings: Settings,
    collective: Collective,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Raise `UsageError` where nobody forms a mean of codes."""
    compressor = settings.compression
    check_answers(method, compressor, settings.answers)
    if compressor == Identity():
        return
    compressor.suits(optimizer)
    if method.updates_on == "server":
        check_pushed(method, compressor, settings.answers)
        return
    if collective.needs_servers and not compressor.linear:
        raise UsageError(
            f"compression {compressor.name!r} with collective={collective.name!r}: its codes "
            "are gathered, and a server only adds; use collective='native', or a linear "
            "compression, such as bf16"
        )
    if getattr(method, "sends_halves", False):
        raise UsageError(
            f"compression {compressor.name!r} with method {method.name!r}: it sends a mean "
            "in two halves, as it is; leave compression out, or use bsp"
        )


def _frozen(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if not p.requires_grad and p.numel()]


def _comm(world: World, method: Method) -> TorchComm | AloneComm:
    """How this training's workers meet."""
    if world.alone:
        methods.check_survives(method)
        return AloneComm(world)
    comm = TorchComm(world, f"training {world.journal.trainings}")
    if comm.size > 1 and world.job.unfinished:
        # Two models may be in the middle of their steps at once: each has a queue.
        comm = comm.channel("gradients")
    return comm


def _let_go_of_earlier(comm: TorchComm, job: Job, device: torch.device) -> None:
    """Close the groups and threads of trainings that all workers have done with. Collective."""
    if job.holding:
        in_use = torch.tensor(job.in_use, dtype=torch.uint8, device=device)
        comm.all_reduce(in_use, "max").wait()
        job.let_go(in_use.tolist())


def _servers(
    world: World, method: Method, settings: Settings, collective: Collective
) -> tuple[Sequence[Endpoint], ServerJob]:
    """This training's servers, if it has any. Collective."""
    holds = cast(UpdatesOnServer, method) if method.updates_on == "server" else None
    groups = None
    if holds is not None:  # both may refuse: on every rank, before one is started
        holds.server(world.size)
        groups = holds.groups(world.size)
    # One worker alone is not compressed, as where workers form means.
    pushed = holds is not None and world.size > 1
    compressed = pushed and settings.compression != Identity()
    job = ServerJob(
        method=holds,
        spec=str(spec.spec_of(method.name, method)) if holds is not None else "",
        place=settings.servers,
        sums=settings.sums,
        clip_norm=settings.clip_norm if method.clips == "mean" else math.inf,
        compression=spec_of_code(settings.compression) if compressed else "",
        answers=settings.answers if compressed else "dense",
        groups=groups,
    )
    if holds is None and not collective.needs_servers:
        return (), job
    return world.services(job.services), job


def _check_servers_update_all(
    method: Method,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
) -> None:
    """Raise `UsageError` unless servers can have the optimizer, and it has all that is
    trained."""
    check_servers_can_hold(optimizer)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, parameter in parameters if id(parameter) not in known]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UsageError(
            f"parameter {missing[0]!r}{more} requires a gradient, but the optimizer does "
            f"not have it: under {method.name} servers update what the optimizer has, and "
            "nobody averages the rest. Freeze it (requires_grad_(False)), give it to the "
            "optimizer, or use bsp, which averages every gradient"
        )


def _check_not_yet_trained(model: torch.nn.Module, world: World) -> None:
    mine = {id(parameter) for parameter in model.parameters()}
    for other in world.job.unfinished:
        if any(id(p) in mine for p in other.model.parameters()):
            raise UsageError(
                "distribute was called before for a model with some of these parameters: "
                "their gradients would be averaged twice. Use one optimizer for all of "
                "them, or call finish() on the first"
            )


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


def _resolve(
    world: World, method: str | Method | None, settings: Settings
) -> tuple[Method, Settings]:
    """The method object and the settings, the command line's before the script's."""
    override = world.job.options.method
    if override is None and method is not None and not isinstance(method, str):
        return _fitted(method, settings)
    text = override or method or "bsp"
    assert isinstance(text, str)
    if override is not None and method is not None and world.rank == 0:
        print(
            f"paceline: --method {override} overrides the script's {method!r}",
            file=sys.stderr,
        )
    return read_spec(text, settings)


def read_spec(text: str, settings: Settings | None = None) -> tuple[Method, Settings]:
    """The method and the settings of a spec; *settings* are those that it does not name.

    Raises `UsageError` that names what is unknown and what there is.
    """
    chosen, rest = methods.make(spec.parse(text), set(spec.field_types(Settings)))
    settings = (settings or Settings()).changed_by(rest)
    chosen, settings = _fitted(chosen, settings)
    collectives.make(settings.collective)
    return chosen, settings


def own_compression(method: Method) -> Compressor:
    """What a method's means are compressed with where the user says nothing."""
    own: str | None = getattr(method, "default_compression", None)
    return UNSAID if own is None else make(own)


def _made(compression: str | Compressor | None) -> Compressor:
    if compression is None:
        return UNSAID
    return make(compression) if isinstance(compression, str) else compression


def _fitted(method: Method, settings: Settings) -> tuple[Method, Settings]:
    """The two, as they go together. Raises `UsageError` where they do not."""
    settings = _with_collective_of(method, settings)
    if settings.compression is UNSAID:
        settings = replace(settings, compression=own_compression(method))
    _compressed(method, settings)
    return method, settings


def _compressed(method: Method, settings: Settings) -> Method:
    """The method as it is under the settings' compression. Raises `UsageError` where what it
    sends cannot be compressed."""
    compressor = settings.compression
    if compressor == Identity() or not hasattr(method, "compressed_by"):
        return method
    compressor.suits_differences()
    compressed: Method = method.compressed_by(compressor)
    return compressed


def _with_collective_of(method: Method, settings: Settings) -> Settings:
    """OSP has a key ``collective`` of its own: of those forms in which workers meet, all but
    "native" also say how averages are formed."""
    own: str = getattr(method, "collective", "native")
    if own == "native" or method.updates_on == "server":
        return settings
    return replace(settings, collective=own)
