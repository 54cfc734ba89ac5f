"""A script's own process group, in a job that survives: each worker's warning of what it costs."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.distributed as dist

WARNING = (
    "paceline: worker {rank}: the script has a torch.distributed process group of its own. Under --survive "
    "its collectives fail on all workers when one dies, so all end, and begin at the top of the script. Leave "
    "it out: paceline.log(loss=loss) logs without the others (docs/parameter-server.md, A job that survives)"
)


def warn_of(rank: int) -> None:
    """Say so once, on worker 0: now, where there is a group, or when the script makes one."""
    if rank != 0:
        return
    if dist.is_initialized():
        _say(rank)
        return
    init = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        dist.init_process_group = init
        _say(rank)
        init(*arguments, **keywords)

    dist.init_process_group = init_process_group


def _say(rank: int) -> None:
    print(WARNING.format(rank=rank), file=sys.stderr, flush=True)
