"""A model's real gradients of some steps, in files: as many as memory need not hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Write down what is trained with: its class's name and its groups' options."""
        groups = [
            {key: value for key, value in group.items() if _is_plain(value)}
            for group in optimizer.param_groups
        ]
        content = {"name": type(optimizer).__name__, "groups": groups}
        (self._folder / _OPTIMIZER).write_text(json.dumps(content))

    def optimizer(self) -> torch.optim.Optimizer | None:
        """One of that name, with these options and no parameters of the model's; None where
        nobody has said which."""
        file = self._folder / _OPTIMIZER
        if not file.exists():
            return None
        content = json.loads(file.read_text())
        cls: Any = type(content["name"], (torch.optim.Optimizer,), {})
        groups = [{"params": [torch.zeros(1)], **group} for group in content["groups"]]
        made: torch.optim.Optimizer = cls(groups, {})
        return made


_OPTIMIZER = "optimizer.json"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):  # betas
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
