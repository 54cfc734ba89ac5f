"""What a step tells of itself, beside its times: for people who look (`StepRecord.figures`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.core.training_parts import Parts
    from paceline.interfaces import State


class Figures:
    """Those of one worker's training, by name:

    - ``round``: how many it has been in, where models differ between rounds;
    - ``staleness``: where servers update, how many updates by others there were on them between the
      parameters that the gradient was computed with and its own update; of the model's parts the most;
    - ``residual_norm``: of all that compression has left out so far, where that is kept;
    - and what the method itself says (`Method`, hook 11).
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __call__(self) -> dict[str, float]:
        parts = self._parts
        found: dict[str, float] = {}
        if parts.rounds.models_may_differ and parts.remote is None:
            found["round"] = parts.steps.rounds
        states: Mapping[str, State] = {} if parts.codes is None else parts.codes.states
        if parts.remote is not None:
            found["staleness"] = parts.remote.staleness
            if parts.remote.encoding is not None:
                states = parts.remote.encoding.states
        residuals = [one for state in states.values() for one in _residuals(state)]
        if residuals:
            # Of complex residuals the imaginary parts count, too.
            reals = [torch.view_as_real(r) if r.is_complex() else r for r in residuals]
            norms = [torch.linalg.vector_norm(real.float()) for real in reals]
            found["residual_norm"] = float(torch.linalg.vector_norm(torch.stack(norms)))
        if parts.hooks.has("figures"):
            found |= parts.hooks.ask("figures")
        return found


def _residuals(state: State) -> Iterator[torch.Tensor]:
    """Those that it holds, or one inside it: wrappers keep the states of what they wrap."""
    for name, value in state.items():
        if name == "residual":
            yield value
        elif isinstance(value, dict):
            yield from _residuals(value)
