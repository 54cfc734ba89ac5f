"""Goals, and the records that variants leave."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from paceline.errors import UsageError
from paceline.records import StepRecord
from paceline.tools.compare.runner import Goal, Variant, merge_records
from tests.tools.compare.cases import Comparison, falling, record


def test_a_value_in_single_precision_reaches_what_it_is_printed_as() -> None:
    metrics = {"accuracy": float(torch.tensor(342 / 360)), "loss": 0.5}
    step = record(0, 7, 1.0, metrics)
    assert metrics["accuracy"] < 0.95
    assert reached(Goal("accuracy", 0.95), [step]) is step
    assert reached(Goal("accuracy", 0.9501), [step]) is None
    assert reached(Goal("loss", 0.5), [step], 0.1) is step
    # Logged, and no step taken.
    assert reached(Goal("loss", 0.5), [], 0.1) is None


def reached(
    goal: Goal, steps: list[StepRecord], last: float | None = None
) -> StepRecord | None:
    curve = goal.curve(steps, last)
    return goal.reached(curve, goal.rises([curve]))


@pytest.mark.parametrize(
    ("curves", "first"),
    [
        ([[0.93, 0.96], [0.96, 0.97]], [2, 1]),
        # The others tell which way a single value is to go.
        ([[0.5, 0.9], [0.96]], [None, 1]),
        ([[2.0, 0.9], [0.96]], [2, None]),
        ([[0.96, 0.97], [2.0, 3.0]], [1, 1]),
    ],
)
def test_all_runs_tell_whether_a_metric_is_to_rise(
    tmp_path: Path, curves: list[list[float]], first: list[int | None]
) -> None:
    variants = [Variant(number, f"m{number}") for number in range(len(curves))]
    outcomes = []
    for variant, curve in zip(variants, curves, strict=True):
        logged = [{"m": value} for value in curve]
        outcomes.append(Comparison().add(variant.spec, logged))
        steps = [
            record(0, number, float(number), metrics)
            for number, metrics in enumerate(logged, start=1)
        ]
        leave(tmp_path, variant, steps)
    runs = merge_records(variants, outcomes, tmp_path, Goal("m", 0.95))
    assert [run.reached and run.reached.step for run in runs] == first


@pytest.mark.parametrize("text", ["accuracy", "=3", "loss=low", "loss=inf"])
def test_a_goal_is_a_metric_and_a_number(text: str) -> None:
    with pytest.raises(UsageError, match="--until: expected METRIC=VALUE"):
        Goal.read(text)


def leave(folder: Path, variant: Variant, steps: list[StepRecord]) -> None:
    """What a variant's process leaves."""
    own = folder / variant.file_name
    own.mkdir()
    (own / "records.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(steps))
    (own / "records.trace.json").write_text("{}")


def test_records_of_all_that_ran_are_gathered(tmp_path: Path) -> None:
    goal = Goal("accuracy", 0.15)
    comparison = Comparison()
    comparison.add("bsp", falling(20), workers=2)
    comparison.end("asp")
    comparison.add("bsp", falling(9))
    variants = [run.variant for run in comparison.runs]
    for run in comparison.runs:
        if run.result is not None:
            leave(tmp_path, run.variant, list(run.steps))
    outcomes = [run.outcome for run in comparison.runs]
    runs = merge_records(variants, outcomes, tmp_path, goal)
    assert [len(run.steps) for run in runs] == [40, 0, 9]
    assert [run.reached and run.reached.step for run in runs] == [20, None, None]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("records.jsonl", ".paceline-files", "1-bsp.trace.json", "3-bsp.trace.json"),
    }
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["variant"] for line in lines] == ["bsp"] * 49
