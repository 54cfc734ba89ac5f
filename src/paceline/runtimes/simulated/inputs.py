"""Of which shape a model's inputs are, in training."""

from __future__ import annotations

from typing import Any

import torch

from paceline.torch_internals import Uncopied

Shapes = list[list[int]]
"""Of the tensors that a model is called with, without their first dimension, the samples."""


class SeenInputs:
    """Watches a *model*'s training calls. ``shapes`` are those of the first, or None: nothing
    was seen yet, or later ones differed, as padded sequences do."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shapes: Shapes | None = None
        self._vary = False
        self._handle = model.register_forward_pre_hook(
            Uncopied(self._called), with_kwargs=True
        )

    def _called(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._vary or not torch.is_grad_enabled():
            return
        shapes = shapes_of(args, kwargs)
        if self.shapes is not None and self.shapes != shapes:
            self._vary = True
            self.shapes = None
        else:
            self.shapes = shapes


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Of one call."""
    values = (*args, *(kwargs[name] for name in sorted(kwargs)))
    return [list(v.shape[1:]) for v in values if isinstance(v, torch.Tensor)]
