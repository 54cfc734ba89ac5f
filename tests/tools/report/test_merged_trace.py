"""Traces of ours and of torch.profiler in one file: whose clock, whose rows."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.records import Span
from paceline.tools.report.merged_trace import merge_traces
from paceline.tools.report.traces import chrome_trace, spans_in

BEGAN = 1_700_000_000.0
"""Seconds since 1970."""


def ours(path: Path, *, workers: int = 2, wall: bool = True) -> Path:
    """A step of 1 s of each worker."""
    spans = [Span(w, "step", "step 1", BEGAN, BEGAN + 1.0) for w in range(workers)]
    path.write_bytes(b"".join(chrome_trace(lambda: spans, wall=wall)))
    return path


def theirs(path: Path, begin: float, rank: int | None) -> Path:
    """A profiler's trace that began its time a day before: an operation of 0.25 s, *begin* after
    ours began, on a processor and on GPU 0, joined by a flow."""
    at = {"ts": 86400e6 + begin * 1e6, "tid": 7, "cat": "op"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 4321, "args": {"name": "python"}},
        {"ph": "X", "name": "aten::mm", "pid": 4321, "dur": 0.25e6, **at},
        {"ph": "X", "name": "gemm", "pid": 0, "dur": 0.25e6, **at},
        {"ph": "s", "name": "ac2g", "id": 3, "pid": 4321, **at},
        {"ph": "f", "name": "ac2g", "id": 3, "pid": 0, **at},
    ]
    trace: dict[str, Any] = {
        "baseTimeNanoseconds": int(BEGAN - 86400) * 10**9,
        "traceEvents": events,
    }
    if rank is not None:
        trace["distributedInfo"] = {"rank": rank, "backend": "gloo"}
    data = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_events_are_on_our_clock_and_nobodys_rows_are_mixed(tmp_path: Path) -> None:
    mine = ours(tmp_path / "records.trace.json")
    others = [
        theirs(tmp_path / "a.json", 0.25, rank=1),
        theirs(tmp_path / "b.json.gz", 0.5, rank=0),
    ]
    output = tmp_path / "merged.json"
    merge_traces(mine, others, output)
    events = json.loads(output.read_bytes())["traceEvents"]
    timed = {(e["pid"], e["name"]): e["ts"] for e in events if e["ph"] == "X"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    at = {(names[pid], name): ts / 1e6 for (pid, name), ts in timed.items()}
    assert at == {
        ("worker 0", "step 1"): 0.0,
        ("worker 1", "step 1"): 0.0,
        ("worker 1: python 4321", "aten::mm"): 0.25,
        ("worker 1: 0", "gemm"): 0.25,
        ("worker 0: python 4321", "aten::mm"): 0.5,
        ("worker 0: 0", "gemm"): 0.5,
    }
    flows = Counter(e["id"] for e in events if e["ph"] in "sf")
    assert list(flows.values()) == [2, 2]  # the two files' have different numbers
    order = {
        names[e["pid"]]: e["args"]["sort_index"]
        for e in events
        if e["name"] == "process_sort_index"
    }
    assert sorted(order, key=order.__getitem__) == [
        "worker 0",
        "worker 0: python 4321",
        "worker 0: 0",
        "worker 1",
        "worker 1: python 4321",
        "worker 1: 0",
    ]


@pytest.mark.parametrize(
    ("begin", "wall", "content", "said"),
    [
        (-100.0, True, None, "was not recorded during"),
        (100.0, True, None, "was not recorded during"),
        (0.5, False, None, "In virtual time"),
        (0.5, True, "[]", "no Chrome trace"),
        (0.5, True, '{"traceEvents": []}', "does not say when"),
    ],
)
def test_what_is_of_no_such_run_is_refused(
    begin: float, wall: bool, content: str | None, said: str, tmp_path: Path
) -> None:
    mine = ours(tmp_path / "records.trace.json", wall=wall)
    other = theirs(tmp_path / "theirs.json", begin, rank=0)
    if content is not None:
        other.write_text(content)
    with pytest.raises(UsageError, match=said):
        merge_traces(mine, [other], tmp_path / "merged.json")
    assert not (tmp_path / "merged.json").exists()


def test_a_packed_trace_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    mine = ours(tmp_path / "records.trace.json")
    packed = theirs(tmp_path / "theirs.json.gz", 0.5, rank=0)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UsageError, match=r"cannot read .*killed"):
        merge_traces(mine, [packed], tmp_path / "merged.json")


PROFILED = """
import paceline, torch
from torch.profiler import ProfilerActivity, profile, record_function

paceline.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for step in range(1, 9):
        with record_function(f"computing of step {step}"):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
profiler.export_chrome_trace(f"rank{paceline.rank()}.json")
"""
CLOCKS_SECONDS = 1e-3
"""By so much may the profiler's clock, which it converts from ticks of the processor, differ."""


@pytest.mark.slow
def test_a_step_encloses_what_the_profiler_saw_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROFILED)
    options = ["--workers=2", "--method=bsp:fusion=ddp", "--records=records"]
    merges = ["records/records.trace.json", "rank0.json", "rank1.json"]
    for words in (["run", *options, "train.py"], ["merge-traces", *merges]):
        subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            cwd=tmp_path,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    mine = list(spans_in(tmp_path / merges[0]))
    merged = json.loads((tmp_path / "merged.trace.json").read_bytes())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    seen = [
        (names[e["pid"]], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in merged
        if e["ph"] == "X"
    ]
    steps = [span for span in mine if span.row == "step"]
    assert len(steps) == 16
    for step in steps:
        whose = f"worker {step.worker}: python"
        (inside,) = [
            (begin, end)
            for name, what, begin, end in seen
            if name.startswith(whose) and what == f"computing of {step.name}"
        ]
        assert step.start - CLOCKS_SECONDS < inside[0]
        assert inside[1] < step.end + CLOCKS_SECONDS
        products = [
            begin
            for name, what, begin, _ in seen
            if name.startswith(whose) and what == "aten::addmm"
            if step.start <= begin <= step.end
        ]
        assert len(products) == 2  # a layer's each, of this step alone
