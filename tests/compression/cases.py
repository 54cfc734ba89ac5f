"""Tensors to compress, and what comes back of them."""

from __future__ import annotations

import torch

from paceline.testing.compressor_checks import Workers


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def mean_of(compressor, *values):
    """The mean that workers form, each of which has one tensor."""
    given = [[value] for value in values]
    return Workers(compressor, given[0], len(given)).mean(given)


def through(compressor, values):
    """What one worker's code of a tensor stands for."""
    code = compressor.encode([values], [compressor.init_state(values, "x", 0)])
    decoded = torch.zeros_like(values)
    compressor.decode(code, [decoded])
    return decoded
