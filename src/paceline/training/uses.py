"""Tells a method that parameters are about to be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.hooks import Uncopied
from paceline.tensors import Bucket

READS_ITS_CHILDREN: tuple[type[torch.nn.Module], ...] = (torch.nn.MultiheadAttention,)
"""Modules that use their children's parameters without calling the children."""


class Uses:
    """Calls *about_to_use* with each bucket, once in a step, when a module is called that
    has parameters in it."""

    def __init__(
        self,
        model: torch.nn.Module,
        place: Callable[[torch.nn.Parameter], Bucket | None],
        about_to_use: Callable[[Bucket], None],
    ) -> None:
        self._place, self._about_to_use = place, about_to_use
        self._told: set[int] = set()
        self._handles = []
        for module in model.modules():
            deep = isinstance(module, READS_ITS_CHILDREN)
            own = list(module.parameters(recurse=deep))
            if own:
                hook = Uncopied(self._hook(own))
                self._handles.append(module.register_forward_pre_hook(hook))

    def begin_anew(self) -> None:
        """What was told before counts no more: an update has changed the parameters."""
        self._told.clear()

    def detach(self) -> None:
        """Take the hooks out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, own: Sequence[torch.nn.Parameter]) -> Callable[..., None]:
        def is_called(*_: Any) -> None:
            for parameter in own:
                bucket = self._place(parameter)
                if bucket is not None and bucket.index not in self._told:
                    self._told.add(bucket.index)
                    self._about_to_use(bucket)

        return is_called
