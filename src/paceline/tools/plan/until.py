"""The best of each class, trained for real in virtual time until a metric is reached."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from paceline.cluster import Cluster
from paceline.errors import PacelineError
from paceline.interfaces import Quality
from paceline.run_options import RunOptions
from paceline.runtimes.simulated import ComputeModel, Simulation, SimulationResult
from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
from paceline.runtimes.simulated.script import run_script
from paceline.tools.compare.goal import Goal
from paceline.units import show_seconds

Told = Callable[[str, int, int], None]


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """When *spec* reached the goal: *seconds* of training and *steps*; None where it did not.
    *last*: the metric at the end of the script. *failed*: why it did not train."""

    spec: str
    quality: Quality
    seconds: float | None = None
    steps: int | None = None
    last: float | None = None
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is trained: *script*, on *cluster*, charged as *compute* says. Its checkpoints go to
    *scratch*; *steps*: at most so many, where the script has more."""

    script: str
    arguments: Sequence[str]
    cluster: Cluster
    compute: ComputeModel
    scratch: Path
    steps: int | None = None

    def run(self, spec: str, told: Callable[[int], None]) -> SimulationResult:
        """With the method *spec*; *told* is called twice a second with the steps that are done."""

        def look(_: float) -> None:
            told(len(simulation.result.kept[0].steps))

        simulation = Simulation(
            self.cluster,
            options=RunOptions(
                method=spec, steps=self.steps, seed=self.compute.seed, tells=False
            ),
            compute=self.compute,
            trace=True,
            output="first",
            look=look,
        )
        quiet = io.StringIO()
        with (
            redirect_stdout(quiet),
            redirect_stderr(quiet),
            redirect_checkpoints(self.scratch),
        ):
            return run_script(simulation, self.script, self.arguments)


def until(
    best: Mapping[Quality, str],
    goal: Goal,
    trained: Trained,
    told: Told = lambda what, number, count: None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Reached]:
    """Trains with each spec, and ranks them by the time to the goal.

    *told* is called now and then with what runs, the steps that are done and how many there will
    be: as many as the first training had, once that is known (0 until then). *say* is told how
    long it will take, before it starts and when the first is done. Raises `UsageError` where the
    script never logs that metric.
    """
    say(
        f"--until trains with {len(best)} methods, each as long as the script trains on all "
        f"{trained.cluster.workers} workers, one after the other (--steps ends them sooner)"
    )
    found: list[Reached] = []
    each, began = trained.steps or 0, time.perf_counter()
    for number, (quality, spec) in enumerate(best.items(), start=1):
        words = f"{number} of {len(best)}: {spec}"
        try:
            outcome = trained.run(spec, partial(_tell, told, words, each))
        except PacelineError as error:
            found.append(Reached(spec=spec, quality=quality, failed=str(error)))
            continue
        reached = _reached(spec, quality, goal, outcome)
        if not each or number == 1:
            each = outcome.journals[0].step_count
            left = (len(best) - number) * (time.perf_counter() - began)
            short = (trained.steps or 0) > each
            asked = f" ({trained.steps} were asked for: the script ends by itself)"
            say(
                f"--until: {each} steps each{asked * short}; the others take about "
                f"{show_seconds(left)}"
            )
        found.append(reached)
    return sorted(found, key=lambda one: (one.seconds is None, one.seconds or 0.0))


def _tell(told: Told, words: str, count: int, done: int) -> None:
    told(words, done, count)


def _reached(
    spec: str, quality: Quality, goal: Goal, outcome: SimulationResult
) -> Reached:
    metrics = outcome.journals[0].metrics
    goal.check_logged(metrics)
    last = metrics[goal.metric]
    when = goal.reached(outcome.kept[0].steps, last)
    if when is None:
        return Reached(spec=spec, quality=quality, last=last)
    return Reached(
        spec=spec, quality=quality, seconds=when.end_seconds, steps=when.step, last=last
    )
