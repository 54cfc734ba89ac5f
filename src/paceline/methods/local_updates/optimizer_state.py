"""What the inner optimizer keeps of each parameter, where workers average that, too.

The first and second moments themselves are averaged, never the root of the second: that is
Local Adam's mean. Counters of steps stay each worker's own.
"""

from __future__ import annotations

import copy
from collections import defaultdict

import torch

from paceline.errors import UsageError
from paceline.interfaces import Run
from paceline.interfaces.buckets import stand_alike
from paceline.methods.flat_tensors import Flat
from paceline.methods.local_updates.fragments import Part, wide
from paceline.methods.local_updates.options import Options

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""The names under which torch's optimizers keep them."""


def names_of_moments(
    optimizer: torch.optim.Optimizer,
) -> dict[int, list[str]]:
    """Which moments each parameter has once it was trained, by the parameter's identity: of
    every worker alike, also of one that has not trained yet. A copy of the optimizer is asked, on a parameter of one element. Raises `UsageError` where that cannot step."""
    found: dict[int, list[str]] = {}
    for group in filter(lambda group: group["params"], optimizer.param_groups):
        trial = copy.copy(optimizer)
        first = group["params"][0]
        like = torch.nn.Parameter(first.new_zeros((1,) * first.dim()))
        like.grad = torch.zeros_like(like)
        trial.state = defaultdict(dict)
        trial.param_groups = [{**group, "params": [like]}]
        try:
            trial.step()
        except Exception as error:
            raise UsageError(
                f"state=average: {type(optimizer).__name__} cannot be tried on a single "
                f"small parameter, which shows what it keeps ({error}); use state=local"
            ) from error
        kept = trial.state[like]
        names = [name for name in MOMENTS if isinstance(kept.get(name), torch.Tensor)]
        for parameter in group["params"]:
            found[id(parameter)] = names
    return found


def require_moments(options: Options, run: Run) -> None:
    """Raise `UsageError` where the optimizer keeps nothing that could be averaged."""
    assert run.optimizer is not None, "workers update"
    if not any(names_of_moments(run.optimizer).values()):
        raise UsageError(
            f"{options.name}:state=average: {type(run.optimizer).__name__} keeps none of "
            f"{', '.join(MOMENTS)} of its parameters, so there is nothing to average: take "
            "an optimizer with momentum, or state=local"
        )


def flats_of_moments(part: Part, run: Run) -> list[Flat]:
    """Those of a part's parameters; zeros for what this worker has not trained yet."""
    assert run.optimizer is not None, "workers update"
    names = names_of_moments(run.optimizer)
    known = {
        id(tensor): run.optimizer.state.get(tensor, {})
        for group in run.optimizer.param_groups
        for tensor in group["params"]
    }
    flats = []
    for flat in part.parameters:
        for name in MOMENTS:
            moments = [
                _moment(known[id(parameter)], name, parameter)
                for parameter in flat.of
                if name in names.get(id(parameter), ())
            ]
            if moments:
                flats.append(wide(moments))
    return flats


def _moment(
    state: dict[str, torch.Tensor], name: str, parameter: torch.Tensor
) -> torch.Tensor:
    found = state.get(name)
    moment = torch.zeros_like(parameter) if found is None else found
    return stand_alike(moment.detach(), parameter)
