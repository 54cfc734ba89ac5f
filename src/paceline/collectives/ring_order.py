"""Sums in the order in which gloo's ring adds, so that both runtimes round alike.

Floating-point addition depends on order. gloo cuts a buffer into n chunks of equal size
(the last may be short), and passes chunk c once round the ring, from rank c-1 downwards:
((x[c-1] + x[c-2]) + ...) + x[c], ranks modulo n. Found by experiment for 3 to 5 processes,
sizes from 1 to 3 million and 16 to 64 bits, and held by a test: equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SEGMENT_BYTES = 1 << 20
"""gloo's largest segment."""


def ring_sum(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of one tensor per rank, of the shape of each."""
    n, first = len(contributions), contributions[0]
    if n <= 2:
        return first + contributions[1] if n == 2 else first.clone()
    size, width = first.numel(), first.element_size()
    # The number of segments is a multiple of n, and at least 2n: gloo receives one while
    # it adds another.
    largest = max(1, _SEGMENT_BYTES // width)
    segments = _round_up(max(-(-size // largest), 2 * n), n)
    chunk = segments // n * -(-size // segments)
    padded = first.new_zeros(n, n * chunk)
    for rank, tensor in enumerate(contributions):
        padded[rank, :size] = tensor.reshape(-1)
    chunks = padded.view(n, n, chunk)  # rank, chunk, element
    number = torch.arange(n, device=first.device)
    total = chunks[(number - 1) % n, number]
    for behind in range(2, n + 1):
        total += chunks[(number - behind) % n, number]
    return total.view(-1)[:size].view(first.shape)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
