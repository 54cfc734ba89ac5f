"""Records that stream to files, what is merged of them, and what is cleared away before new
results are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.records import Span, StepRecord
from paceline.tools.report.run_files import (
    WorkerRecords,
    claim,
    clear,
    forget_workers,
    merge_workers,
)


def record(worker: int, step: int) -> StepRecord:
    return StepRecord(
        worker=worker,
        step=step,
        end_seconds=float(step),
        step_seconds=1.0,
        compute_seconds=0.75,
        exposed_communication_seconds=0.25,
        bytes_sent=10,
        metrics={"loss": 1.5},
    )


def wait_of(worker: int, step: int) -> Span:
    return Span(worker, "wait", "grads", step - 0.25, float(step))


def merged(folder: Path) -> list[tuple[int, int]]:
    """The steps, as (step, worker), after the launcher has come by."""
    merge_workers(str(folder), "records")
    assert not list(folder.glob("worker-*"))
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [(line["step"], line["worker"]) for line in map(json.loads, lines)]


def test_records_are_in_the_file_when_their_step_has_ended(tmp_path: Path) -> None:
    records = WorkerRecords(str(tmp_path))
    records.span(wait_of(3, 1))
    records.step(record(3, 1))
    span, step = (tmp_path / "worker-3.jsonl").read_text().splitlines()
    assert json.loads(span) == [3, "wait", "grads", 0.75, 1.0]
    assert json.loads(step)["step_seconds"] == 1.0
    records.close()


def test_what_workers_left_is_merged_in_the_order_of_steps(tmp_path: Path) -> None:
    for worker, steps in ((0, 3), (1, 2), (10, 3)):
        records = WorkerRecords(str(tmp_path))
        for step in range(1, steps + 1):
            records.span(wait_of(worker, step))
            records.step(record(worker, step))
        records.close()
    assert merged(tmp_path) == [
        *((1, 0), (1, 1), (1, 10)),
        *((2, 0), (2, 1), (2, 10)),
        *((3, 0), (3, 10)),
    ]
    trace = json.loads((tmp_path / "records.trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 8
    assert min(span["ts"] for span in spans) == 0.0
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"][0] == "p"]
    assert names == ["worker 0", "worker 1", "worker 10"]


def test_a_killed_worker_leaves_whole_lines_and_its_next_life_goes_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "worker-0.jsonl"
    first = WorkerRecords(str(tmp_path))
    first.step(record(0, 1))
    first.step(record(0, 2))
    first.close()
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote
    second = WorkerRecords(str(tmp_path))
    second.step(record(0, 3))
    second.close()
    path.write_bytes(path.read_bytes() + b'{"worker":0,')  # and again
    assert merged(tmp_path) == [(1, 0), (3, 0)]


def test_training_outlives_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    records = WorkerRecords(str(tmp_path / "file" / "records"))
    for step in (1, 2, 3):
        records.step(record(0, step))
    records.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1  # once
    assert said.startswith("paceline: worker 0: no more records are written: cannot ")


def test_what_a_killed_run_has_left_is_not_of_the_next(tmp_path: Path) -> None:
    records = WorkerRecords(str(tmp_path))
    records.step(record(7, 1))
    records.close()
    forget_workers(str(tmp_path))
    assert merged(tmp_path) == []


def test_what_was_claimed_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    theirs = tmp_path / "1-bsp"
    theirs.mkdir()
    claim(str(tmp_path), "index.html", "1-bsp", "2-asp", "never-made.svg")
    claim(str(tmp_path), "index.html", "records.jsonl")
    for name in ("index.html", "records.jsonl", "notes.txt", "1-bsp/notes.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "2-asp").mkdir()
    (tmp_path / "2-asp" / "worker-0.jsonl").write_text("left by a killed run")
    clear(str(tmp_path))
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert left == ["1-bsp", "1-bsp/notes.txt", "notes.txt"]
    clear(str(tmp_path))
    assert theirs.is_dir()


def test_nothing_outside_the_folder_is_ever_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    outside = tmp_path / "outside.txt"
    outside.write_text("precious")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("precious")
    (folder / "link").symlink_to(tmp_path / "kept")
    listed = f"../outside.txt\n{outside}\n..\n.\nlink\n\n"
    (folder / ".paceline-files").write_text(listed)
    clear(str(folder))
    assert outside.read_text() == "precious"
    assert (tmp_path / "kept" / "file").exists()
    assert list(folder.iterdir()) == []
