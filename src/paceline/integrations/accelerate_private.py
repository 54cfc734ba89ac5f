"""What Accelerate keeps for a process, and simulated workers, which are threads, need one by one."""

from __future__ import annotations

from accelerate.state import (
    AcceleratorState,
    GradientState,
    PartialState,
    ThreadLocalSharedDict,
)

from paceline.errors import UsageError
from paceline.interfaces import current_runtime


def states_of_threads() -> None:
    """In virtual time workers are threads: each has a state of its own, as on TPUs."""
    runtime = current_runtime()
    if runtime is None or runtime.name != "simulated":
        return
    if PartialState._shared_state:
        raise UsageError(
            "in virtual time import paceline.integrations before Accelerator() and "
            "TrainingArguments(): workers are threads here, and each needs a state of its own "
            "from the start"
        )
    for cls in (PartialState, AcceleratorState, GradientState):
        if not isinstance(vars(cls)["_shared_state"], ThreadLocalSharedDict):
            cls._shared_state = ThreadLocalSharedDict()
