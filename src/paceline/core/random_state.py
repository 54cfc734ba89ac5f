"""One seed for every random generator of a process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, where it is loaded, numpy's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)


def random_states() -> dict[str, Any]:
    """The states of all generators, as tensors, numbers and texts."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        if name == "MT19937":  # a script saves another generator by itself
            states["numpy"] = [torch.from_numpy(keys.astype("int64")), *rest]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` gave."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    numpy_random = sys.modules.get("numpy.random")
    if "numpy" in states and numpy_random is not None:
        keys, position, has_gauss, gauss = states["numpy"]
        keys = keys.numpy().astype("uint32")
        numpy_random.set_state(("MT19937", keys, position, has_gauss, gauss))
