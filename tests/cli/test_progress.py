"""How far a training is, at the terminal that waits for it."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from paceline.cli import progress
from paceline.cli.progress import describe, status_lines
from paceline.cli.progress import progress as shown_progress
from paceline.records import StepRecorder
from paceline.runtimes.progress import (
    WorkerProgress,
    attach_progress_writer,
    last_step,
    read,
)
from tests.support.hanging import SECONDS
from tests.support.processes import PACELINE, Job
from tests.support.terminal import forked_on, lines_of, on_terminal, open_terminal

TRAINS = """
import sys
from pathlib import Path
import paceline, torch

paceline.init()
model = torch.nn.Linear(6, 1)
optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
count = 0
while not Path("seen").exists():
    count += 1
    loss = model(torch.ones(4, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step(loss=loss)
    if count % 50 == 0:
        print(f"{{worker {paceline.rank()} has done {count:06d}}}", flush=True)
        print(f"{{and says {count:06d}}}", file=sys.stderr, flush=True)
"""
SHOWN = re.compile(r"step \d+ · [\d.]+ [mu]?s per step, .*exposed · ")
WHOLE = re.compile(r"(\[1\] )?({worker \d has done \d{6}}|{and says \d{6}})")


def is_enough(written: str) -> bool:
    return written.count("{") > 20 and SHOWN.search(written) is not None


def check_lines(lines: list[str]) -> None:
    """Workers and the launcher have printed whole lines."""
    printed = [line for line in lines if "{" in line]
    assert printed
    assert [line for line in printed if not WHOLE.fullmatch(line)] == []
    shown = [line for line in lines if SHOWN.search(line)]
    assert shown
    assert all(line.startswith("paceline: step ") for line in shown)


@pytest.mark.slow
def test_lines_tell_of_steps_and_mix_with_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)

    def look(written: str) -> None:
        if is_enough(written):
            (tmp_path / "seen").touch()  # now it may end

    words = ["run", "--workers=2", "--survive", "--method=asp", "train.py"]
    status, lines = on_terminal(words, tmp_path, look)
    assert status == 0, lines
    check_lines(lines)


def test_a_line_says_what_is_done_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "is_shown", lambda json: not json)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.01)
    standings = iter([None, WorkerProgress(step=3, method="asp")])
    told = threading.Event()

    def look() -> WorkerProgress | None:
        found = next(standings, last)
        if found is last:
            told.set()
        return found

    last = WorkerProgress(step=4)
    threads = threading.enumerate()
    with status_lines(True, "starting", 9, look):
        assert threading.enumerate() == threads  # nobody would write a line
    with status_lines(False, "starting", 9, look):
        assert told.wait(SECONDS)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "paceline: starting · 0:00:00"
    assert second == "paceline: step 3 of 9 · asp · 0:00:00"


def test_own_work_prints_lines_where_no_terminal_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds in (0.0, 3600.0):
        monkeypatch.setattr(progress, "EVERY_SECONDS", seconds)
        for json in (False, True):
            with shown_progress(json) as at:
                at("measuring", 1, 4)
                at("predicting")
    assert capsys.readouterr().err.splitlines() == [
        "paceline: measuring (1 of 4) · 0:00:00",
        "paceline: predicting · 0:00:00",
    ]


def test_tasks_print_lines_where_no_terminal_shows_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for json in (False, True):
        with progress.task_rows(json) as rows:
            rows.begin("[1/2] bsp")()
    assert capsys.readouterr().err.splitlines() == [
        "paceline: [1/2] bsp begins · 0:00:00",
        "paceline: [1/2] bsp ended · 0:00:00",
    ]


@pytest.mark.slow
def test_a_terminal_that_goes_away_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    ours, theirs = open_terminal()
    job = forked_on(theirs, ["run", "--workers=2", "train.py"], tmp_path)
    try:
        written = b""
        while not is_enough(written.decode(errors="replace")):
            written += os.read(ours, 1 << 16)
        os.close(theirs)
        os.close(ours)
        check_lines(lines_of(written)[:-1])  # the last one is on its way
        (tmp_path / "seen").touch()
        job.wait()
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.parametrize("json", [True, False])
def test_where_nobody_looks_nothing_moves(json: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS.replace("count", "done"))
    words = ["run", "--steps=200", "--method=bsp:buckets=ddp", *["--json"] * json]
    if json:
        status, lines = on_terminal([*words, "train.py"], tmp_path, lambda _: None)
        assert status == 0
        said = "\n".join(lines)
    else:
        job = Job([*PACELINE, *words, "train.py"], tmp_path, forked="all").wait()
        said = job.check_ended_well().stderr
    assert "\x1b" not in said
    assert " per step" not in said


def test_what_the_line_says() -> None:
    standing = WorkerProgress(
        step=12,
        step_seconds=0.0351234,
        exposed_seconds=0.002,
        method="ssp",
        buckets=3,
        phase="steady",
        metrics={"loss": 2.34567},
    )
    said = describe(standing, 500)
    assert said == (
        "step 12 of 500 · 35.1 ms per step, 2 ms exposed · ssp, 3 buckets · loss 2.346"
    )
    standing.phase = "tuning"
    assert "ssp, planning buckets" in describe(standing)
    standing.phase = "selecting"
    assert "ssp, choosing a method" in describe(standing)
    assert describe(WorkerProgress(method="bsp")) == "no step yet · bsp"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


def trained(recorder: StepRecorder, clock: Clock, seconds: list[float]) -> None:
    for one in seconds:
        clock.now += one
        recorder.step()


def test_a_steps_time_is_of_whole_periods_and_without_the_first() -> None:
    clock = Clock()
    recorder = StepRecorder(0, lambda: clock.now)
    recorder.begin("local-sgd")
    trained(recorder, clock, [9.0])
    assert WorkerProgress.of(recorder).step_seconds == 9.0
    recorder.set_period(3)
    trained(recorder, clock, [1.0, 1.0, 4.0] * 8)
    assert WorkerProgress.of(recorder).step_seconds == 2.0


@pytest.mark.parametrize(
    ("alone", "local_rank", "written"), [(True, "1", 3), (False, "1", 0)]
)
def test_who_writes_how_far_it_is(
    alone: bool, local_rank: str, written: int, tmp_path: Path
) -> None:
    file = tmp_path / "progress"
    recorder = StepRecorder(0, lambda: 0.0)
    place = {"PACELINE_PROGRESS_FILE": str(file), "LOCAL_RANK": local_rank}
    attach_progress_writer(
        recorder, lambda: 40 if alone else 0, server_only=alone, environment=place
    )
    recorder.begin("asp")
    assert last_step(file) == 0
    for _ in range(written):
        recorder.step()
    assert last_step(file) == (43 if alone else 0)
    assert (read(file) is not None) == alone


def test_a_worker_that_died_while_it_wrote_had_done_a_step(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    assert last_step(file) == 0
    file.touch()
    assert last_step(file) == 1
    assert read(file) is None
