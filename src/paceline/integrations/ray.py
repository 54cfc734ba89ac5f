"""Ray: a training whose server and workers are actors, and survives the death of any of them.

```python
ray.init("auto")
results = paceline.integrations.ray.run(loop, workers=8, method="ssp", snapshot="/shared/job.snapshot")
```

*loop* is a training loop like any other: `paceline.distribute`, steps, a result. If a worker, the server or a node
dies, the same happens as under ``paceline run --survive`` (docs/how-to/survive-failures.md). Here Ray restarts the
lost actors on any node with enough resources.

(Inside ``ray.train.torch.TorchTrainer`` this module is not needed: Ray sets torchrun's variables, and `distribute`
does the rest. There a death ends the job, and Ray Train restarts all of it.)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

from paceline import methods, spec
from paceline.core.settings import Settings
from paceline.errors import PeerLostError, UsageError, WorkerFailedError
from paceline.integrations.common import require
from paceline.interfaces import UpdatesOnServer
from paceline.parameter_server.process import snapshot as snapshots
from paceline.run_options import RunOptions
from paceline.timeouts import timeouts

require("ray", "2.60", "3")

import ray  # noqa: E402
from ray._private import state  # noqa: E402
from ray.util.client import ray as client  # noqa: E402
from ray.util.scheduling_strategies import (  # noqa: E402
    NodeAffinitySchedulingStrategy,
)

from paceline.integrations.ray_job import (  # noqa: E402
    NAMESPACE,
    SERVER,
    Coordinator,
    JobNews,
    Server,
    Worker,
    actor_name,
    protection,
    worker_name,
)

Resources = Mapping[str, float]

_LOOK_SECONDS = 0.5


def run(
    loop: Callable[..., Any],
    *,
    workers: int,
    method: str | None = None,
    config: Any = None,
    snapshot: str | os.PathLike[str] | None = None,
    snapshot_seconds: float = snapshots.SECONDS,
    resume: bool = False,
    steps: int | None = None,
    seed: int | None = None,
    resources_per_worker: Resources | None = None,
    server_resources: Resources | None = None,
    room_seconds: float = timeouts.ray_room,
    grows: bool = False,
    runtime_env: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Run *loop* in *workers* actors of the Ray cluster, and return their results by rank.
    When a worker comes back, *loop* is called again, and ``optimizer.first_step`` is the job's current step. All
    actors are removed at the end, whatever happens.

    Args:
        loop: The training function. Called with *config*, or without arguments if that is None.
        workers: Number of workers.
        config: The loop's argument.
        method: A spec of a method that updates on a server (None: the loop names it). It overrides the
            loop's.
        steps: As in ``paceline run``.
        seed: As in ``paceline run``.
        snapshot: A file that every node can reach, where the server saves its state. Without it the
            server's death ends the job. It is removed when the job ends without an error.
        snapshot_seconds: Seconds between two snapshots.
        resume: Continue from an existing snapshot. Without it an existing file is refused.
        resources_per_worker: Ray's resources of a worker, on one node; 1 CPU by default.
        server_resources: Ray's resources of the server; 1 CPU by default.
        room_seconds: How long to wait for resources that are in use, or were lost with a node.
        grows: The cluster adds nodes on demand, so the job also waits if it is too small now.
        runtime_env: Ray's, for all actors.

    Raises:
        UsageError: The driver is connected over ``ray://``; the method has no server; the cluster is
            too small (raised at once, with the missing resources); the snapshot exists already.
        WorkerFailedError: *loop* raised. The job ends and is not tried again.
        PeerLostError: The actor that holds the job together, on this process's node, died. The snapshot stays.
    """
    requests = _requests(workers, resources_per_worker, server_resources)
    _check_method(method, workers)
    options = RunOptions(method=method, steps=steps, seed=seed)
    if not ray.is_initialized():
        ray.init()
    if client.is_connected():
        raise UsageError(
            "run() over ray:// (Ray Client): whoever calls it holds the job together, and asks the "
            "cluster what its client does not pass on; run this script on the cluster (ray job submit)"
        )
    if not grows:
        check_capacity(requests, list(nodes_of(ray.nodes()).values()))
    environment = {
        **{k: v for k, v in os.environ.items() if k.startswith("PACELINE_")},
        **options.to_environment(),
        **protection(os.environ),
    }
    path = None if snapshot is None else os.path.abspath(os.fspath(snapshot))
    with _actors(runtime_env) as actors:
        coordinator = actors.beside(Coordinator, workers, path, resume)
        server = actors.named(
            *(Server, requests[SERVER], workers, actors.job),
            *(environment, path, snapshot_seconds),
        )
        opened = server.serve.remote()  # In parallel with the workers' start.
        each = [
            actors.anywhere(
                *(Worker, requests[worker_name(rank)]),
                *(rank, workers, actors.job, environment),
            )
            for rank in range(workers)
        ]
        arguments = () if config is None else (config,)
        calls = {
            worker.run.remote(loop, arguments): rank for rank, worker in enumerate(each)
        }
        room = _Room(requests, room_seconds, [server, *each])
        while calls:
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=_LOOK_SECONDS)
            failed = [
                failure for call in ready if (failure := _failure(call, calls[call]))
            ]
            news: JobNews = _answer(coordinator.poll.remote())
            for line in news.lines:
                print(f"paceline: {line}", file=sys.stderr, flush=True)
            for rank in news.evicted:
                ray.kill(each[rank], no_restart=False)
            if news.fault:
                raise UsageError(news.fault)
            if failed:
                raise failed[0]
            for call in ready:
                server.is_done.remote(calls.pop(call))
            room.look({worker_name(rank) for rank in calls.values()})
        del opened
        results: list[Any] = _answer(coordinator.results.remote())
        _end(server, path)
        return results


def _answer(call: Any) -> Any:
    """The coordinator's answer. Raises `PeerLostError` if it has died: nothing else knows the workers' results."""
    try:
        return ray.get(call)
    except ray.exceptions.RayActorError as error:
        raise PeerLostError(
            "the coordinator of the job, an actor on the node of run(), died: the job ends. Go on from its "
            "snapshot with resume=True"
        ) from error


def _requests(
    workers: int, of_worker: Resources | None, of_server: Resources | None
) -> dict[str, Resources]:
    """The resources that each actor requests, by name."""
    if workers < 1:
        raise UsageError(f"run(workers=): expected 1 or more, got {workers}")
    for name, wanted in (
        ("resources_per_worker", of_worker),
        ("server_resources", of_server),
    ):
        for what, much in (wanted or {}).items():
            if not much >= 0:
                raise UsageError(
                    f"run({name}=): expected none or more of {what}, got {much}"
                )
    each = {"CPU": 1.0} if of_worker is None else of_worker
    return {
        SERVER: {"CPU": 1.0} if of_server is None else of_server,
        **{worker_name(rank): each for rank in range(workers)},
    }


def _check_method(text: str | None, workers: int) -> None:
    """Raise `UsageError` for a method whose jobs do not survive deaths here."""
    if text is None:
        return  # The loop names the method, and is refused there.
    method, _ = methods.make(spec.parse(text), set(spec.field_types(Settings)))
    methods.check_survives(method)
    on_server = cast(UpdatesOnServer, method)
    on_server.server(workers)
    groups = on_server.groups(workers)
    if groups is not None:
        raise UsageError(
            f"method {method.name!r}: it has {groups.servers} servers, one for each group, and a job "
            "on Ray has one: take a method with one server (see paceline list methods), or survive on one "
            "machine, with paceline run --survive --workers N"
        )


class _Actors:
    """Creates the actors of one job, with Ray's *runtime_env*."""

    def __init__(self, runtime_env: Mapping[str, Any] | None) -> None:
        self.job = f"paceline {secrets.token_hex(8)}"
        self._common = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
        self._made: list[Any] = []

    def beside(self, kind: type, *arguments: Any) -> Any:
        """Create an actor on this process's node, which ends with this process."""
        node = ray.get_runtime_context().get_node_id()
        how = {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        return self._make(kind, {**how, **self._name(kind)}, *arguments)

    def anywhere(self, kind: type, request: Resources, *arguments: Any) -> Any:
        """Create an actor that Ray restarts on any node with the resources of *request*."""
        return self._make(kind, _restarts(request), *arguments)

    def named(self, kind: type, request: Resources, *arguments: Any) -> Any:
        """The same, with a name by which other actors find it."""
        return self._make(kind, {**_restarts(request), **self._name(kind)}, *arguments)

    def end(self) -> None:
        """Remove all actors, whatever has happened."""
        for actor in reversed(self._made):
            with contextlib.suppress(Exception):  # It may be gone.
                ray.kill(actor, no_restart=True)

    def _name(self, kind: type) -> dict[str, str]:
        return {"name": actor_name(self.job, kind), "namespace": NAMESPACE}

    def _make(self, kind: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        actor = ray.remote(kind).options(**options, **self._common).remote(*arguments)
        self._made.append(actor)
        return actor


@contextlib.contextmanager
def _actors(runtime_env: Mapping[str, Any] | None) -> Iterator[_Actors]:
    actors = _Actors(runtime_env)
    try:
        yield actors
    finally:
        actors.end()


def _restarts(request: Resources) -> dict[str, Any]:
    """Ray's options for an actor with these resources that Ray restarts."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {names[what]: much for what, much in request.items() if what in names}
    others = {what: much for what, much in request.items() if what not in names}
    return {
        "num_cpus": 0,
        **own,
        "resources": others,
        "scheduling_strategy": "SPREAD",
        "max_restarts": -1,
        "max_task_retries": -1,
    }


def _failure(call: Any, rank: int) -> WorkerFailedError | UsageError | None:
    """The error of a worker's call, if any."""
    name = worker_name(rank)
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        while isinstance(cause, ray.exceptions.RayTaskError):  # another actor's
            cause = cause.cause
        message = f"{name} failed with {type(cause).__name__}: {cause}"
        failure = WorkerFailedError(message, rank)
        failure.__cause__ = cause
        return failure
    except ray.exceptions.RayError as error:
        return UsageError(f"{name} cannot be started by Ray: {error}")
    return None


def _end(server: Any, path: str | None) -> None:
    """End the server after all workers. Their results are already here, so an error of the server is ignored, for
    example because its node is lost."""
    try:
        ray.get(server.end.remote(), timeout=timeouts.ray_end)
    except ray.exceptions.RayError as error:
        left = "" if path is None else f"; its snapshot {path} may be left"
        print(
            f"paceline: all workers are done, but the server has not ended well{left}: {error}",
            file=sys.stderr,
            flush=True,
        )


class _Room:
    """Finds actors that wait for resources: no process runs them, because none has started yet or the last one
    has died. Its node may live, with its resources in use by others."""

    def __init__(
        self,
        requests: Mapping[str, Resources],
        seconds: float,
        actors: Sequence[Any],
    ) -> None:
        """*actors* are in the order of *requests*."""
        self._requests, self._seconds = requests, seconds
        self._actors = dict(zip(requests, actors, strict=True))
        self._since: dict[str, float] = {}
        self._reported: set[str] = set()

    def look(self, at_work: Set[str]) -> None:
        """Check the actors that are not done (*at_work*). Raises `UsageError` if one waits too long."""
        now = time.monotonic()
        waiting = without_process(self._actors) & (at_work | {SERVER})
        for name, request in self._requests.items():
            if name not in waiting:
                self._since.pop(name, None)
                self._reported.discard(name)
                continue
            waited = now - self._since.setdefault(name, now)
            sentence = (
                f"{name} has not started for {waited:.0f} s: it needs {needs(request)}, on one of "
                f"{described(list(nodes_of(ray.nodes()).values()))}"
            )
            if waited > self._seconds:
                raise UsageError(
                    f"{sentence}; wait longer (room_seconds=), start more nodes, or ask for less"
                )
            if waited > timeouts.ray_room_notice and name not in self._reported:
                self._reported.add(name)
                print(f"paceline: {sentence}", file=sys.stderr, flush=True)


# ---- capacity ----
#
# Each actor needs all of its resources on one node. Requests are assigned first fit, the largest first. In rare
# mixtures of requests a better search would find a place for some that are refused here.

_OF_RAY = ("node:", "object_store_memory", "accelerator_type:")
"""Resources of every node that no actor requests."""


def nodes_of(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Resources]:
    """The resources of each live node by its id, from ``ray.nodes()``."""
    return {
        node["NodeID"]: node.get("Resources", {}) for node in nodes if node["Alive"]
    }


def without_room(
    requests: Mapping[str, Resources], nodes: Sequence[Resources]
) -> list[str]:
    """The *requests* (resources by name) that fit on no node."""
    left = [dict(node) for node in nodes]
    found_none = []
    for name in sorted(requests, key=lambda n: -sum(requests[n].values())):
        wanted = requests[name]
        for node in left:
            if all(node.get(what, 0.0) >= much for what, much in wanted.items()):
                for what, much in wanted.items():
                    node[what] = node.get(what, 0.0) - much
                break
        else:
            found_none.append(name)
    return [name for name in requests if name in found_none]


def check_capacity(
    requests: Mapping[str, Resources], nodes: Sequence[Resources]
) -> None:
    """Raise `UsageError` for a cluster that could not hold all *requests* even if it were empty."""
    missing = without_room(requests, nodes)
    if not missing:
        return
    wanted = {what for request in requests.values() for what in request}
    sums = [
        f"{_sum_of(what, requests.values()):g} {what}, and its nodes have "
        f"{_sum_of(what, nodes):g}"
        for what in sorted(wanted)
    ]
    raise UsageError(
        f"the Ray cluster is too small: this job needs {'; '.join(sums)} ({described(nodes)}). "
        f"No node has room for {', '.join(missing)} ({needs(requests[missing[0]])} each, on one "
        "node): start more nodes (ray start --address=...), ask for less (workers=, "
        "resources_per_worker=, server_resources=), or pass grows=True where nodes are added when "
        "they are asked for"
    )


def needs(request: Resources) -> str:
    """Format resources as ``1 CPU, 0.5 GPU``."""
    return (
        ", ".join(f"{much:g} {what}" for what, much in request.items()) or "no resource"
    )


def described(nodes: Sequence[Resources]) -> str:
    """Format nodes as ``2 nodes: 1 CPU | 4 CPU, 1 GPU``."""
    each = [
        needs(
            {k: v for k, v in n.items() if not k.startswith(_OF_RAY) and k != "memory"}
        )
        for n in nodes
    ]
    listed = " | ".join(sorted(each)) or "none"  # Ray's order varies.
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}: {listed}"


def _sum_of(what: str, among: Iterable[Resources]) -> float:
    return sum(one.get(what, 0.0) for one in among)


# ---- private names of Ray: checked against Ray 2.60 ----

_WITHOUT = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING")


def without_process(actors: Mapping[str, Any]) -> set[str]:
    """The names of *actors* without a process now: Ray is about to start one, or has no resources for it.
    (``ray.util.state`` tells it, too, but needs a dashboard.)"""
    waiting = {
        identity for one in _WITHOUT for identity in state.actors(actor_state_name=one)
    }
    return {name for name, actor in actors.items() if actor._actor_id.hex() in waiting}
