"""One seed from start to end."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos.cases import EMULATED, RAY, Case, Fault, draw
from tests.chaos.invariants import violations
from tests.chaos.trial import END_SECONDS, Trial, disk


@dataclass
class Outcome:
    """What became of a seed.

    Args:
        title: What it stands for.
        tally: Names under which the campaign counts it.
        violations: Invariants that do not hold.
        output: What its processes printed.
        landed: Faults that have found a process.
        status: The launcher's exit status.
    """

    title: str
    tally: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    output: str = ""
    landed: list[Fault] = field(default_factory=list)
    status: int | None = None


def run_seed(seed: int, *, on_ray: bool = False) -> Outcome:
    """Run the case of a seed. An error of the campaign itself is a violation, too: the other seeds go on."""
    case = draw(seed, on_ray=on_ray)
    try:
        return run(case)
    except Exception:
        return Outcome(
            f"{case} -> an error of the campaign",
            violations=[traceback.format_exc()],
        )


def run(case: Case, end_seconds: float = END_SECONDS) -> Outcome:
    """Run the job of a case with its faults. If it ends badly, go on from its checkpoint or snapshot."""
    began = time.monotonic()
    needs_root = case.launcher == EMULATED or any(f.kind == "FULL" for f in case.faults)
    if needs_root and os.geteuid() != 0:
        return Outcome(f"{case} -> not run: it needs root", ["not run: it needs root"])
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as name,
        disk(case, Path(name)),
    ):
        trial = Trial(case, Path(name))
        try:
            for fault in case.faults:
                trial.inject(fault)
            found = trial.wait(end_seconds)
        finally:
            trial.end()
        found = found or violations(trial)
        if not found and trial.job.status != 0 and case.restarts:
            found = _go_on(trial, end_seconds)
    seconds = time.monotonic() - began
    landed = [f"fault: {f.kind} to {f.target.split()[0]}" for f in trial.landed]
    survive = " --survive" * (case.survive and case.launcher != RAY)
    launcher = f"{case.launcher}{survive}"
    return Outcome(
        f"{case} -> status {trial.job.status}, {len(landed)} landed, {seconds:.0f} s",
        [f"method: {case.method}", f"launcher: {launcher}", *landed],
        found,
        trial.job.output,
        trial.landed,
        trial.job.status,
    )


def _go_on(ended: Trial, end_seconds: float) -> list[str]:
    """Start the same job again: without faults it comes to its end, with the same numbers."""
    for file in ended.folder.glob("result-*"):
        file.unlink()
    calm = replace(ended.case, faults=())
    trial = Trial(calm, ended.folder, "again", resumes=ended.case.survive)
    try:
        found = trial.wait(end_seconds)
    finally:
        trial.end()
    if not found and trial.job.status != 0:
        found = [f"status {trial.job.status}"]
    # The ledger knows that the first job's processes have died.
    trial.landed = ended.landed
    found = found or violations(trial)
    return [f"going on: {violation}\n{trial.job.output}" for violation in found]
