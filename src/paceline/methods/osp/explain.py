"""Why nothing was deferred, for people who see figures like bsp's."""

from __future__ import annotations

from paceline.methods.osp.budget import EPOCHS
from paceline.methods.osp.options import INTERVAL, OSPOptions


def why_nothing(
    options: OSPOptions, steps: int, part: float, waited: bool
) -> str | None:
    """A sentence for a training of so many *steps* in which nothing was deferred; None if
    nothing was asked for. *part*: of the budget, may be used by now (see `Growth`);
    *waited*: steps were seen to wait for the network."""
    if options.defer == "nothing" or options.most == 0:
        return None
    if part == 0 and options.budget == "loss":
        epoch = max(1, options.ramp // EPOCHS)
        why = (
            f"budget=loss grows as the loss falls, which is seen after {2 * epoch} steps "
            f"(of {steps} here); budget=constant defers from the start"
        )
    elif steps <= INTERVAL + 1:
        why = f"what may wait is decided every {INTERVAL} steps, and there were {steps}"
    elif options.defer == "measured" and not waited:
        why = "steps did not wait for the network"
    else:
        why = (
            f"it would not have made steps shorter, with {100 * options.most * part:.3g} "
            "% of the model that may wait"
        )
    return f"osp deferred nothing: {why}"
