"""A training begins: what a method and its settings need here is checked, and then made.

`prepare` refuses what cannot work, and sends nothing; `begin` makes the training, and is collective.
A model may be given to both again, when the training before has ended.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from paceline import methods, spec
from paceline.collectives import registry as collectives
from paceline.collectives.communicator import TorchComm
from paceline.collectives.no_collectives import AloneComm
from paceline.collectives.reduce_scatter import check_halves
from paceline.compression import Identity, warm_up_of
from paceline.core.context import TrainingContext
from paceline.core.initial_sync import check_same_everywhere, describe
from paceline.core.method_hooks import check_declared
from paceline.core.optimizer import ActiveTraining, DistributedOptimizer
from paceline.core.sampler import Sampler
from paceline.core.settings import (
    Settings,
    default_compression,
    short_spec,
    with_compression,
)
from paceline.core.sync import broadcast_tensors
from paceline.core.training import MakeRemote, Training
from paceline.errors import UsageError
from paceline.interfaces import (
    Collective,
    Compressor,
    Endpoint,
    Method,
    Runtime,
    ServerJob,
    UpdatesOnServer,
)
from paceline.interfaces.buckets import wire_bytes, wire_shape
from paceline.interfaces.server_messages import Join
from paceline.interfaces.trainings import Job
from paceline.parameter_server.client.remote_model import RemoteParameters
from paceline.parameter_server.optim.pieces import check_servers_can_hold
from paceline.parameter_server.state_machine.compression_checks import (
    check_answers,
    check_pushed,
    spec_of_code,
)
from paceline.torch_internals import is_compiled_whole


@dataclass(frozen=True)
class Subject:
    """What is trained on one worker. *number*: of this training among the script's."""

    runtime: Runtime
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    sampler: Sampler | None = None
    number: int = 0

    @property
    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Those that are trained, in registration order."""
        return [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.numel()
        ]


@dataclass(frozen=True)
class Prepared:
    """How it is to be trained: nothing that is known before anything is sent forbids it.
    *spec* is the full one, *brief* what of it is not as by default."""

    method: Method
    settings: Settings
    forming: Collective
    spec: str
    brief: str


@dataclass(frozen=True)
class Made:
    """A training; *close* lets go of what it holds once all workers have done with it."""

    training: Training
    endpoints: Sequence[Endpoint]
    close: Callable[[], None]

    def give_up(self) -> None:
        """It is not to be used, after all: others could not make theirs."""
        self.training.abandon()
        for endpoint in self.endpoints:
            endpoint.close()
        self.close()


def train(subject: Subject, method: Method, settings: Settings) -> DistributedOptimizer:
    """Begin the first training of a model; returns the optimizer to use from now on. Collective."""
    runtime = subject.runtime
    runtime.connect()
    prepared = prepare(subject, method, settings)
    _check_not_yet_trained(subject.model, runtime)
    if is_compiled_whole(subject.model):
        warnings.warn(
            "the whole model is compiled, so all gradients become ready at once when "
            "backward ends, and communication overlaps with nothing; compile its blocks "
            "instead: for block in model.blocks: block.compile()",
            stacklevel=3,
        )
    made = begin(subject, prepared)
    runtime.journal.begin(prepared.spec, prepared.brief)
    active = ActiveTraining(made.training, made.endpoints)
    wrapped = DistributedOptimizer._wrap(subject.optimizer, active, runtime)
    runtime.job.begin(subject.model, wrapped, active, wrapped.finish)
    runtime.job.hold(made.training, made.close)
    wrapped._end_if_complete()
    return wrapped


def prepare(subject: Subject, method: Method, settings: Settings) -> Prepared:
    """Check what is known before anything is sent. Raises `UsageError`."""
    runtime, optimizer = subject.runtime, subject.optimizer
    named, asked = method, settings.compression
    if subject.sampler is not None:
        settings = replace(settings, compression=asked.in_epochs(len(subject.sampler)))
    if runtime.cluster is not None:
        named = methods.grouped(named, runtime.cluster.groups)
    chosen = with_compression(named, settings)
    check_declared(chosen)
    settings = _without_averages(runtime, chosen, settings)
    forming = collectives.make(settings.collective)
    _check_compression(chosen, settings, forming, optimizer)
    if getattr(chosen, "sends_halves", False):
        check_halves(forming)
    parameters = subject.parameters
    if not parameters:
        raise UsageError("the model has no parameter that requires a gradient")
    if chosen.updates_on == "server":
        _check_servers_update_all(chosen, optimizer, parameters)
    own = default_compression(named)
    full = spec.spec_of(named.name, named, **settings.as_keys(own))
    brief = short_spec(named, replace(settings, compression=asked))
    return Prepared(chosen, settings, forming, str(full), brief)


def begin(subject: Subject, prepared: Prepared, *, anew: bool = True) -> Made:
    """Make the training. *anew*: all workers begin with rank 0's model; else with what they have,
    which is the same. Collective. Raises `ModelMismatchError` on every rank where ranks differ."""
    runtime, model, optimizer = subject.runtime, subject.model, subject.optimizer
    method, settings, forming = prepared.method, prepared.settings, prepared.forming
    parameters = subject.parameters
    device = parameters[0][1].device
    comm = _comm(runtime, method, subject.number)
    options = f"{prepared.spec} with {type(optimizer).__name__}"
    description = describe(model, options)
    if isinstance(comm, TorchComm):
        check_same_everywhere(comm, description, device)
        _let_go_of_earlier(comm, runtime.job, device)
    if anew and isinstance(comm, TorchComm) and comm.size > 1:
        broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
    endpoints, job = _servers(runtime, method, settings, forming)
    remote: MakeRemote | None = None
    if method.updates_on == "server":
        kept = settings.buffers == "local"
        total = sum(wire_bytes(parameter) for _, parameter in parameters)
        remote = partial(
            RemoteParameters,
            runtime.rank,
            optimizer,
            endpoints,
            job,
            options,
            description.tensors,
            [*_frozen(model), *model.buffers()],
            () if kept else tuple(model.buffers()),
            runtime.alone,
            most_bytes=cast(UpdatesOnServer, method).piece_bytes(total),
        )
    elif isinstance(comm, TorchComm):
        comm = collectives.over(forming, runtime, comm, endpoints, device)
        join = Join(options=options)
        for reception in [endpoint.request(join) for endpoint in endpoints]:
            reception.wait()
    context = TrainingContext(
        runtime,
        model,
        parameters,
        method,
        settings,
        comm,
        subject.sampler,
        optimizer,
        subject.number,
    )
    training = Training(context, remote)
    _say_warm_up(subject, settings.compression)
    return Made(training, endpoints, comm.close)


def _say_warm_up(subject: Subject, compressor: Compressor) -> None:
    """Tell people of first steps in which more is sent."""
    runtime = subject.runtime
    if runtime.size == 1:
        return
    shapes = [wire_shape(parameter) for _, parameter in subject.parameters]
    sentence = warm_up_of(compressor, shapes, torch.float32, runtime.size)
    if not sentence:
        return
    if compressor != compressor.in_epochs(1):
        sentence += (
            "; distribute was given no sampler, so how many steps an epoch has is a guess: "
            "say it as compression.epoch_steps"
        )
    known = sentence in runtime.journal.notes
    runtime.journal.note(sentence)
    if runtime.rank == 0 and not known:
        print(f"paceline: {sentence}", file=sys.stderr)


def _without_averages(runtime: Runtime, method: Method, settings: Settings) -> Settings:
    """Where servers update nobody forms averages: *settings* without what says how."""
    if method.updates_on != "server" or settings.collective == "native":
        return settings
    if runtime.rank == 0:
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
    check_answers(method, compressor, settings.replies)
    if compressor == Identity():
        return
    compressor.suits(optimizer)
    if method.updates_on == "server":
        check_pushed(method, compressor, settings.replies)
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


def _comm(runtime: Runtime, method: Method, number: int) -> TorchComm | AloneComm:
    """How the workers of training *number* meet."""
    if runtime.alone:
        methods.check_survives(method)
        return AloneComm(runtime)
    comm = TorchComm(runtime, runtime.job.next_name())
    if comm.size > 1 and runtime.job.beside(number):
        # Two models may be in the middle of their steps at once: each has a queue.
        comm = comm.channel("gradients")
    return comm


def _let_go_of_earlier(comm: TorchComm, job: Job, device: torch.device) -> None:
    """Close the groups and threads of trainings that all workers have done with. Collective."""
    if job.holding:
        in_use = torch.tensor(job.in_use, dtype=torch.uint8, device=device)
        comm.all_reduce(in_use, "max").wait()
        job.close_unused(in_use.tolist())


def _servers(
    runtime: Runtime, method: Method, settings: Settings, collective: Collective
) -> tuple[Sequence[Endpoint], ServerJob]:
    """This training's servers, if it has any. Collective."""
    holds = cast(UpdatesOnServer, method) if method.updates_on == "server" else None
    groups = None
    if holds is not None:  # both may refuse: on every rank, before one is started
        holds.server(runtime.size)
        groups = holds.groups(runtime.size)
    # One worker alone is not compressed, as where workers form means.
    pushed = holds is not None and runtime.size > 1
    compressed = pushed and settings.compression != Identity()
    job = ServerJob(
        method=holds,
        spec=str(spec.spec_of(method.name, method)) if holds is not None else "",
        place=settings.servers,
        clip_norm=settings.clip_norm if method.clips == "mean" else math.inf,
        compression=spec_of_code(settings.compression) if compressed else "",
        replies=settings.replies if compressed else "full",
        groups=groups,
    )
    if holds is None and not collective.needs_servers:
        return (), job
    return runtime.services(job.services), job


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


def _check_not_yet_trained(model: torch.nn.Module, runtime: Runtime) -> None:
    mine = {id(parameter) for parameter in model.parameters()}
    for other in runtime.job.unfinished:
        if any(id(p) in mine for p in other.model.parameters()):
            raise UsageError(
                "distribute was called before for a model with some of these parameters: "
                "their gradients would be averaged twice. Use one optimizer for all of "
                "them, or call finish() on the first"
            )
