"""Refuses or warns of scripts that start workers, or a process group, by themselves.

Under a launcher of n workers, ``torch.multiprocessing.spawn`` in the script starts n jobs, which
wait for each other's ports forever. In the simulated runtime it starts real processes.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

import torch.distributed as dist
import torch.multiprocessing

from paceline.errors import UsageError

STARTERS = ("spawn", "start_processes")


def refuse_spawn(function: object, *arguments: object, **keywords: object) -> NoReturn:
    """Raise `UsageError` in place of torch's functions, whatever their arguments."""
    name = getattr(function, "__name__", "main")
    raise UsageError(
        "torch.multiprocessing.spawn: this process is one worker of a job already, and a "
        f"script that starts workers of its own starts a job in each of them. Call {name} "
        f'once, for this worker: {name}(int(os.environ["RANK"]), ...), with WORLD_SIZE from '
        "there too, or call paceline.init() and ask paceline.rank()"
    )


def refuse_spawn_from_now_on() -> None:
    """Replace torch's functions in this process, which a launcher has started."""
    for name in STARTERS:
        setattr(torch.multiprocessing, name, refuse_spawn)


WARNING = (
    "paceline: worker {rank}: the script has a torch.distributed process group of its own. Under --survive "
    "its collectives fail on all workers when one dies, so all end, and begin at the top of the script. Leave "
    "it out: paceline.log(loss=loss) logs without the others (docs/how-to/survive-failures.md)"
)


def warn_of_process_group(rank: int) -> None:
    """Warn once, on worker 0: now if there is a group, else when the script makes one."""
    if rank != 0:
        return
    if dist.is_initialized():
        _report(rank)
        return
    init = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        dist.init_process_group = init
        _report(rank)
        init(*arguments, **keywords)

    dist.init_process_group = init_process_group


def _report(rank: int) -> None:
    print(WARNING.format(rank=rank), file=sys.stderr, flush=True)
