"""What the command line decided for one run, whatever its script says; and the run's job: a script with that."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError

CLUSTER_VARIABLE = "PACELINE_CLUSTER"
"""A cluster file: the network that a real job is on."""


def seconds_from(
    environment: Mapping[str, str], variable: str, default: float
) -> float:
    """A time above zero that *variable* sets, or else the *default*. Raises
    `UsageError`."""
    text = environment.get(variable)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"environment variable {variable}: expected seconds above 0, got {text!r}"
        )
    return seconds


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Decisions of the command line; None leaves each to the script.

    Attributes:
        method: A spec that overrides the script's.
        steps: End training after so many optimizer steps.
        seed: Seed every random generator at the start.
        json: Print the result object at the end.
        result: Write it to this file instead.
        records: A folder for records of steps.
        profile: Measure compute times, and write them to this file.
        gradients: A folder to which worker 0 writes its own gradients, while it is profiled.
        gradient_steps: Of how many steps.
        pace: The workload whose times an emulated worker takes.
        tells: Log when *steps* end a script.
        cluster: A file that describes the network of a real job.
        report_to: Where worker 0's step records go, too (see `paceline.report_to`).
    """

    method: str | None = None
    steps: int | None = None
    seed: int | None = None
    json: bool = False
    records: str | None = None
    result: str | None = None
    profile: str | None = None
    gradients: str | None = None
    gradient_steps: int = 1
    pace: str | None = None
    tells: bool = True
    cluster: str | None = None
    report_to: str | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps: expected 1 or more, got {self.steps}")

    def to_environment(self) -> dict[str, str]:
        """The variables that carry these options to worker processes."""
        values = {
            "PACELINE_METHOD": self.method,
            "PACELINE_STEPS": self.steps,
            "PACELINE_SEED": self.seed,
            "PACELINE_JSON": "1" if self.json else None,
            "PACELINE_RECORDS": self.records,
            "PACELINE_RESULT": self.result,
            "PACELINE_PROFILE": self.profile,
            "PACELINE_GRADIENTS": self.gradients,
            "PACELINE_GRADIENT_STEPS": self.gradient_steps if self.gradients else None,
            "PACELINE_PACE": self.pace,
            CLUSTER_VARIABLE: self.cluster,
            "PACELINE_REPORT_TO": self.report_to,
        }
        return {key: str(value) for key, value in values.items() if value is not None}

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ
    ) -> RunOptions:
        """Read back, in a real process, what `to_environment` wrote or a person set.

        The simulated runtime does not look: its options come from its command line.
        """

        def whole(key: str) -> int | None:
            text = environment.get(key)
            if not text:
                return None
            try:
                return int(text)
            except ValueError:
                raise UsageError(
                    f"environment variable {key}: expected a whole number, got {text!r}"
                ) from None

        json = environment.get("PACELINE_JSON", "0")
        if json not in ("", "0", "1"):
            raise UsageError(
                f"environment variable PACELINE_JSON: expected 0 or 1, got {json!r}"
            )
        return cls(
            method=environment.get("PACELINE_METHOD") or None,
            steps=whole("PACELINE_STEPS"),
            seed=whole("PACELINE_SEED"),
            json=json == "1",
            records=environment.get("PACELINE_RECORDS") or None,
            result=environment.get("PACELINE_RESULT") or None,
            profile=environment.get("PACELINE_PROFILE") or None,
            gradients=environment.get("PACELINE_GRADIENTS") or None,
            gradient_steps=whole("PACELINE_GRADIENT_STEPS") or 1,
            pace=environment.get("PACELINE_PACE") or None,
            cluster=environment.get(CLUSTER_VARIABLE) or None,
            report_to=environment.get("PACELINE_REPORT_TO") or None,
        )


@dataclass(frozen=True)
class ScriptJob:
    """What a runtime launches: a *script* with its own *arguments*, under *options*."""

    script: str
    arguments: Sequence[str] = ()
    options: RunOptions = RunOptions()
