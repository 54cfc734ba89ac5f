"""Counts the cost of a module's training step from its operations.

The module runs once, forward and backward, on torch's meta device. Tensors there have shapes and no
values, so the run takes neither the model's memory nor its time. The running total of torch's FLOP
counter is the clock:

- Its value when a layer's forward begins is the cost of the layers before that layer.
- Its value when a gradient has been accumulated is the part of the backward pass before that
  gradient.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import UsageError


@dataclass(frozen=True)
class CountedStep:
    """One step of a module, in the fields of a `Workload`; *forward* and *backward* in seconds."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    order: tuple[int, ...]
    batch: float | None
    source: str
    shapes: tuple[tuple[int, ...], ...]


def count_step(
    module: torch.nn.Module,
    example: torch.Tensor | tuple[Any, ...] | dict[str, Any],
    flops_per_second: float,
    *,
    batch: float | None = None,
    source: str = "",
) -> CountedStep:
    """Count the FLOPs of one step of *module*, divided by *flops_per_second*.

    Args:
        module: The model.
        example: The argument of ``forward``: a tensor, a tuple of positional or a dict of keyword
            arguments. Only shapes and dtypes matter, so tensors and *module* may be on any device,
            meta included. The function counts a copy of *module* without its values.
        flops_per_second: The rate that a worker sustains, not its peak. A multiplication and an
            addition are two FLOPs.
        batch: Samples in *example* (default: the first dimension of its first tensor).
        source: A line that says where the figures are from (default: how they were counted).

    *Tensors* are the trainable parameters with at least one element, a shared one once; sizes are
    bytes of their gradients.

    *Forward.* A layer is a submodule that owns trainable parameters itself. Forward FLOPs belong to
    the layer whose ``forward`` was called last, spread over its tensors by bytes. Those before the
    first layer belong to the first, or to all tensors if no layer is called.

    *Backward.* The backward pass starts from a scalar made of all floating-point outputs. Its FLOPs
    belong to the first gradient that is accumulated after them, and those after the last gradient
    to the last. So a weight and its bias, which are ready together, have one sum. Gradients become
    ready in the order in which torch accumulates them. Parameters without a gradient come after all
    others and cost nothing in the backward pass.

    *Limits.* Torch counts matrix products, convolutions and attention (as its two matrix products,
    without the recomputation of fused kernels), and nothing else. Normalization, activations,
    pooling, embeddings and the loss count as zero, although moving their values through memory
    takes time. Every counted operation runs at the same rate, whatever its shape. A measured
    profile is more exact.

    Raises:
        UsageError: The rate is not above zero; the module has no trainable parameters, or its
            output depends on none; or it cannot be copied to the meta device or run there. The
            message names the submodule that failed.
    """
    _check_arguments(module, example, flops_per_second)
    # Random values of the run, such as dropout's, must not advance the caller's generator.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        model = _copy_to_meta(module)
        parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.numel()
        }
        if not parameters:
            raise UsageError("the module has no parameter that requires a gradient")
        count = _Count(model, list(parameters.values()))
        count.run(_to_meta(example))
    if batch is None:
        shapes = (tensor.shape for tensor in _tensors_in(example) if tensor.dim())
        batch = next((float(shape[0]) for shape in shapes), None)
    return CountedStep(
        names=tuple(parameters),
        sizes=tuple(count.sizes),
        forward=tuple(flops / flops_per_second for flops in count.forward()),
        backward=tuple(flops / flops_per_second for flops in count.backward()),
        order=tuple(count.order()),
        batch=batch,
        source=source
        or f"FLOPs of {type(module).__name__} counted by torch, not measured, "
        f"at {flops_per_second:g} FLOP/s",
        shapes=tuple(tuple(parameter.shape) for parameter in parameters.values()),
    )


class _Count:
    """Counts the FLOPs of a forward and a backward pass, with totals by layer and gradient."""

    def __init__(
        self, model: torch.nn.Module, parameters: list[torch.nn.Parameter]
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.sizes = [p.numel() * p.element_size() for p in parameters]
        # The running total when each layer's forward began, and the layer's tensors.
        self.began: list[tuple[int, list[int]]] = []
        # For each tensor, the running total when its gradient was ready; in ready order.
        self.ready: dict[int, int] = {}
        self.forward_total = 0
        self.total = 0
        self._counter = FlopCounterMode(
            display=False,
            custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward},
        )
        # The innermost running forward is the last one.
        self._running = [_place("", model)]

    def run(self, example: Any) -> None:
        """Count one forward and one backward pass."""
        arguments = example if isinstance(example, tuple) else ()
        keywords = example if isinstance(example, dict) else {}
        if isinstance(example, torch.Tensor):
            arguments = (example,)
        hooks = self._hook_layers()
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(
                lambda _, index=index: self._gradient_is_ready(index)
            )
        with self._counter:
            try:
                # Tensors that the forward pass creates must be on meta, too.
                with torch.device("meta"):
                    output = self.model(*arguments, **keywords)
            except Exception as error:
                raise _cannot_run(f"forward of {self._running[-1]}", error) from error
            # A checkpoint's second forward is part of the backward pass.
            for hook in hooks:
                hook.remove()
            self.forward_total = self._counter.get_total_flops()
            differentiable = [
                tensor
                for tensor in _tensors_in(output)
                if tensor.requires_grad and tensor.is_floating_point()
            ]
            if differentiable:
                try:
                    with torch.device("meta"):
                        torch.stack([t.sum() for t in differentiable]).sum().backward()
                except Exception as error:
                    raise _cannot_run("the backward pass", error) from error
            self.total = self._counter.get_total_flops()
        if not self.ready:
            raise UsageError(
                f"the output ({type(output).__name__}) depends on no trainable parameter: "
                "expected at least one floating-point tensor in it through which a "
                "gradient can flow; does forward detach it, or run under torch.no_grad()?"
            )

    def forward(self) -> list[float]:
        """Return, per tensor, the FLOPs that it adds to the forward pass."""
        layers = self.began or [(0, list(range(len(self.sizes))))]
        edges = [0, *(total for total, _ in layers[1:]), self.forward_total]
        flops = [0.0] * len(self.sizes)
        for (_, tensors), (begin, end) in zip(
            layers, itertools.pairwise(edges), strict=True
        ):
            layer_bytes = sum(self.sizes[i] for i in tensors)
            for i in tensors:
                flops[i] += (end - begin) * self.sizes[i] / layer_bytes
        return flops

    def backward(self) -> list[int]:
        """Return, per tensor, the FLOPs from the gradient before it until its own is ready."""
        flops = [0] * len(self.sizes)
        edges = [self.forward_total, *list(self.ready.values())[:-1], self.total]
        for i, (begin, end) in zip(self.ready, itertools.pairwise(edges), strict=True):
            flops[i] = end - begin
        return flops

    def order(self) -> list[int]:
        """Return the tensors in ready order, then those without a gradient."""
        without = [i for i in range(len(self.sizes)) if i not in self.ready]
        return [*self.ready, *without]

    def _hook_layers(self) -> list[Any]:
        index_of = {id(p): i for i, p in enumerate(self.parameters)}
        hooks = []
        for name, submodule in self.model.named_modules():
            place = _place(name, submodule)
            own = [id(p) for p in submodule.parameters(recurse=False)]
            tensors = [index_of[p] for p in own if p in index_of]

            def begin(
                *_: Any, place: str = place, tensors: list[int] = tensors
            ) -> None:
                self._running.append(place)
                if tensors:
                    self.began.append((self._counter.get_total_flops(), tensors))

            def end(*_: Any) -> None:
                self._running.pop()

            hooks.append(submodule.register_forward_pre_hook(begin, prepend=True))
            hooks.append(submodule.register_forward_hook(end))
        return hooks

    def _gradient_is_ready(self, index: int) -> None:
        # Reentrant checkpoints accumulate a shared tensor several times: the last counts.
        self.ready.pop(index, None)
        self.ready[index] = self._counter.get_total_flops()


def _check_arguments(module: object, example: object, flops_per_second: object) -> None:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise UsageError(
            "the module is wrapped in DistributedDataParallel: pass the plain model "
            "(model.module), whose tensors have the names that training knows"
        )
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"module: expected a torch.nn.Module, got {type(module).__name__}"
        )
    if not isinstance(example, (torch.Tensor, tuple, dict)):
        raise UsageError(
            "example: expected a tensor, a tuple of positional arguments or a dict of "
            f"keyword arguments of forward, got {type(example).__name__}"
        )
    if (
        not isinstance(flops_per_second, (int, float))
        or not flops_per_second > 0
        or not math.isfinite(flops_per_second)
    ):
        raise UsageError(
            "flops_per_second: expected the rate that a worker sustains, more than zero "
            f"(1e13, say), got {flops_per_second!r}"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet: call the module once with a real "
                "batch, so that its lazy layers learn their sizes"
            )


def _copy_to_meta(module: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy on the meta device; shared parameters stay shared.

    ``module.to("meta")`` would give each owner of a shared tensor a tensor of its own, and would
    need a copy of the values first.
    """
    memo: dict[int, Any] = {}
    try:
        for submodule in module.modules():
            for tensor in (
                *submodule.parameters(recurse=False),
                *submodule.buffers(recurse=False),
                *vars(submodule).values(),
            ):
                if isinstance(tensor, torch.nn.Parameter):
                    memo[id(tensor)] = torch.nn.Parameter(
                        _to_meta(tensor), requires_grad=tensor.requires_grad
                    )
                elif isinstance(tensor, torch.Tensor):
                    memo[id(tensor)] = _to_meta(tensor)
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise UsageError(
            "the module cannot be copied to the meta device, where FLOPs are counted: "
            f"{type(error).__name__}: {error}. Count it before something is attached to "
            "it that copy.deepcopy refuses"
        ) from error


def _to_meta(value: Any) -> Any:
    """Return the same structure with its tensors on the meta device, without values."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="meta", requires_grad=False)
    if type(value) in (list, tuple):
        return type(value)(_to_meta(item) for item in value)
    if type(value) is dict:
        return {key: _to_meta(item) for key, item in value.items()}
    return value


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a structure of containers and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _convolution_backward(
    gradient: list[int],
    inputs: list[int],
    weight: list[int],
    _bias: object,
    _stride: object,
    _padding: object,
    _dilation: object,
    transposed: bool,
    _output_padding: object,
    _groups: int,
    output_mask: list[bool],
    *,
    out_shape: object,
) -> int:
    """Return the FLOPs of a convolution's gradients: each of the two costs as much as its forward.

    Arguments are those of ``aten::convolution_backward``, with shapes in place of tensors. Torch's
    own formula forgets groups in the weight's gradient (torch 2.13): a depthwise convolution of 512
    channels would count 512 times too much.
    """
    positions = math.prod((inputs if transposed else gradient)[2:])
    forward = 2 * inputs[0] * positions * math.prod(weight)
    return forward * sum(map(bool, output_mask[:2]))


def _place(name: str, submodule: torch.nn.Module) -> str:
    place = f"submodule {name!r}" if name else "the module itself"
    return f"{place} ({type(submodule).__name__})"


def _cannot_run(where: str, error: Exception) -> UsageError:
    return UsageError(
        f"the module cannot run on the meta device, where FLOPs are counted: {where} "
        f"raised {type(error).__name__}: {error}. Tensors have no values there: forward "
        "must not read any (.item(), an if on a tensor), nor use tensors of another "
        "device; and the example must be what forward takes. Else give measured times "
        "(paceline profile SCRIPT)"
    )
