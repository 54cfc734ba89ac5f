"""Analyzes a training script by running a few of its steps in virtual time.

The result is cached beside the script's compute times, if it can be saved.
"""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.cluster import Workload, uniform_cluster
from paceline.cluster.profiling import StepHabits
from paceline.core.optimizer import training_of
from paceline.errors import PacelineError, UsageError, WorkerFailedError
from paceline.interfaces import CONSISTENCIES, Consistency, Method
from paceline.interfaces.buckets import wire_bytes
from paceline.methods import METHODS
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
from paceline.runtimes.simulated.launch import run_script
from paceline.runtimes.simulated.profile_cache import FEW_WORKERS, CachedFile
from paceline.spec import parse
from paceline.tools.plan.candidates import declared_consistency
from paceline.tools.plan.predict import MakeOptimizer, plain_sgd
from paceline.tools.plan.predictor import has_rows_of_others

OnProgress = Callable[[str, int | None, int | None], None]
TRIED_STEPS = 3
"""Steps of a trial: a script that clips does so in its first step, and a scheduler may follow it."""


@dataclass(frozen=True)
class ScriptAnalysis:
    """The result of a script's analysis.

    Attributes:
        optimizer: Makes an optimizer like the script's.
        workload: The workload that the script's model represents; None: it is a real model.
        refused: Names of tried methods under which the script fails, and why.
        names: Trained tensors.
        sizes: Bytes of each.
        epoch_steps: Steps of an epoch of the script's sampler; 0: it has none.
        paced: Whether the script sets its own compute times.
        passes: As in `Workload`; None: no step has shown it.
        uses_gradients: As in `Workload`; None: no step has shown it.
        tried: Names of the methods whose kind was run.
        file: The cache file of an earlier run; empty: the script ran now.
    """

    optimizer: MakeOptimizer = plain_sgd
    workload: Workload | None = None
    refused: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    epoch_steps: int = 0
    paced: bool = False
    passes: int | None = None
    uses_gradients: bool | None = None
    tried: tuple[str, ...] = ()
    file: str = ""

    def of_script(self, workload: Workload) -> Workload:
        """*workload* with this script's passes and uses of gradients, even if another script was measured."""
        passes = workload.passes if self.passes is None else self.passes
        uses = self.uses_gradients
        uses = workload.uses_gradients if uses is None else uses
        notes = [workload.source] if workload.source else []
        if passes is not None and passes > 1:
            notes.append(f"{passes} passes an update (no_sync)")
        if uses:
            notes.append("the script reads or changes gradients before step()")
        return replace(
            workload, passes=passes, uses_gradients=uses, source="; ".join(notes)
        )

    def check(self, workload: Workload, what: str) -> None:
        """Check that a workload is of this model.

        Raises:
            UsageError: It is of another model.
        """
        workload.check_matches(self.names, self.sizes, what)


def analyze_script(
    script: str,
    arguments: Sequence[str],
    scratch: Path,
    allowed: Collection[Consistency] = CONSISTENCIES,
    on_progress: OnProgress = lambda what, number, count: None,
) -> ScriptAnalysis:
    """Run a script for a few steps on two workers, and analyze it.

    It runs under bsp, and under one method of each kind that treats gradients differently: methods of a kind refuse
    the same scripts. Cached results are not run again.

    Args:
        script: Its file.
        arguments: Its arguments.
        scratch: Folder for the checkpoints that it writes.
        allowed: Kinds without a method of these consistencies are not run.
        on_progress: Called before each run.

    Raises:
        UsageError: It trains nothing. The script's own errors under bsp are raised, too.
    """
    cached = CachedFile.of(ScriptJob(script, arguments), FEW_WORKERS, "analysis")
    analysis = cached.read(ScriptAnalysis, _decode)
    count = len(_untried(analysis, allowed))
    if analysis is not None and not count:
        return replace(analysis, file=str(cached.path))
    done = 0
    if analysis is None:
        done, count = 1, count + 1
        on_progress(_run_text(script, 1, count, "bsp"), None, None)
        analysis = _analyzed(script, arguments, scratch)
    # Compute the kinds again, since the script may have registered methods.
    lasts = True
    for number, kind in enumerate(_untried(analysis, allowed), start=done + 1):
        on_progress(_run_text(script, number, max(number, count), kind[0]), None, None)
        refused, refusals_last = _refusals(script, arguments, kind, scratch)
        lasts &= refusals_last
        analysis = replace(
            analysis,
            refused=analysis.refused | refused,
            tried=(*analysis.tried, *kind),
        )
    # A script's registrations only exist after it has run, so they are not cached.
    if lasts and not has_rows_of_others():
        with suppress(UsageError, NotImplementedError):  # then it runs again
            cached.keep(analysis, _encode)
    return analysis


def _run_text(script: str, number: int, count: int, method: str) -> str:
    return (
        f"running {script} for {TRIED_STEPS} steps: {number} of {count}, under {method}"
    )


def _refusals(
    script: str, arguments: Sequence[str], kind: Sequence[str], scratch: Path
) -> tuple[dict[str, str], bool]:
    """Why the script fails under the methods of a *kind* (empty if it does not), and whether that is permanent.

    Errors that are not paceline's, such as a full disk, may not occur again.
    """
    try:
        _run(script, arguments, kind[0], scratch)
    except PacelineError as error:
        cause = error.__cause__ if isinstance(error, WorkerFailedError) else None
        lasts = isinstance(cause or error, PacelineError)
        return dict.fromkeys(kind, str(cause or error)), lasts
    return {}, True


def _analyzed(script: str, arguments: Sequence[str], scratch: Path) -> ScriptAnalysis:
    """Return the result of a run under bsp."""
    habits: list[StepHabits] = []
    simulation = _run(script, arguments, "bsp", scratch, habits)
    trainings = simulation.registry_of(0).trainings
    if not trainings:
        raise UsageError(
            f"{script} ended without calling paceline.distribute: nothing was trained"
        )
    optimizer = optimizer_like(trainings[0].optimizer)
    sampler = training_of(trainings[0].optimizer).context.sampler
    own = getattr(trainings[0].model, "workload", None)
    workload = own if isinstance(own, Workload) else None
    values = parse(simulation.result.recorders[0].method).values
    waits_for_means = not {"clip_norm", "check_finite"}.isdisjoint(values)
    trained = [
        (name, wire_bytes(parameter))
        for name, parameter in trainings[0].model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    ]
    return ScriptAnalysis(
        optimizer,
        workload,
        names=tuple(name for name, _ in trained),
        sizes=tuple(size for _, size in trained),
        epoch_steps=0 if sampler is None else len(sampler),
        paced=simulation.result.paced_by_script,
        passes=habits[0].passes,
        uses_gradients=waits_for_means or habits[0].uses_gradients,
    )


def _untried(
    analysis: ScriptAnalysis | None, allowed: Collection[Consistency]
) -> list[list[str]]:
    """Return the kinds with a method of an *allowed* consistency that were not run yet."""
    tried = () if analysis is None else analysis.tried
    return [
        kind
        for kind in _kinds()
        if not set(kind) <= set(tried)
        and any(declared_consistency(name) in allowed for name in kind)
    ]


def _kinds() -> list[list[str]]:
    """Names of methods, grouped by the gradients that a script sees and when; without bsp's group."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, cls in METHODS.items():
        method: Method = cls()
        kinds.setdefault((method.updates_on, method.visible_gradient), []).append(name)
    return [names for names in kinds.values() if "bsp" not in names]


def _encode(optimizer: object) -> dict[str, object]:
    """Convert an optimizer of `torch.optim` to data. Raises `NotImplementedError` for any other."""
    if not isinstance(optimizer, partial) or not _is_plain(optimizer.keywords.values()):
        raise NotImplementedError
    name = optimizer.func.__name__
    if getattr(torch.optim, name, None) is not optimizer.func:
        raise NotImplementedError
    return {"name": name, "values": optimizer.keywords}


def _is_plain(values: Iterable[object]) -> bool:
    """Return whether JSON can hold all *values*."""
    return all(
        _is_plain(value)
        if isinstance(value, tuple)
        else value is None
        or isinstance(value, bool | int | str)
        or (isinstance(value, float) and math.isfinite(value))
        for value in values
    )


def _decode(kind: type, data: Any) -> MakeOptimizer:
    """Restore the result of `_encode`."""
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data["values"].items()
    }
    make: MakeOptimizer = partial(getattr(torch.optim, data["name"]), **values)
    return make


def _run(
    script: str,
    arguments: Sequence[str],
    method: str,
    scratch: Path,
    habits: list[StepHabits] | None = None,
) -> Simulation:
    """Run a few steps. *habits* receives those of worker 0, by training."""
    simulation = Simulation(
        uniform_cluster(FEW_WORKERS, "10gbit", "50us"),
        options=RunOptions(method=method, steps=TRIED_STEPS, tells=False),
        compute=ComputeModel(),
        output="first",
    )
    if habits is not None:

        def watch(
            model: torch.nn.Module,
            parameters: Sequence[tuple[str, torch.nn.Parameter]],
        ) -> list[StepHabits]:
            habits.append(StepHabits([parameter for _, parameter in parameters]))
            return habits[-1:]

        simulation.registry_of(0).watchers.append(watch)
    quiet = io.StringIO()
    with (
        redirect_stdout(quiet),
        redirect_stderr(quiet),
        redirect_checkpoints(scratch),
    ):
        run_script(simulation, script, arguments)
    return simulation


def optimizer_like(optimizer: torch.optim.Optimizer) -> MakeOptimizer:
    """Return a factory of optimizers with the same class and hyperparameters; of plain SGD if that fails."""
    real: Any = getattr(optimizer, "unwrapped", optimizer)
    cls: Any = type(real)
    known = inspect.signature(cls).parameters
    values = {k: v for k, v in real.defaults.items() if k in known}
    like: MakeOptimizer = partial(cls, **values)
    try:
        like([torch.nn.Parameter(torch.zeros(1))])
    except Exception:
        return plain_sgd
    return like
