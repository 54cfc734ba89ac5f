"""Runs a script file as the body of every simulated worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paceline.cluster.cluster import Cluster
from paceline.errors import UsageError
from paceline.runtimes.results import RunResult
from paceline.runtimes.simulated.compute import ComputeModel
from paceline.runtimes.simulated.simulation import Simulation, SimulationResult


def run_script(
    simulation: Simulation, path: str, arguments: Sequence[str]
) -> SimulationResult:
    """Run the script once per worker, each with a ``__main__`` of its own.

    As under ``python SCRIPT``, its folder comes first on the module path. Modules that it imports
    are loaded once and shared by all workers.
    """
    try:
        source = Path(path).read_bytes()
        code = compile(source, path, "exec")
    except OSError as error:
        raise UsageError(f"cannot read the script {path}: {error}") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the script {path} is not Python: {error}") from error

    def body(rank: int) -> None:
        module = ModuleType("__main__")
        module.__file__ = path
        module.__builtins__ = __builtins__  # type: ignore[attr-defined]
        simulation.mains.register(rank, module)
        exec(code, module.__dict__)

    before = sys.argv, sys.path[:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        return simulation.run(body)
    finally:
        sys.argv, sys.path[:] = before


def result_of(
    outcome: SimulationResult,
    cluster: Cluster,
    compute: ComputeModel,
    asked: int | None = None,
) -> RunResult:
    """Return the simulation's result object; raises `UsageError` if nothing was trained.

    *compute* is the model that charged compute time; *asked* is the requested number of steps.
    """
    if not outcome.recorders[0].method:
        raise UsageError(
            "the script ended without calling paceline.distribute: nothing was trained"
        )
    summaries = outcome.by_worker([recorder.stats() for recorder in outcome.recorders])
    result = RunResult.of(
        "simulated", cluster.workers, outcome.recorders[0], summaries, asked
    )
    result.notes += sorted(outcome.estimated_compressors)
    if outcome.representatives:
        result.notes.append(outcome.representatives)
    if cluster.processor is None:
        result.notes.append(
            "messages cost processors nothing here, as the cluster does not say what "
            "they cost: paceline probe measures it"
        )
    result.compute = compute.describe(outcome.paced_by_script, outcome.stand_in)
    return result
