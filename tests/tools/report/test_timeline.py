"""One step, cut out of a run: the right one, the right workers, and never too much of it."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from paceline.records import STEP_ROW, Span, StepRecord
from paceline.tools.compare.report import SPANS
from paceline.tools.report.html import NAME, write_page
from paceline.tools.report.timeline import (
    MOST_ROWS,
    MOST_SPANS,
    TICKS,
    Row,
    Step,
    called,
    row_name,
    typical_record,
    typical_step,
)
from paceline.tools.report.traces import chrome_trace, read_spans
from tests.tools.compare.cases import Comparison


def record(
    step: int, seconds: float = 1.0, sent: int = 1000, worker: int = 0
) -> StepRecord:
    return StepRecord(
        worker=worker,
        step=step,
        end_seconds=step * seconds,
        step_seconds=seconds,
        compute_seconds=seconds,
        exposed_communication_seconds=0.0,
        bytes_sent=sent,
        metrics={},
    )


def run_of(
    rows: list[tuple[str, str, float, float]], workers: int = 1
) -> tuple[list[Span], list[StepRecord]]:
    """Four steps of a second; in the third, which is looked at, *rows* of every worker."""
    spans, records = [], []
    for worker in range(workers):
        for number in range(1, 5):
            name = f"step {number}"
            spans.append(Span(worker, STEP_ROW, name, number - 1.0, float(number)))
            records.append(record(number, worker=worker))
        spans += [Span(worker, *row) for row in rows]
    return spans, records


def step_with(rows: list[tuple[str, str, float, float]], workers: int = 1) -> Step:
    spans, records = run_of(rows, workers)
    found = typical_step("bsp", lambda: spans, records)
    assert found is not None
    return found


def laid(row: Row) -> list[tuple[int, int]]:
    """Where its spans begin and end, in ticks."""
    begins, found = 0, []
    for step, length, _ in zip(*[iter(row.spans)] * 3, strict=True):
        begins += step
        found.append((begins, begins + length))
    return found


def test_spans_are_cut_at_the_steps_ends_and_keep_their_places() -> None:
    step = step_with(
        [
            ("compute", "backward", 1.5, 2.25),
            ("world lane 0", "all_reduce(SUM, float32[8]), 32 B sent", 2.1, 2.6),
            ("wait", "all_reduce", 2.25, 3.5),
            ("compute", "another step's", 3.0, 3.2),
        ]
    )
    assert step.what == "step 3 of 4, 1 s"
    (worker,) = step.workers
    assert [(row.name, row.kind) for row in worker.rows] == [
        ("compute", "compute"),
        ("wait", "wait"),
        ("channel 0", "message"),
    ]
    part = TICKS // 100
    assert [laid(row) for row in worker.rows] == [
        [(0, 25 * part)],
        [(25 * part, 100 * part)],
        [(10 * part, 60 * part)],
    ]
    assert worker.compute_seconds == pytest.approx(0.25)
    assert worker.wait_seconds == pytest.approx(0.75)
    assert {*step.names} == {"backward", "all-reduce", "all-reduce, 32 B"}


def test_where_nobody_tells_of_computing_it_is_what_is_not_waiting() -> None:
    step = step_with([("wait", "server", 2.25, 2.5), ("wait", "server", 2.75, 3.0)])
    compute, wait = step.workers[0].rows
    part = TICKS // 4
    assert laid(compute) == [(0, part), (2 * part, 3 * part)]
    assert laid(wait) == [(part, 2 * part), (3 * part, 4 * part)]


def test_a_usual_step_sends_as_most_that_send_do_and_is_of_middling_length() -> None:
    probing = [record(i, 9.0, 5000) for i in range(1, 6)]
    usual = [record(i, 1.0 + i / 100) for i in range(6, 21)]
    slow, last = record(21, 7.0), record(22, 0.1)
    chosen = typical_record([*probing, *usual, slow, last])
    assert chosen.step in range(12, 20)
    # of a local method only those that send are worth a look
    rounds = [record(i, 1.0, 1000 if i % 4 == 0 else 0) for i in range(1, 20)]
    assert typical_record(rounds).step % 4 == 0
    assert typical_record([record(1)]).step == 1


def test_a_run_without_a_trace_has_no_step() -> None:
    spans, records = run_of([])
    assert typical_step("bsp", list, records) is None
    assert typical_step("bsp", lambda: spans, []) is None


def test_what_overlaps_stands_side_by_side() -> None:
    step = step_with([("send", str(i), 2.1 + i / 100, 2.5) for i in range(3)])
    names = [row.name for row in step.workers[0].rows if row.kind == "message"]
    assert names == ["send", "send (2)", "send (3)"]


def test_of_many_workers_those_who_are_waited_for_are_kept() -> None:
    spans, records = run_of([], workers=64)
    for worker in range(64):
        wait = {17: 0.0, 40: 0.9}.get(worker, 0.5)
        spans.append(Span(worker, "wait", "all_reduce", 3.0 - wait, 3.0))
        spans.append(Span(worker, "compute", "forward", 2.0, 3.0 - wait))
    step = typical_step("bsp", lambda: spans, records)
    assert step is not None
    names = [worker.name for worker in step.workers]
    assert names == ["worker 0", "worker 17", "worker 40", "worker 63"]
    assert step.what.endswith("4 of 64 workers")


@pytest.mark.parametrize("seed", range(3))
def test_however_much_there_is_a_step_stays_small_and_in_order(seed: int) -> None:
    random.seed(seed)
    rows = []
    for i in range(8000):
        start = 2 + random.random()
        length = random.random() ** 8 / 10
        rows.append((f"lane {i % 40}", f"message {i % 7}", start, start + length))
    step = step_with(rows)
    (worker,) = step.workers
    messages = [row for row in worker.rows if row.kind == "message"]
    assert len(messages) == MOST_ROWS
    assert sum(len(row.spans) // 3 for row in worker.rows) <= MOST_SPANS
    for row in worker.rows:
        spans = laid(row)
        assert all(0 <= begin <= end <= TICKS for begin, end in spans)
        assert all(a[1] <= b[0] + 2 for a, b in pairwise(spans))  # ticks are rounded
    assert len(msgspec.json.encode(step)) < 100_000


def test_names_are_short() -> None:
    assert called("all_reduce(SUM, float32[8]), 32 B sent") == "all-reduce, 32 B"
    assert called("perform(ring), 459 kB sent") == "collective, 459 kB"
    assert called("chained") == "wait for a chained collective"
    assert called("push, 8 MB") == "push, 8 MB"
    assert called("several, too short to be shown") == "several, too short to be shown"
    assert row_name("training 0, after training 0 lane 1") == "chained channel 1"
    assert row_name("world lane 0") == "channel 0"
    assert row_name("training 0 lane 1") == "channel 1"
    assert row_name("channel stage 2 lane 0") == "channel stage 2 0"
    assert row_name("from server 1") == "from server 1"


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    spans, _ = run_of([("wait", '},{"ph":"X"}\n],', 2.25, 2.5)], workers=2)
    path = tmp_path / "a.trace.json"
    path.write_bytes(b"".join(chrome_trace(lambda: spans)))
    assert [*read_spans(path)] == spans
    path.write_bytes(b"".join(chrome_trace(list)))
    assert [*read_spans(path)] == []
    assert "traceEvents" in msgspec.json.decode(path.read_bytes())


@pytest.mark.slow
def test_a_page_of_30_variants_with_64_workers_is_small(tmp_path: Path) -> None:
    comparison = Comparison()
    random.seed(0)
    for i in range(30):
        spec = f"bsp:buckets=fixed,megabytes={i + 1},collective=halving-doubling"
        logged = [{"loss": random.random(), "accuracy": random.random()}] * 300
        comparison.add(spec, logged)
    chosen = typical_record(comparison.runs[-1].steps)
    start, end = chosen.end_seconds - chosen.step_seconds, chosen.end_seconds
    spans = []
    for worker in range(64):
        spans.append(Span(worker, STEP_ROW, f"step {chosen.step}", start, end))
        for number in range(250):
            at = start + (end - start) * number / 250
            row = f"world lane {number % 2}"
            name = f"all_reduce(SUM, float32[{number}]), {number} B sent"
            spans.append(Span(worker, row, name, at, at + (end - start) / 500))
    trace = b"".join(chrome_trace(lambda: spans))
    for run in comparison.runs:
        (tmp_path / f"{run.variant.file_name}.trace.json").write_bytes(trace)
    page = write_page(tmp_path / NAME, comparison.report(tmp_path))
    assert SPANS * 10 < page.stat().st_size < 2e6
