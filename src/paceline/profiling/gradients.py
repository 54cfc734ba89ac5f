"""A model's real gradients of some steps, in files: as many as memory need not hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.errors import UsageError

Named = list[tuple[str, torch.Tensor]]
"""A gradient, tensor by tensor, in the order in which tensors become ready."""


class KeptGradients:
    """One worker's own gradients of its first steps, in a *folder*, which exists; *wanted*: of
    how many steps."""

    def __init__(self, folder: str | Path, wanted: int = 1) -> None:
        self._folder, self.wanted = Path(folder), wanted

    def __len__(self) -> int:
        return len(list(self._folder.glob("*.pt")))

    @property
    def is_full(self) -> bool:
        """Whether there are as many as are wanted."""
        return len(self) >= self.wanted

    def keep(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Write down the gradient of a step, in ready order."""
        content = {
            "names": list(names),
            "gradients": list(tensors),
            "threads": torch.get_num_threads(),
        }
        torch.save(content, self._folder / f"{len(self)}.pt")

    def read(self, step: int) -> tuple[Named, int]:
        """The gradient of a step, on its device, and of how many threads the training was.

        Raises `UsageError` where there is none.
        """
        if not len(self):
            raise UsageError(
                "no gradients were seen: expected a script that trains with "
                "paceline.distribute, calls the model itself and then backward()"
            )
        content = torch.load(self._folder / f"{step}.pt", weights_only=True)
        named = list(zip(content["names"], content["gradients"], strict=True))
        return named, int(content["threads"])
