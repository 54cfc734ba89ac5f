"""Weights & Biases and MLflow hold what a training reported: read back from what they have stored."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtimes.emulated.conftest import refusal

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 12
TRAINS = f"""
import sys
import paceline, torch

if "wandb" in sys.argv:
    import wandb
    wandb.init(project="own")
if "mlflow" in sys.argv:
    import mlflow
    mlflow.start_run()
paceline.init()
model = torch.nn.Linear(6, 1)
optimizer = paceline.distribute(
    model, torch.optim.SGD(model.parameters(), lr=0.1), method="local-sgd:sync_every=4"
)
for step in range({STEPS}):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 6)).square().mean()
    loss.backward()
    optimizer.step(loss=loss)
if "wandb" in sys.argv:
    wandb.log({{"of the script": 1.0}})
    wandb.finish()
if "mlflow" in sys.argv:
    mlflow.log_metric("of the script", 1.0)
    mlflow.end_run()
"""
NAMES = {
    *("loss", "paceline/round", "paceline/bytes_sent", "paceline/step_seconds"),
    *("paceline/exposed_seconds", "paceline/compute_seconds"),
}

Rows = dict[str, list[tuple[int, float]]]
"""By metric: steps, and their values."""


def log_records(data: bytes) -> Iterator[bytes]:
    """Those of a file of W&B's: LevelDB's log format behind seven bytes, whose records are cut where
    blocks of 32 KiB end."""
    place, record = 7, b""
    while place + 7 <= len(data):
        left = (1 << 15) - place % (1 << 15)
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def wandb_rows(folder: Path) -> tuple[Rows, bool]:
    """What is in the only offline run, and whether it was ended."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows, ended = Rows(), False
    for data in log_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        ended = ended or record.HasField("exit")
        told = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for name, value in told.items():
            if not name.startswith("_"):
                rows.setdefault(name, []).append((told.get("paceline/step"), value))
    rows.pop("paceline/step", None)
    return rows, ended


def mlflow_rows(folder: Path) -> tuple[Rows, bool]:
    """What is in the only run, and whether it was ended."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    rows = {
        name: [
            (one.step, one.value)
            for one in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
    }
    return rows, run.info.status == "FINISHED"


READ: dict[str, Callable[[Path], tuple[Rows, bool]]] = {
    "wandb": wandb_rows,
    "mlflow": mlflow_rows,
}


# Elsewhere each worker of a script with a run of its own would begin one.
@pytest.mark.parametrize(
    ("verb", "own"),
    [("run", True), ("run", False), ("emulate", False), ("simulate", False)],
)
@pytest.mark.parametrize("tool", ["wandb", "mlflow"])
def test_it_holds_worker_zeros_steps(
    tool: str, verb: str, own: bool, tmp_path: Path
) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install {tool}")
    if verb == "emulate" and refusal():
        pytest.skip(refusal())
    (tmp_path / "train.py").write_text(TRAINS)
    options = {
        "run": ["--workers=1" if own else "--workers=2"],
        "emulate": ["--workers=2"],
        "simulate": ["--workers=2", "--forward=0.1", "--backward=0.1"],
    }
    words = [verb, *options[verb], f"--report-to={tool}:mine", "train.py"]
    subprocess.run(
        [sys.executable, "-m", "paceline", *words, *["--", tool][: 2 * own]],
        cwd=tmp_path,
        check=True,
        timeout=300,
        env=os.environ
        | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
        | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"},
    )
    rows, ended = READ[tool](tmp_path)
    assert ended
    if own:
        (told,) = rows.pop("of the script")
        assert told[1] == 1.0
    assert set(rows) == NAMES
    for name in NAMES:
        assert [step for step, _ in rows[name]] == list(range(1, STEPS + 1))
    rounds = [value for _, value in rows["paceline/round"]]
    assert rounds == [step // 4 for step in range(1, STEPS + 1)]
    losses = [value for _, value in rows["loss"]]
    assert losses == sorted(losses, reverse=True)
    if verb == "simulate":
        assert rows["paceline/compute_seconds"][-1][1] == pytest.approx(0.2)
