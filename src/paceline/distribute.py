"""`distribute`: one line that makes a training script data-parallel."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from paceline import methods, spec
from paceline.collectives.alone import AloneComm
from paceline.collectives.comm import TorchComm
from paceline.collectives.server import ServerComm
from paceline.errors import UsageError
from paceline.exchange import broadcast_tensors
from paceline.interfaces import Endpoint, Method, ServerJob, UpdatesOnServer, World
from paceline.messages import Join
from paceline.sampler import Sampler
from paceline.server.remote import RemoteParameters
from paceline.settings import CollectiveName, ModuleBuffers, Settings, Sums
from paceline.startup import check_same_everywhere, describe
from paceline.tensors import Bucket
from paceline.torch_private import is_compiled_whole
from paceline.training import MakeRemote, Training
from paceline.worlds.join import join_world


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    method: str | Method | None = None,
    fusion: str = "optimal",
    buffers: ModuleBuffers = "rank0",
    check_finite: bool = False,
    collective: CollectiveName = "native",
    servers: str = "auto",
    sums: Sums = "rank",
    sampler: Sampler | None = None,
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
    backward pass a batch. *collective*: ``"native"``, or ``"parameter-server"`` to form
    averages at servers. *servers*: where servers are, ``"embedded"`` (one beside rank 0),
    ``"per-node"``, ``"dedicated"`` (on hosts of their own), ``"auto"`` (dedicated where
    there are any, else embedded) or ``"HOST:PORT+HOST:PORT"``.
    *sums*: servers add up in ``"rank"`` order, so that bits repeat, or as gradients come
    (``"arrival"``), which holds less. A spec given on the command line wins over all of these.

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
        servers=servers,
        sums=sums,
    )
    chosen, settings = _resolve(world, method, settings)
    parameters = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    ]
    if not parameters:
        raise UsageError("the model has no parameter that requires a gradient")

    _check_not_yet_trained(model, world)
    comm: TorchComm | AloneComm
    if world.alone:
        if chosen.updates_on != "server":
            raise UsageError(
                f"method {chosen.name!r} under --survive: its workers meet in collectives, "
                "which a death stops. Use one whose server updates: asp, ssp or backup"
            )
        comm = AloneComm(world)
    else:
        comm = TorchComm(world, f"training {world.journal.trainings}")
    if (
        isinstance(comm, TorchComm)
        and comm.size > 1
        and not all(_is_finished(other) for _, other in world.trained)
    ):
        # Two models may be in the middle of their steps at once: each has a queue.
        comm = comm.channel("gradients")
    full_spec = str(spec.spec_of(chosen.name, chosen, **settings.as_keys()))
    options = f"{full_spec} with {type(optimizer).__name__}"
    device = parameters[0][1].device
    if isinstance(comm, TorchComm):
        check_same_everywhere(comm, describe(model, options), device)
    if is_compiled_whole(model):
        warnings.warn(
            "the whole model is compiled, so all gradients become ready at once when "
            "backward ends, and communication overlaps with nothing; compile its blocks "
            "instead: for block in model.blocks: block.compile()",
            stacklevel=2,
        )
    if isinstance(comm, TorchComm) and comm.size > 1:
        broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
    remote: MakeRemote | None = None
    endpoints: Sequence[Endpoint] = ()
    if chosen.updates_on == "server" or settings.collective == "parameter-server":
        holds = cast(UpdatesOnServer, chosen) if chosen.updates_on == "server" else None
        check = holds.server(world.size) if holds is not None else None
        del check  # made for its refusals: on every rank, before a server is started
        job = ServerJob(
            training=world.journal.trainings,
            method=holds,
            spec=str(spec.spec_of(chosen.name, chosen)) if holds is not None else "",
            place=settings.servers,
            sums=settings.sums,
        )
        endpoints = world.servers(job)
        if holds is not None:
            kept = settings.buffers == "local"
            remote = partial(
                _remote,
                world.rank,
                optimizer,
                endpoints,
                job,
                options,
                () if kept else tuple(model.buffers()),
            )
        elif isinstance(comm, TorchComm):
            comm = ServerComm(world, comm.name, endpoints, comm.process_group)
            join = Join(options=options, sums=settings.sums)
            for reception in [endpoint.request(join) for endpoint in endpoints]:
                reception.wait()
    training = Training(
        world, model, parameters, chosen, settings, comm, sampler, remote
    )
    world.journal.begin(full_spec)
    wrapped = DistributedOptimizer._wrap(optimizer, training, world, endpoints)
    world.trained.append((model, wrapped))
    world.at_exit(wrapped.finish)
    world.at_exit(comm.close)
    return wrapped


def _remote(
    rank: int,
    optimizer: torch.optim.Optimizer,
    endpoints: Sequence[Endpoint],
    job: ServerJob,
    options: str,
    model_buffers: Sequence[torch.Tensor],
    buckets: list[Bucket],
    weight: Callable[[], float],
) -> RemoteParameters:
    return RemoteParameters(
        rank, buckets, optimizer, endpoints, job, options, weight, model_buffers
    )


class TrainingEnded(SystemExit):
    """Ends the script after ``--steps N``: exit status 0, wherever the script loops."""


class DistributedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, in step with all other workers.

    It is a `torch.optim.Optimizer` whose groups, state and defaults are those of the one
    that was wrapped, so schedulers, scalers and checkpoints work as they did. Made by
    `distribute`, not by hand.
    """

    _inner: torch.optim.Optimizer
    _training: Training
    _world: World
    _endpoints: Sequence[Endpoint]
    _finished: bool

    @classmethod
    def _wrap(
        cls,
        inner: torch.optim.Optimizer,
        training: Training,
        world: World,
        endpoints: Sequence[Endpoint],
    ) -> DistributedOptimizer:
        self = cls.__new__(cls)
        self._inner, self._training, self._world = inner, training, world
        self._endpoints = endpoints
        self._finished = False
        # Not __init__: it would copy the groups. What unpickling does sets up the rest.
        self.__setstate__({})
        return self

    # ---- the wrapped optimizer's own ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self._inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as torch's optimizers do."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, in torch's own form; asked of the servers, where these
        update."""
        if not self._training.updates_on_server or self._finished:
            return self._inner.state_dict()
        self._inner.state.update(self._training.remote.state())
        state: dict[str, Any] = self._inner.state_dict()
        self._inner.state.clear()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict`, or the unwrapped optimizer's, gave. Where servers update,
        they take rank 0's; every rank calls this, between steps."""
        self._inner.load_state_dict(state_dict)
        if self._training.updates_on_server:
            self._training.remote.load_state(dict(self._inner.state))
            self._inner.state.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parameters' buckets are made when training begins."""
        raise UsageError(
            "add_param_group after distribute: gradients of new parameters would not be "
            "averaged. Add the group first, then call distribute"
        )

    def __repr__(self) -> str:
        return f"Distributed[{self._world.journal.method}]({self._inner!r})"

    # ---- training ----

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, loss: Any = None
    ) -> float | None:
        """Update the parameters.

        *loss* is this worker's loss, where a method wants to see it (none does yet); it
        is logged as ``loss``. Raises `UsageError` after `finish`.
        """
        if self._finished:
            raise UsageError(
                "step() after finish(): the other workers no longer wait for this one"
            )
        if loss is not None:
            self._world.journal.log({"loss": loss})
        result: float | None = None
        if self._training.updates_on_server:
            if closure is not None:
                raise UsageError(
                    "step(closure): the server updates; call backward(), then step()"
                )
            self._training.before_update()
        elif closure is None:
            self._training.before_update()
            result = self._inner.step()
        else:
            result = self._inner.step(closure)
        self._training.after_update()
        if not self._sets_the_pace():
            return result
        self._world.journal.step()
        done = self.first_step + len(self._world.journal.steps)
        if self._world.options.steps and done >= self._world.options.steps:
            self.finish()
            raise TrainingEnded(0)
        return result

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined it: 0, but for a worker
        that was started again (``paceline run --survive``)."""
        return self._training.first_step

    def _sets_the_pace(self) -> bool:
        """Of several optimizers the first one's steps are counted and measured: the others
        step within them."""
        for _, other in self._world.trained:
            if not _is_finished(other):
                return other is self
        return True

    def no_sync(self) -> Any:
        """``with optimizer.no_sync():`` backward passes only accumulate, nothing is sent.

        The first backward pass outside it averages what was accumulated.
        """
        return self._training.no_sync()

    def finish(self) -> None:
        """This worker is out of data: keep the others company until all are.

        Afterwards all models are equal; the optimizer's state is that of this worker's own
        last step, or, where servers update, theirs. Called at exit if the script does not; again is harmless.
        """
        if not self._finished:
            self._finished = True
            self._training.finish()
            for endpoint in self._endpoints:
                endpoint.close()

    @contextmanager
    def join(self) -> Iterator[None]:
        """``with optimizer.join():`` around a loop that is shorter on some workers."""
        yield
        self.finish()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Within it the model holds the method's documented result, to evaluate or save.

        For bsp that is what it holds anyway; buffers are this rank's own, and rank 0's
        are the ones that training goes on from.
        """
        undo = self._training.consolidate()
        try:
            yield
        finally:
            undo()


def _is_finished(optimizer: torch.optim.Optimizer) -> bool:
    assert isinstance(optimizer, DistributedOptimizer)
    return optimizer._finished


def _check_not_yet_trained(model: torch.nn.Module, world: World) -> None:
    mine = {id(parameter) for parameter in model.parameters()}
    for other, optimizer in world.trained:
        if not _is_finished(optimizer) and any(
            id(p) in mine for p in other.parameters()
        ):
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
    override = world.options.method
    if override is None and method is not None and not isinstance(method, str):
        if method.updates_on == "method":
            raise UsageError(
                f"method {method.name!r} updates piece by piece on its worker: not yet "
                "supported"
            )
        return method, settings
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
    return chosen, replace(
        settings or Settings(), **spec.convert_fields(Settings, rest)
    )
