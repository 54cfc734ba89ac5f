"""What must not average gradients, or hold parameters, beside paceline.

Two tools that average make 1/n of the mean; parameters that are spread over ranks have
no mean to make. Both train without an error of their own, so both are looked for.
"""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.torch_internals import (
    SHARDING,
    active_ddp,
    is_distributed_tensor,
    parallel_by_others,
)


def check_trained_by_nobody_else(model: torch.nn.Module) -> None:
    """Raise `UsageError` if another tool makes *model*, or a part of it, parallel."""
    for name, module in model.named_modules():
        tool = parallel_by_others(module)
        if tool is not None:
            what = f"its part {name!r} is" if name else "it is"
            if tool in SHARDING:
                raise UsageError(
                    f"the model given to distribute is sharded: {what} under {tool}, so each "
                    "rank holds a part of its parameters, and distribute averages gradients of "
                    f"whole models that every rank holds. Leave {tool} out; a model that one "
                    f"device has no room for trains under {tool} alone, without distribute"
                )
            raise UsageError(
                f"the model given to distribute is made parallel twice: {what} under "
                f"{tool} too, which averages gradients itself. "
                "Build the model without it, and give distribute the plain one"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_distributed_tensor(tensor):
            raise UsageError(
                f"{name!r} is a DTensor: each rank holds a part of it (fully_shard, "
                "tensor parallelism), and distribute averages gradients of whole models "
                "that every rank holds. Leave sharding out, or train with FSDP alone"
            )


def check_not_inside_ddp(model: torch.nn.Module) -> None:
    """Raise `UsageError` if this forward pass of *model* runs inside that of a
    DistributedDataParallel which averages its gradients."""
    ddp = active_ddp()
    if ddp is None:
        return
    mine = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) in mine for parameter in ddp.parameters()):
        raise UsageError(
            "the model given to distribute runs inside DistributedDataParallel, which "
            "averages its gradients too: a step would use 1/n of the mean. Call the plain "
            "model (model, not ddp_model), and leave DDP out; trainers that wrap models "
            "by themselves (Hugging Face's Trainer, Accelerate's prepare) are told not to"
        )
