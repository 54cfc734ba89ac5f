"""One seed for every random generator of a process."""

from __future__ import annotations

import random
import sys

import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, where it is loaded, numpy's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)
