"""torch.profiler's trace of a worker shows when it waits for others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from paceline.records import StepRecorder

PROFILED = """
import paceline, torch
from torch.profiler import ProfilerActivity, profile

paceline.init()
model = torch.nn.Linear(64, 1)
optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
profiler.export_chrome_trace(f"rank{paceline.rank()}.json")
"""


def test_a_wait_is_a_row_where_a_profiler_runs_and_nothing_else() -> None:
    recorder = StepRecorder(0, lambda: 0.0, None)
    waits: list[str] = []
    recorder.block("server", lambda: waits.append("unseen"))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        recorder.block("all_reduce", lambda: waits.append("seen"))
    rows = [event.name for event in profiler.events()]
    assert rows == ["paceline::wait all_reduce"]
    assert waits == ["unseen", "seen"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name"), [("bsp", "all_reduce"), ("asp", "server")])
def test_a_profiled_step_shows_what_it_waits_for(
    method: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROFILED)
    words = ["run", "--workers=2", f"--method={method}", "train.py"]
    subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=tmp_path,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"rank{rank}.json").read_text())
        rows = {event["name"] for event in trace["traceEvents"]}
        assert f"paceline::wait {name}" in rows
