"""Each private name of torch that paceline uses is there, and behaves as paceline needs it.

One test for each function of `torch_internals`: when a newer torch renames one, or lets it do
something else, the test of that name fails, and not a training.
"""

import ast
import copy
import inspect
import os
import subprocess
import sys
import threading
import warnings
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from paceline import torch_internals
from tests.support import forked

CPU = torch.device("cpu")


@pytest.fixture
def group():
    """A default process group of this process alone."""
    store = torch_internals.local_store()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def during_backward(ask):
    """What *ask* gives where a gradient is complete."""
    weight, found = nn.Parameter(torch.ones(2)), []
    weight.register_post_accumulate_grad_hook(lambda _: found.append(ask(weight)))
    weight.sum().backward()
    return found[0]


# ---- autograd ----


def test_queue_callback():
    order = []
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]

    def hook(_):
        if not order:
            torch_internals.queue_callback(lambda: order.append("end"))
        order.append("gradient")

    for weight in weights:
        weight.register_post_accumulate_grad_hook(hook)
    sum(weight.sum() for weight in weights).backward()
    assert order == ["gradient", "gradient", "end"]
    with pytest.raises(RuntimeError):
        torch_internals.queue_callback(lambda: None)


def test_accumulator_of():
    weight = nn.Parameter(torch.ones(2))
    node = torch_internals.accumulator_of(weight)
    with torch.no_grad():
        assert torch_internals.accumulator_of(weight) is node
    assert (2 * weight).grad_fn.next_functions[0][0] is node
    assert node.variable is weight


def test_gradient_hooks():
    weight = nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(print)
    hooks = torch_internals.gradient_hooks(weight)
    assert len(hooks) == 1
    handle = weight.register_post_accumulate_grad_hook(print)
    assert len(hooks) == 2
    handle.remove()
    assert len(hooks) == 1


def test_will_run():
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    nodes = [torch_internals.accumulator_of(weight) for weight in (used, unused)]
    found = []

    def ask():
        found.append([torch_internals.will_run(node) for node in nodes])

    def hook(_):
        ask()
        torch_internals.queue_callback(ask)

    used.register_post_accumulate_grad_hook(hook)
    (2 * used).sum().backward()
    assert found == [[True, False]] * 2
    found.clear()
    ((2 * used).sum() + unused.sum()).backward(inputs=[used])
    assert found == [[True, False]] * 2


def test_inside_backward():
    assert not torch_internals.inside_backward()
    assert during_backward(lambda _: torch_internals.inside_backward())


def test_inside_reentrant_checkpoint():
    assert not torch_internals.inside_reentrant_checkpoint()
    for reentrant in (True, False):
        layer, found = nn.Linear(2, 2), []
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, found=found: found.append(
                torch_internals.inside_reentrant_checkpoint()
            )
        )
        x = torch.ones(1, 2, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert found == [reentrant]


def test_inside_function_transform():
    def ask(x):
        found.append(torch_internals.inside_function_transform())
        return x.sum()

    found = []
    ask(torch.ones(2))
    torch.func.grad(ask)(torch.ones(2))
    assert found == [False, True]


def test_version_of():
    whole = torch.zeros(4)
    part = whole[:2]
    before = torch_internals.version_of(whole)
    part.add_(1)
    assert torch_internals.version_of(whole) == torch_internals.version_of(part)
    assert torch_internals.version_of(whole) > before


def test_without_overrides():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} was overridden")

    loud = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError):
        torch.add(loud, 1)
    with torch_internals.without_overrides():
        assert torch.equal(torch.add(loud, 1), torch.full((2,), 2.0))


def test_notify_before_use():
    weight, used = nn.Parameter(torch.ones(2)), []
    assert torch_internals.notify_before_use(weight, used.append)
    assert weight.shape == (2,)
    assert weight.requires_grad
    assert used == []  # its numbers were not read
    torch.add(weight, 1)
    assert [one is weight for one in used] == [True]
    copy.deepcopy(weight)
    assert len(used) == 2
    assert type(weight) is nn.Parameter  # a copy ends it
    other = torch.ones(2).as_subclass(type("Other", (torch.Tensor,), {}))
    assert not torch_internals.notify_before_use(other, used.append)


def test_stop_notifying():
    tensor, used = torch.ones(2), []
    torch_internals.notify_before_use(tensor, used.append)
    torch_internals.stop_notifying(tensor)
    torch_internals.stop_notifying(tensor)
    tensor.add_(1)
    assert used == []
    assert type(tensor) is torch.Tensor


# ---- optimizers ----


def schedule_over(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_note_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    schedule = schedule_over(optimizer)
    torch_internals.note_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def test_step_was_noted():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    schedule = schedule_over(optimizer)
    assert not torch_internals.step_was_noted(optimizer)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        schedule.step()
    optimizer.step()
    assert torch_internals.step_was_noted(optimizer)


def test_inside_scaler():
    class Asks(torch.optim.SGD):
        def step(self, closure=None):
            found.append(torch_internals.inside_scaler())

    weight, found = nn.Parameter(torch.ones(2)), []
    optimizer = Asks([weight], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    optimizer.step()
    scaler.step(optimizer)
    assert found == [False, True]


LAZY = """
import sys, torch
from paceline.torch_internals import load_lazy_modules
load_lazy_modules()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])
weight.sum().backward()
before = set(sys.modules)
optimizer.step()
assert "torch._dynamo" in before
late = sorted(set(sys.modules) - before)
print([name for name in late if name.startswith(("torch._dynamo", "torch.distributed"))])
"""


@pytest.mark.slow
def test_load_lazy_modules():
    done = subprocess.run(
        [sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "[]\n", done.stderr


# ---- models ----


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_is_compiled_whole():
    model = nn.Sequential(nn.Linear(2, 2))
    assert not torch_internals.is_compiled_whole(model)
    assert torch_internals.is_compiled_whole(torch.compile(model))
    model[0].compile()
    assert not torch_internals.is_compiled_whole(model)
    model.compile()
    assert torch_internals.is_compiled_whole(model)


@pytest.mark.filterwarnings("ignore")
def test_has_no_hooks():
    model = nn.Linear(2, 2)
    assert not torch_internals.has_no_hooks(model)
    assert torch_internals.has_no_hooks(torch.jit.script(model))
    model.compile()
    assert torch_internals.has_no_hooks(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_uncompiled():
    model = nn.Linear(2, 2)
    assert torch_internals.uncompiled(torch.compile(model)) is model
    assert torch_internals.uncompiled(model) is model


def test_active_ddp(group):
    class Asks(nn.Linear):
        def forward(self, x):
            found.append(torch_internals.active_ddp())
            return super().forward(x)

    found = []
    ddp = nn.parallel.DistributedDataParallel(Asks(2, 2))
    assert torch_internals.active_ddp() is None
    ddp(torch.ones(1, 2))
    assert found[-1] is ddp


@pytest.mark.filterwarnings("ignore")
def test_parallel_by_others(group):
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    by = torch_internals.parallel_by_others
    assert by(nn.Linear(2, 2)) is None
    assert by(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))) is not None
    assert by(replicate(nn.Linear(2, 2))) == "replicate"
    mesh = init_device_mesh("cpu", (1,))
    assert by(fully_shard(nn.Linear(2, 2), mesh=mesh)) == "fully_shard"
    inner = nn.Linear(2, 2)
    assert by(FullyShardedDataParallel(inner, device_id=CPU)) == "FSDP"
    assert by(inner) == "FSDP"


def test_is_distributed_tensor(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    shared = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    assert torch_internals.is_distributed_tensor(shared)
    assert not torch_internals.is_distributed_tensor(torch.ones(2))


def test_copy_together():
    into = [torch.zeros(2), torch.zeros(1, 3)]
    torch_internals.copy_together(into, [torch.ones(2), torch.full((1, 3), 2.0)])
    assert [tensor.tolist() for tensor in into] == [[1, 1], [[2, 2, 2]]]


def test_join_into():
    flat = torch.zeros(3)
    torch_internals.join_into(flat, [torch.ones(2), torch.full((1,), 2.0)])
    assert flat.tolist() == [1, 1, 2]


# ---- process groups ----


def test_local_store():
    store = torch_internals.local_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.check(["key"])


def test_default_group_store(group):
    torch_internals.default_group_store().set("key", "value")
    assert c10d._get_default_store().get("key") == b"value"


def test_forget_default_group(group, monkeypatch):
    module = ModuleType("torch.distributed.of_this_test")

    def of_module(group=dist.group.WORLD):
        return group

    class OfClass:
        def method(self, size=3, group=dist.group.WORLD):
            return size, group

    vars(module).update(of_module=of_module, OfClass=OfClass)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert of_module() is group
    torch_internals.forget_default_group()
    assert of_module() is None
    assert OfClass().method() == (3, None)


def test_backend_names(group):
    assert torch_internals.backend_names(group) == {"gloo"}


def test_gloo_timeout(group):
    assert torch_internals.gloo_timeout(group) == c10d.default_pg_timeout


def test_unregistered_gloo_group(group):
    known = dict(c10d._world.pg_map)
    stores = [torch_internals.local_store() for _ in range(2)]
    made = torch_internals.unregistered_gloo_group(group, "name", *stores, 0, 1)
    assert made.group_name == "name"
    assert torch_internals.backend_names(made) == {"gloo"}
    assert torch_internals.gloo_timeout(made) == torch_internals.gloo_timeout(group)
    assert dict(c10d._world.pg_map) == known


TWO_OF_GLOO = """
import os, threading
import torch.distributed as dist
from paceline.torch_internals import keep_gloo_from_spinning

store, made = dist.HashStore(), []

def make(rank):
    made.append(dist.ProcessGroupGloo(store, rank, 2))

threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
keep_gloo_from_spinning()
for thread in os.listdir("/proc/self/task"):
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            name = file.read().strip()
        print(name, os.sched_getscheduler(int(thread)) == os.SCHED_BATCH)
    except OSError:
        pass  # a thread that has just ended
"""


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"), reason="Linux lists threads there"
)
def test_keep_gloo_from_spinning(tmp_path):
    script = tmp_path / "two_of_gloo.py"
    script.write_text(TWO_OF_GLOO)
    done = forked.run([script])
    assert done.returncode == 0, done.stderr
    found = [line.rsplit(maxsplit=1) for line in done.stdout.splitlines()]
    loops = [batch for name, batch in found if name == "gloo_tcp_loop"]
    others = [batch for name, batch in found if name != "gloo_tcp_loop"]
    assert set(loops) == {"True"}
    assert set(others) == {"False"}


def test_groups_named(group):
    with torch_internals.groups_named("by this name"):
        made = dist.new_group([0], use_local_synchronization=True)
    assert made.group_name == "by this name"
    assert dist.new_group([0]).group_name != "by this name"


def test_process_groups_per_thread():
    found = []

    def body():
        store = torch_internals.local_store()
        before = dist.is_initialized()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        both.wait(60)  # both threads have a default group now
        found.append((before, dist.is_initialized(), dist.get_world_size()))
        dist.destroy_process_group()

    both = threading.Barrier(2)
    runtime = c10d._world
    with torch_internals.process_groups_per_thread():
        threads = [threading.Thread(target=body) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    assert found == [(False, True, 1)] * 2
    assert c10d._world is runtime


def test_share_group_ranks():
    shared = {0: 0}
    with torch_internals.process_groups_per_thread():
        store = torch_internals.local_store()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        torch_internals.share_group_ranks(shared)
        assert c10d._world.pg_group_ranks[dist.group.WORLD] is shared
        assert dist.get_process_group_ranks(dist.group.WORLD) == [0]
        dist.destroy_process_group()


COLLECTIVES = """
import torch, torch.distributed as dist
from paceline import torch_internals as private
dist.init_process_group("gloo")
group, rank = dist.group.WORLD, dist.get_rank()
one = torch.full((2,), 1.0 + rank)
for operation, expected in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.MAX, 2.0)):
    buffer = one.clone()
    work = group.allreduce([buffer], private.all_reduce_options(operation))
    work.wait()
    assert buffer.tolist() == [expected] * 2
buffer = one.clone()
group.broadcast([buffer], private.broadcast_options(1)).wait()
assert buffer.tolist() == [2.0, 2.0]
out = torch.empty(1)
options = private.reduce_scatter_options(dist.ReduceOp.SUM)
group.reduce_scatter_single(out, one.clone(), options).wait()
assert out.tolist() == [3.0]
out = torch.empty(4)
group.all_gather_single(out, one, private.all_gather_options()).wait()
assert out.tolist() == [1.0, 1.0, 2.0, 2.0]
out = torch.empty(2)
group.all_to_all_single(out, one, [], [], private.all_to_all_options()).wait()
assert out.tolist() == [1.0, 2.0]
print("all collectives", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def collectives(tmp_path_factory):
    """What two processes print that use the options of each collective."""
    script = tmp_path_factory.mktemp("script") / "collectives.py"
    script.write_text(COLLECTIVES)
    return [done.stdout for done in forked.run_together(2, [script])]


def test_collectives_begun(group):
    assert torch_internals.collectives_begun() == 0
    dist.all_reduce(torch.zeros(1))
    dist.broadcast(torch.zeros(1), 0)
    assert torch_internals.collectives_begun() == 2


def test_all_reduce_options(collectives):
    assert collectives == ["all collectives\n"] * 2
    assert torch_internals.all_reduce_options(dist.ReduceOp.SUM).asyncOp


def test_broadcast_options(collectives):
    assert collectives == ["all collectives\n"] * 2
    assert torch_internals.broadcast_options(1).rootRank == 1


def test_reduce_scatter_options(collectives):
    assert collectives == ["all collectives\n"] * 2
    assert torch_internals.reduce_scatter_options(dist.ReduceOp.SUM).asyncOp


def test_all_gather_options(collectives):
    assert collectives == ["all collectives\n"] * 2
    assert torch_internals.all_gather_options().asyncOp


def test_all_to_all_options(collectives):
    assert collectives == ["all collectives\n"] * 2
    assert torch_internals.all_to_all_options().asyncOp


def test_follows_streams(group):
    assert not torch_internals.follows_streams(group, CPU)


def test_moves_host_tensors(group):
    assert torch_internals.moves_host_tensors(group)


def test_lanes_of(group):
    backend = group._get_backend(CPU)
    assert backend.name() == "gloo"
    assert backend.options._threads == torch_internals.GLOO_LANES
    assert torch_internals.lanes_of(group, CPU) == torch_internals.GLOO_LANES


def test_reduce_operation_name():
    for name in ("SUM", "AVG", "MAX", "MIN"):
        kind = getattr(dist.ReduceOp, name)
        assert torch_internals.reduce_operation_name(kind) == name
        assert torch_internals.reduce_operation_name(dist.ReduceOp(kind)) == name


def _created(group):
    """What a registered backend is made with, as a new group is made."""
    made = []

    class Group(dist.ProcessGroup):
        def getBackendName(self):  # noqa: N802
            return "paceline-of-this-test"

    def create(distributed, options):
        made.append((distributed, options))
        return Group(distributed.group_rank, distributed.group_size)

    name = "paceline-of-this-test"
    torch_internals.register_python_backend(name, create)
    torch_internals.register_python_backend(name, create)  # again is harmless
    return dist.new_group([0], backend=name), made


@pytest.fixture
def created(group):
    yield _created(group)
    dist.Backend._plugins.pop("PACELINE-OF-THIS-TEST", None)


def test_register_python_backend(created):
    made, calls = created
    assert made.size() == 1
    assert len(calls) == 1


def test_group_id_of(created):
    made, [(distributed, _)] = created
    assert torch_internals.group_id_of(distributed) == c10d._world.pg_names[made]


# ---- profiler ----


def test_profiled():
    with torch_internals.profiled("before"):
        pass
    with (
        profile(activities=[ProfilerActivity.CPU]) as seen,
        torch_internals.profiled("within"),
    ):
        torch.ones(2).sum()
    names = {event.name for event in seen.events()}
    assert "within" in names
    assert "before" not in names


# ---- all of them ----


def test_each_name_has_its_test():
    functions = [
        node.name
        for node in ast.parse(inspect.getsource(torch_internals)).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert {f"test_{name}" for name in functions} <= set(globals())
