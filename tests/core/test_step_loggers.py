"""Each step's record reaches whoever asks, and the tools that people look at; and what it says of the
method's own.
"""

from __future__ import annotations

import csv
import sys
import types
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import paceline
from paceline.core.step_loggers import SINKS, numbers_of, sink_for
from paceline.errors import UsageError
from paceline.records import StepRecord
from paceline.run_options import RunOptions
from tests.support import forked
from tests.support.simulations import run, simulation

STEPS = 5


def train(report_to: str | None = None) -> list[StepRecord]:
    seen: list[StepRecord] = []
    paceline.on_step(seen.append)
    if report_to is not None:
        paceline.report_to(report_to)
    model = torch.nn.Linear(3, 1)
    optimizer = paceline.distribute(
        model, torch.optim.SGD(model.parameters(), 0.1), method="bsp:buckets=ddp"
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        paceline.log(loss=step / 2)
        optimizer.step()
    optimizer.finish()
    return seen


def test_each_worker_is_told_of_its_own_steps() -> None:
    for worker, records in enumerate(run(2, lambda rank: train())):
        assert [(r.worker, r.step) for r in records] == [
            (worker, step + 1) for step in range(STEPS)
        ]
        assert [r.metrics["loss"] for r in records] == [s / 2 for s in range(STEPS)]


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def test_worker_zero_reports_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    records = run(2, lambda rank: train(f"csv:{file}"))[0]
    told = rows(file)
    assert [int(row["step"]) for row in told] == [1, 2, 3, 4, 5]
    for row, record in zip(told, records, strict=True):
        for name, value in numbers_of(record).items():
            assert float(row[name]) == value


def test_the_command_line_asks_once_for_all_trainings(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"

    def two(rank: int) -> None:
        for _ in range(2):
            train()

    simulation(2, options=RunOptions(report_to=f"csv:{file}")).run(two)
    assert len(rows(file)) == 2 * STEPS


def test_metrics_that_come_later_are_not_lost(tmp_path: Path) -> None:
    sink = sink_for(f"csv:{tmp_path / 'steps.csv'}")
    for step, metrics in enumerate([{"loss": 1.0}, {"loss": 0.5, "accuracy": 0.9}], 1):
        sink.step(record(step, metrics))
    sink.close()
    assert [row["more"] for row in rows(tmp_path / "steps.csv")] == ["", "accuracy=0.9"]


def steps_told(place: str, steps: Iterable[int], **metrics: float) -> None:
    """By one life of worker 0."""
    sink = sink_for(place)
    for step in steps:
        sink.step(record(step, dict(metrics)))
    sink.close()  # adds nothing: each row is written at once


def test_a_worker_that_comes_back_goes_on_below_the_rows_of_its_earlier_lives(
    tmp_path: Path,
) -> None:
    file = tmp_path / "steps.csv"
    steps_told(f"csv:{file}", [1, 2], loss=1.0)
    steps_told(f"csv:{file}", [])  # died before a step
    steps_told(f"csv:{file}", [4, 5], accuracy=0.5, loss=0.5)
    told = rows(file)
    assert [int(row["step"]) for row in told] == [1, 2, 4, 5]
    assert [float(row["loss"]) for row in told] == [1.0, 1.0, 0.5, 0.5]
    assert told[-1]["more"] == "accuracy=0.5"


def test_another_job_begins_the_file_anew(tmp_path: Path) -> None:
    file = tmp_path / "steps.csv"
    steps_told(f"csv:{file}", [1, 2, 3], loss=1.0)
    steps_told(f"csv:{file}", [1], accuracy=0.5)
    (told,) = rows(file)
    assert (told["step"], told["accuracy"]) == ("1", "0.5")
    assert "loss" not in told


def test_rows_go_where_nothing_can_be_cut_off() -> None:
    steps_told("csv:/dev/null", [1, 2])


def test_a_place_that_fails_costs_figures_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[int] = []

    class Away:
        def __init__(self, name: str) -> None:
            assert name == "mine"

        def step(self, record: StepRecord) -> None:
            if record.step == 3:
                raise ConnectionError("nobody answers")
            told.append(record.step)

        def close(self) -> None:
            raise AssertionError("it has failed before")

    monkeypatch.setitem(SINKS, "away", Away)
    records = run(2, lambda rank: train("away:mine"))[0]
    assert told == [1, 2]
    assert len(records) == STEPS
    words = "paceline: nothing is reported to away:mine from step 3 on: ConnectionError"
    assert capsys.readouterr().err.count(words) == 1


PLACE = """
steps = []
active_run = lambda: None
start_run = lambda: None
log_metrics = lambda numbers, step: steps.append(step)

def end_run():
    with open("steps", "w") as file:
        file.write(str(steps))
"""
FAILS = """
import paceline, torch

paceline.report_to("mlflow:")
model = torch.nn.Linear(3, 1)
optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(3):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
raise RuntimeError("the third step was the last")
"""


def test_what_came_before_an_error_is_reported(tmp_path: Path) -> None:
    """A sink may keep what it was told until it is closed."""
    (tmp_path / "mlflow.py").write_text(PLACE)
    (tmp_path / "fails.py").write_text(FAILS)
    (done,) = forked.together(1, [tmp_path / "fails.py"], folder=tmp_path)
    assert done.wait() == 1, done.stderr
    assert "the third step was the last" in done.stderr
    assert (tmp_path / "steps").read_text() == "[1, 2, 3]"


@pytest.mark.parametrize("has_run", [False, True])
def test_wandb_gets_numbers_and_keeps_a_run_of_the_script(
    has_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    own = types.SimpleNamespace(log=told.append, finish=lambda: told.append("finish"))
    wandb = types.ModuleType("wandb")
    wandb.run = own if has_run else None
    wandb.init = lambda project: told.append(project) or own
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = sink_for("wandb:mine")
    sink.step(record(3, {"loss": 0.5}))
    sink.close()
    numbers = {"paceline/step": 3, **numbers_of(record(3, {"loss": 0.5}))}
    assert told == ([numbers] if has_run else ["mine", numbers, "finish"])


@pytest.mark.parametrize("has_run", [False, True])
def test_mlflow_gets_numbers_and_keeps_a_run_of_the_script(
    has_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    mlflow = types.ModuleType("mlflow")
    mlflow.active_run = lambda: object() if has_run else None
    mlflow.set_experiment = told.append
    mlflow.start_run = lambda: told.append("start")
    mlflow.end_run = lambda: told.append("end")
    mlflow.log_metrics = lambda numbers, step: told.append((step, numbers))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    sink = sink_for("mlflow:mine")
    sink.step(record(3, {"loss": None}))
    sink.close()
    numbers = (3, numbers_of(record(3, {})))
    assert told == ([numbers] if has_run else ["mine", "start", numbers, "end"])


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("tensorbord:x", "Did you mean 'tensorboard'"),
        ("csv", "expected a file"),
        ("csv:/no/such/folder/steps.csv", "cannot write"),
        ("wandb", "pip install wandb"),
    ],
)
def test_what_cannot_be_reported_to_is_said(
    where: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=said):
        sink_for(where)


def record(step: int, metrics: dict[str, float | None]) -> StepRecord:
    return StepRecord(
        worker=0,
        step=step,
        end_seconds=0.1 * step,
        step_seconds=0.1,
        compute_seconds=0.06,
        exposed_communication_seconds=0.04,
        bytes_sent=8,
        metrics=metrics,
    )


MANY = 24
WORKERS = 3


class Slope(torch.nn.Module):
    """Its gradient is *slope*, always."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 16))
        self.slope = torch.linspace(0.1, 1.0, 64).view(4, 16)

    def forward(self) -> torch.Tensor:
        return (self.weight * self.slope).sum()


def train_slope(
    method: str, *, asks: bool = True
) -> tuple[list[StepRecord], list[torch.Tensor]]:
    """Each step's record, and the weight after it."""
    records: list[StepRecord] = []
    weights: list[torch.Tensor] = []
    if asks:
        paceline.on_step(records.append)
    model = Slope()
    optimizer = paceline.distribute(
        model, torch.optim.SGD(model.parameters(), 1.0), method=method
    )
    for _ in range(MANY):
        optimizer.zero_grad()
        model().backward()
        optimizer.step(loss=1.0)
        weights.append(model.weight.detach().clone())
    optimizer.finish()
    return records, weights


def figures(method: str) -> list[list[dict[str, float]]]:
    """By worker, of each step."""
    return [
        [record.figures for record in records]
        for records, _ in run(WORKERS, lambda rank: train_slope(method))
    ]


def test_rounds_are_counted() -> None:
    for told in figures("local-sgd:sync_every=4"):
        assert [one["round"] for one in told] == [s // 4 for s in range(1, MANY + 1)]


@pytest.mark.parametrize(("method", "most"), [("ssp:staleness=2", 2), ("asp", MANY)])
def test_staleness_is_what_others_have_done_meanwhile(method: str, most: int) -> None:
    found = [one["staleness"] for told in figures(method) for one in told]
    # Each of the others may be ahead by so many steps, and this one of them.
    assert 0 < max(found) <= (WORKERS - 1) * (2 * most + 1)


def test_what_waits_for_all_is_not_stale() -> None:
    found = [one["staleness"] for told in figures("backup:wait_for=3") for one in told]
    assert set(found) == {0}


@pytest.mark.parametrize("collective", ["native", "parameter-server"])
def test_a_budget_and_what_is_deferred_of_it(collective: str) -> None:
    method = f"osp:collective={collective},defer=most,budget=linear,ramp=10,buckets=ddp"
    for told in figures(method):
        budgets = [one["budget"] for one in told]
        assert budgets == sorted(budgets)
        assert budgets[0] < budgets[-1] <= 1
        assert all(0 <= one["deferred"] <= one["budget"] for one in told)


def test_groups_are_told() -> None:
    told = figures("gssp:members=0-1+2")
    assert [{one["group"] for one in worker} for worker in told] == [{0}, {0}, {1}]


def test_the_norm_of_what_compression_has_left_out() -> None:
    """What workers have sent, and what they have left out, is the sum of their gradients."""
    method = "bsp:compression=ef-sign,buckets=ddp"
    for records, weights in run(WORKERS, lambda rank: train_slope(method)):
        norms = [record.figures["residual_norm"] for record in records]
        for step, (norm, weight) in enumerate(zip(norms, weights, strict=True), 1):
            left = (step * Slope().slope + weight) / WORKERS
            assert norm == pytest.approx(float(left.norm()), rel=1e-4, abs=1e-5)
        assert max(norms) > 0.1


def test_nobody_asks_for_them_in_vain() -> None:
    records, _ = run(WORKERS, lambda rank: train_slope("bsp"))[0]
    assert {str(record.figures) for record in records} == {"{}"}


@pytest.mark.parametrize("method", ["ssp", "local-sgd", "bsp:compression=top-k"])
def test_who_asks_changes_nothing(method: str) -> None:
    options = RunOptions(seed=1)
    asked, unasked = (
        run(
            WORKERS,
            lambda rank, asks=asks: train_slope(method, asks=asks),
            options=options,
        )
        for asks in (True, False)
    )
    for (_, mine), (_, theirs) in zip(asked, unasked, strict=True):
        assert torch.equal(torch.stack(mine), torch.stack(theirs))


class ImaginarySlope(torch.nn.Module):
    """Its gradient is an imaginary number times that of `Slope`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 16, dtype=torch.complex64))
        self.slope = Slope().slope

    def forward(self) -> torch.Tensor:
        return (self.weight.imag * self.slope).sum()


def test_imaginary_parts_count_in_the_norm_of_residuals() -> None:
    def body(rank: int) -> list[float]:
        records: list[StepRecord] = []
        paceline.on_step(records.append)
        model = ImaginarySlope()
        inner = torch.optim.SGD(model.parameters(), 1.0)
        # It sends one number of 128 in each step.
        compression = "top-k:density=0.0078125,small=0"
        optimizer = paceline.distribute(model, inner, compression=compression)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        optimizer.finish()
        return [record.figures["residual_norm"] for record in records]

    (found,) = run(WORKERS, body)[0]
    left = Slope().slope.flatten()[:-1] / WORKERS
    assert found == pytest.approx(float(left.norm()), rel=1e-5)
