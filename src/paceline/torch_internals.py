"""Every private or unstable name of torch that paceline uses, in one place.

Checked against torch 2.13. When a newer torch renames one, this is the file to mend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.amp.grad_scaler
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.utils.checkpoint

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_SCALER_FILE = torch.amp.grad_scaler.__file__

ProcessGroupBase: Any = dist.ProcessGroup
WorkBase: Any = torch._C._distributed_c10d.Work
"""Their C++ signatures cannot be overridden in a way that a type checker accepts."""


COLLECTIVES = c10d.__name__
"""The module of torch's collectives."""

AUTOGRAD = torch.autograd.graph.__name__
"""The module that calls autograd's engine."""


def profiled(*words: str) -> AbstractContextManager[object]:
    """Within it, a `torch.profiler` that records this thread shows a row called by these words."""
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(" ".join(words))


def default_group_store() -> Any:
    """The store by which the default process group was set up: see `process_groups.default_store`."""
    return c10d._get_default_store()


def forget_default_group() -> None:
    """Let torch's own functions forget the default process group.

    Modules that torch imports after it was made (``torch._dynamo`` brings one, in the first
    optimizer step) keep it as the default of a parameter, ``group=group.WORLD``: for ever,
    and its threads with it. Imported before, they have None there, which means the same.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed."):
            continue
        for value in list(vars(module).values()):
            # By type(), since some of torch's objects warn when their class is asked for.
            is_class = issubclass(type(value), type)
            for function in list(vars(value).values()) if is_class else (value,):
                if type(function) is FunctionType and function.__defaults__:
                    function.__defaults__ = tuple(
                        None if isinstance(default, dist.ProcessGroup) else default
                        for default in function.__defaults__
                    )


def local_store() -> Any:
    """A store within this process."""
    return torch._C._distributed_c10d.HashStore()


def load_lazy_modules() -> None:
    """Load what torch imports at the first optimizer step: later, it would happen on some
    worker's thread, under that worker's state."""
    import torch._dynamo  # noqa: F401


def queue_callback(callback: Callable[[], None]) -> None:
    """Call *callback* when the backward pass that now runs has ended.

    Valid only inside a backward pass; runs on the thread that called ``backward``.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that were made over *optimizer* that a step was done, where its own
    ``step`` was not called: else they warn of a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_was_noted(optimizer: torch.optim.Optimizer) -> bool:
    """Whether schedulers that were made over *optimizer* know of a step."""
    return bool(getattr(optimizer, "_opt_called", False))


def accumulator_of(parameter: torch.nn.Parameter) -> Any:
    """The autograd node that adds into ``parameter.grad``."""
    with torch.enable_grad():
        view: Any = parameter.view_as(parameter).grad_fn
    return view.next_functions[0][0]


def gradient_hooks(parameter: torch.nn.Parameter) -> Sized:
    """The hooks that ``register_post_accumulate_grad_hook`` has left on *parameter*, now and
    later: always the same collection, once there was one."""
    hooks: Sized = parameter._post_accumulate_grad_hooks
    return hooks


def will_run(node: Any) -> bool:
    """Whether the backward pass that now runs comes to the autograd *node*, or has done so.

    Valid only inside a backward pass, and in a callback of `queue_callback`. A pass within
    a pass, such as a reentrant checkpoint's, has a graph of its own.
    """
    return bool(torch._C._will_engine_execute_node(node))


def copy_together(
    into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """Copy each of *tensors* into that of *into* at its position, in one call of torch."""
    with torch.no_grad():
        torch._foreach_copy_(list(into), list(tensors))


def join_into(flat: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Copy tensors of one dimension into *flat*, one behind the other: takes half as long as
    `copy_together`."""
    with torch.no_grad():
        torch.cat(list(rows), out=flat)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs on this thread, which no other pass has; -1: none."""


def inside_backward() -> bool:
    """Whether a backward pass runs on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_reentrant_checkpoint() -> bool:
    """Whether the caller runs in the backward pass that a reentrant checkpoint starts
    within another: its end is not the outer one's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


def inside_scaler() -> bool:
    """Whether the caller runs in the step of a GradScaler, which asks first whether it may
    leave out the optimizer's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_filename == _SCALER_FILE:
            return True
        frame = frame.f_back
    return False


def inside_function_transform() -> bool:
    """Whether torch.func is transforming what runs now (grad, vmap, jvp, ...)."""
    return torch._C._functorch.maybe_current_level() is not None


def is_compiled_whole(model: torch.nn.Module) -> bool:
    """Whether torch.compile was applied to the model itself, not to parts of it."""
    return _is_compiled_in_place(model) or type(model).__name__ == "OptimizedModule"


def has_no_hooks(module: torch.nn.Module) -> bool:
    """Whether a hook of *module* runs as a part of compiled code (``model.compile()``), or
    it can have none (torch.jit)."""
    return _is_compiled_in_place(module) or isinstance(module, torch.jit.ScriptModule)


def _is_compiled_in_place(model: torch.nn.Module) -> bool:
    return getattr(model, "_compiled_call_impl", None) is not None


def without_overrides() -> AbstractContextManager[Any]:
    """Within it torch's functions take tensors of subclasses as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, if *model* is what torch.compile made of it: attributes that are
    set on that are set on the model."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner


def backend_names(group: Any) -> set[str]:
    """The backends of a process group: ``{"gloo"}``, ``{"nccl"}``, or both."""
    return {group._get_backend(device).name() for device in group._device_types}


def gloo_timeout(group: Any) -> timedelta:
    """How long an operation of gloo's may take in *group*."""
    timeout: timedelta
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def unregistered_gloo_group(
    parent: Any, name: str, store: Any, meeting_store: Any, rank: int, size: int
) -> dist.ProcessGroup:
    """A process group over gloo on the devices and with the time-out of *parent*, which
    torch's registry does not know. gloo's members find each other in *meeting_store*."""
    timeout = gloo_timeout(parent)
    gloo = dist.ProcessGroupGloo(meeting_store, rank, size, timeout=timeout)
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device in parent._device_types:
        group._register_backend(device, dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(name)
    found: dist.ProcessGroup = group
    return found


def keep_gloo_from_spinning() -> None:
    """Let gloo's event loops wait for a core, where they would take it from another thread.

    A loop that finds a connection locked asks for it again and again (gloo's issue 246). The thread that has
    the lock may wait for the very core on which the loop spins. It waits until the scheduler's next tick, 4 ms, where
    an all-reduce takes 0.3 ms. Under ``SCHED_BATCH`` a loop has its share of cores, and takes none from
    a running thread when it wakes up. Threads of groups that are made later are not included.
    """
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):
            is_loop = (thread / "comm").read_bytes() == b"gloo_tcp_loop\n"
            number = int(thread.name)
            if is_loop and os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def groups_named(name: str) -> Iterator[None]:
    """Within it, ``torch.distributed.new_group`` names its group *name*.

    With use_local_synchronization torch names a group after its ranks and the number of
    groups that this process has; ranks that belong to different numbers of groups then
    look for each other under different names, for ever.
    """
    naming = c10d._process_group_name
    vars(c10d)["_process_group_name"] = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        vars(c10d)["_process_group_name"] = naming


@contextmanager
def process_groups_per_thread() -> Iterator[None]:
    """Within it, each thread has torch.distributed state of its own.

    torch's own multi-threaded test harness works this way; without thread isolation in
    C++ as well, the second thread's group is refused as already registered.
    """
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    bindings: Any = torch._C._distributed_c10d
    before: Any = c10d._world
    vars(c10d)["_world"] = ThreadLocalWorld()
    bindings._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        bindings._set_thread_isolation_mode(False)
        vars(c10d)["_world"] = before


def share_group_ranks(ranks: dict[int, int]) -> None:
    """Let the whole group of the calling thread hold *ranks*, which threads share, in place of a
    dictionary of its own: n threads would hold n entries each."""
    whole = c10d.GroupMember.WORLD
    assert whole is not None
    c10d._world.pg_group_ranks[whole] = ranks


def collectives_begun() -> int:
    """How many collectives this process has begun in the whole group, its script's own, too."""
    whole: Any = c10d.GroupMember.WORLD
    try:
        return 0 if whole is None else int(whole._get_sequence_number_for_group())
    except RuntimeError:  # its backend does not count
        return 0


def all_reduce_options(operation: Any) -> Any:
    """What a process group's own ``allreduce`` is given beside its tensors."""
    options = torch._C._distributed_c10d.AllreduceOptions()
    options.reduceOp = operation
    options.asyncOp = True
    return options


def broadcast_options(source: int) -> Any:
    """What a process group's own ``broadcast`` is given beside its tensors."""
    options = torch._C._distributed_c10d.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    options.asyncOp = True
    return options


def reduce_scatter_options(operation: Any) -> Any:
    """What a process group's own ``reduce_scatter_single`` is given."""
    options = torch._C._distributed_c10d.ReduceScatterOptions()
    options.reduceOp = operation
    options.asyncOp = True
    return options


def all_gather_options() -> Any:
    """What a process group's own ``all_gather_single`` is given."""
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = True
    return options


def all_to_all_options() -> Any:
    """What a process group's own ``all_to_all_single`` is given."""
    options = torch._C._distributed_c10d.AllToAllOptions()
    options.asyncOp = True
    return options


def follows_streams(group: Any, device: torch.device) -> bool:
    """Whether waiting for a result on *device* only makes its current stream wait."""
    return bool(group._get_backend(device).name() == "nccl")


GLOO_LANES = 2
"""Worker threads of a gloo process group: collectives that it moves at a time."""


def moves_host_tensors(group: Any) -> bool:
    """Whether a process group moves tensors that are in the hosts' memory."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:  # NCCL alone
        return False
    return True


def lanes_of(group: Any, device: torch.device) -> int:
    """Collectives on tensors of *device* that a process group moves at a time."""
    return GLOO_LANES if group._get_backend(device).name() == "gloo" else 1


def reduce_operation_name(operation: Any) -> str:
    """``"SUM"``, ``"AVG"``, ... of a ReduceOp, whichever of its two types it has."""
    return _name_of(getattr(operation, "op", operation))


@cache
def _name_of(kind: Any) -> str:
    return str(kind).rsplit(".", 1)[-1]


def group_id_of(options: Any) -> str:
    """The name of the group that a backend is being made for."""
    return str(options.group_id)


def register_python_backend(
    name: str, create: Callable[[Any, Any], dist.ProcessGroup]
) -> None:
    """Make *name* a torch.distributed backend whose groups *create* makes."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            name, create, extended_api=True, devices=["cpu", "cuda"]
        )


def version_of(tensor: torch.Tensor) -> int:
    """How often *tensor*, or a tensor that shares its memory, was written in place."""
    return tensor._version


def active_ddp() -> torch.nn.Module | None:
    """The DistributedDataParallel whose forward pass runs now, if one does; composable
    ``replicate`` has one inside."""
    found: torch.nn.Module | None
    found = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return found


SHARDING = ("FSDP", "fully_shard")
"""Those of `parallel_by_others` that leave each rank a part of the parameters."""


def parallel_by_others(module: torch.nn.Module) -> str | None:
    """What else trains this very module (not its children) on several devices: the name
    of torch's tool, if there is one.

    The tools are looked up and never imported: a module whose class has one of these for
    a base has imported it.
    """
    tools = (
        ("torch.nn.parallel", "DistributedDataParallel", "DistributedDataParallel"),
        ("torch.distributed._composable.replicate", "DDP", "replicate"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDP"),
        (
            "torch.distributed._composable.replicate_with_fsdp",
            "ReplicateModule",
            "replicate",
        ),
        ("torch.distributed.fsdp", "FSDPModule", "fully_shard"),
    )
    for home, base, tool in tools:
        kind = getattr(sys.modules.get(home), base, None)
        if kind is not None and isinstance(module, kind):
            return tool
    # What FSDP is around is of no class of its own; it is marked for torch.compile.
    return "FSDP" if getattr(module, "_is_fsdp_managed_module", False) else None


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is a DTensor: a part, or a copy, of one that several ranks hold."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(tensor, home.DTensor)


class Uncopied:
    """A hook of this model alone: its deep copies (a moving average of the weights, say)
    and pickles get one that does nothing."""

    def __init__(self, hook: Callable[..., None] = lambda *arguments: None) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        self._hook(*arguments)

    def __reduce__(self) -> tuple[type[Uncopied], tuple[()]]:
        return Uncopied, ()


_CALLBACK = "_paceline_callback"
"""The attribute in which a tensor that notifies keeps what it calls."""

_HARMLESS_PROPERTIES = (
    *("grad", "requires_grad", "is_leaf", "grad_fn", "retains_grad", "output_nr"),
    *("shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn"),
    *("is_nested", "is_mps", "is_xpu", "_version", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "name", "volatile"),
)
_HARMLESS_SETTERS = (
    "grad",
    "requires_grad",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_HARMLESS_FUNCTIONS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride"),
    *("storage_offset", "is_contiguous", "is_floating_point", "is_complex"),
    *("is_signed", "get_device", "requires_grad_", "register_hook", "__hash__"),
    *("register_post_accumulate_grad_hook", "retain_grad", "__len__"),
)


def _harmless() -> Iterator[Any]:
    """What neither reads nor writes a tensor's numbers."""
    for name in _HARMLESS_PROPERTIES:
        descriptor: Any = getattr(torch.Tensor, name, None)
        if hasattr(descriptor, "__get__"):
            yield descriptor.__get__
        if name in _HARMLESS_SETTERS:
            yield from (descriptor.__set__, descriptor.__delete__)
    for name in _HARMLESS_FUNCTIONS:
        for place in (torch.Tensor, torch):
            if hasattr(place, name):
                yield getattr(place, name)


_HARMLESS = frozenset(_harmless())


class _Notifying:
    """A tensor that calls its callback before torch reads or writes its numbers."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function not in _HARMLESS:
            _notify(args)
            if kwargs:
                _notify(kwargs.values())
        with without_overrides():
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _notify_and_stop(self)
        return self.__deepcopy__(memo)  # the plain class's

    def __reduce_ex__(self, protocol: Any) -> Any:
        _notify_and_stop(self)
        return self.__reduce_ex__(protocol)


class _NotifyingParameter(_Notifying, torch.nn.Parameter):
    """A parameter that notifies."""


class _NotifyingTensor(_Notifying, torch.Tensor):
    """A plain tensor that notifies."""


_KINDS: dict[type, type] = {
    torch.nn.Parameter: _NotifyingParameter,
    torch.Tensor: _NotifyingTensor,
}
_PLAIN = {notifying: plain for plain, notifying in _KINDS.items()}


def notify_before_use(
    tensor: torch.Tensor, callback: Callable[[torch.Tensor], None]
) -> bool:
    """Call *callback* with *tensor* before anything reads or writes its numbers.

    Python has many ways to use a tensor: a module's call, a function of torch, a penalty in the
    loss, a moving average of weights, a ``state_dict``. Each of them hands the tensor to torch, and
    torch asks its class first (``__torch_function__``). So until `stop_notifying` the tensor has another
    class, with the same memory, the same hooks, and the same place in the model. Code in C++ that
    is given a tensor past torch's own functions is not seen.

    Returns False, and does nothing, for a tensor of a class other than torch's own, which may
    have its own ``__torch_function__``.
    """
    kind = _KINDS.get(type(tensor))
    if kind is None:
        return type(tensor) in _PLAIN
    tensor.__dict__[_CALLBACK] = callback
    tensor.__class__ = kind
    return True


def stop_notifying(tensor: torch.Tensor) -> None:
    """Give *tensor* its own class back; nothing happens where it has it."""
    kind = _PLAIN.get(type(tensor))
    if kind is not None:
        tensor.__class__ = kind
        del tensor.__dict__[_CALLBACK]


def _notify_and_stop(tensor: Any) -> None:
    tensor.__dict__[_CALLBACK](tensor)
    stop_notifying(tensor)


def _notify(values: Iterable[Any]) -> None:
    """Call the callback of each tensor among *values*, or in a collection among them."""
    for value in values:
        if type(value) in _PLAIN:
            value.__dict__[_CALLBACK](value)
        elif isinstance(value, list | tuple):
            _notify(value)
        elif isinstance(value, dict):
            _notify(value.values())
