"""A model that has the tensors and compute times of a workload, and nothing else."""

from __future__ import annotations

import math

import torch

from paceline.cluster.workload import Workload
from paceline.errors import UsageError
from paceline.interfaces import Runtime, current_runtime
from paceline.interfaces.buckets import (
    nearly_square,
    stand_in_for,
    stands_in,
    wire_bytes,
)


class StandIn(torch.nn.Module):
    """A model with a workload's tensors, which become ready in the workload's order.

    Called with a batch, it returns a loss: half the squared distance of every parameter from the
    batch's mean. In the simulated runtime a tensor has few elements and is charged as if it had the
    workload's bytes and shapes; elsewhere it has all elements. Either way a step is charged, or
    takes, the workload's times.

    Attributes:
        workload: The tensors and times that this model has.
    """

    def __init__(self, workload: Workload, runtime: Runtime) -> None:
        """Make the tensors; scripts call `stand_in`.

        Args:
            workload: Tensors and times.
            runtime: The caller's.

        Raises:
            UsageError: No model can have these tensors in this order.
        """
        super().__init__()
        self.workload = workload
        made = []
        shapes = workload.shapes or (None,) * len(workload.names)
        for name, size, shape in zip(
            workload.names, workload.sizes, shapes, strict=True
        ):
            parameter = _tensor(runtime.blank(size, torch.device("cpu")), shape)
            try:
                self._register(name, parameter)
            except KeyError as error:
                raise UsageError(
                    f"the workload's tensor {name!r} cannot be in a model: {error}"
                ) from error
            made.append(parameter)
        for (name, _), theirs in zip(
            self.named_parameters(), workload.names, strict=True
        ):
            if name != theirs:
                raise UsageError(
                    f"the workload lists tensor {theirs!r} where a model would have "
                    f"{name!r}: a module's own tensors come before those of its children"
                )
        self._in_order = [made[i] for i in workload.order]

    def _register(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Register *parameter* under a dotted *name*; make the modules on its path."""
        *path, last = name.split(".")
        module: torch.nn.Module = self
        for word in path:
            if word not in dict(module.named_children()):
                module.add_module(word, torch.nn.Module())
            module = module.get_submodule(word)
        module.register_parameter(last, parameter)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of *batch*, a tensor of any shape."""
        target = batch.mean()
        loss = torch.zeros(())
        # Autograd goes backward: the gradient of the last summand is ready first.
        for parameter in reversed(self._in_order):
            flat = parameter.flatten()
            loss = loss + (flat.dot(flat) / 2 - target * flat.sum())
        return loss


def _tensor(blank: torch.Tensor, shape: tuple[int, ...] | None) -> torch.nn.Parameter:
    """Return a parameter of *shape* that is *blank*, or stands in for it.

    If *shape* has another number of elements, it is replaced by that of a nearly square matrix. If
    the number is prime, the matrix is a row. The rule is the same in every runtime, because
    compressors depend on shapes.
    """
    elements = wire_bytes(blank) // blank.element_size()
    if shape is None or math.prod(shape) != elements:
        square = nearly_square(elements)
        shape = square if math.prod(square) == elements else (1, elements)
    if not stands_in(blank):
        return torch.nn.Parameter(blank.view(shape))
    parameter = torch.nn.Parameter(blank)
    stand_in_for(wire_bytes(blank), parameter, shape)
    return parameter


def stand_in(workload: Workload | str) -> StandIn:
    """Make a model that has the tensors and the compute times of a workload.

    Call `init` first.

    Args:
        workload: A `Workload`, a file, or the name of a built-in one, such as ``"resnet50"``.

    Returns:
        The model; train it with any loader and optimizer.

    Raises:
        UsageError: The workload cannot be read, no model can have its tensors, or `init` was
            not called.

    Example:
        ::

            paceline.init()
            model = paceline.stand_in("resnet50")
            optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    """
    runtime = current_runtime()
    if runtime is None:
        raise UsageError("call paceline.init() before paceline.stand_in(...)")
    if not isinstance(workload, Workload):
        workload = Workload.load(workload)
    return StandIn(workload, runtime)
