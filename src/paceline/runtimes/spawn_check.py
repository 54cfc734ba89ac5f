"""Scripts that start workers by themselves: refused where somebody else starts them.

``torch.multiprocessing.spawn`` in a script that a launcher runs n times starts n jobs, which
wait for each other's ports for ever; in the simulated runtime it starts real ones.
"""

from __future__ import annotations

from typing import NoReturn

import torch.multiprocessing

from paceline.errors import UsageError

STARTERS = ("spawn", "start_processes")


def refuse(function: object, *arguments: object, **keywords: object) -> NoReturn:
    """In the place of torch's functions, whatever they are given."""
    name = getattr(function, "__name__", "main")
    raise UsageError(
        "torch.multiprocessing.spawn: this process is one worker of a job already, and a "
        f"script that starts workers of its own starts a job in each of them. Call {name} "
        f'once, for this worker: {name}(int(os.environ["RANK"]), ...), with WORLD_SIZE from '
        "there too, or call paceline.init() and ask paceline.rank()"
    )


def refuse_from_now_on() -> None:
    """In this process, which a launcher has started."""
    for name in STARTERS:
        setattr(torch.multiprocessing, name, refuse)
