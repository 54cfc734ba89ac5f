"""The command line as a person and a program use it, each command a process."""

import json
from pathlib import Path

import pytest

from paceline.tools.report.run_files import claim
from tests.support import forked
from tests.support.commands import paceline_here
from tests.support.hanging import SECONDS

ROOT = Path(__file__).parent.parent.parent
LAYERS = str(ROOT / "examples" / "layers.py")
QUICK = ("--", "--layers", "4", "--megabytes", "1", "--forward", "0.1")


def paceline(*words, folder=None, timeout=SECONDS):
    return forked.run(["-m", "paceline", *words], folder=folder, seconds=timeout)


def test_json_is_one_object_and_nothing_else():
    done = paceline("simulate", LAYERS, "--workers", 2, "--json", *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["runtime"] == "simulated"
    assert result["workers"] == 2
    assert result["method"] == "bsp:buckets=optimal"
    assert result["steps"] == 24
    assert result["bytes_sent_per_worker"] == 1e6
    # paced: 0.1 s forward, 0.2 s backward (the default), then 1 MB at 1 Gbit/s each way,
    # of which only what comes after the last layer's gradient is exposed
    assert result["compute_seconds"] == pytest.approx(0.3)
    assert result["step_seconds"] == pytest.approx(
        result["compute_seconds"] + result["exposed_communication_seconds"]
    )
    assert set(result["metrics"]) == {"loss"}
    assert result["steady"] is True
    trial, processor = result["notes"]
    assert trial.startswith("bucketing: ")
    assert processor.startswith("messages cost processors nothing here")


def test_representatives_stand_for_all_and_the_result_says_so():
    few, full = (
        json.loads(
            paceline(
                "simulate",
                LAYERS,
                "--workers",
                4,
                "--steps=4",
                "--json",
                *words,
                *QUICK,
            ).stdout
        )
        for words in (["--representatives"], [])
    )
    assert few["workers"] == full["workers"] == 4
    assert few["step_seconds"] == full["step_seconds"]
    assert any("representatives ran for 4" in note for note in few["notes"])
    assert not any("representatives" in note for note in full["notes"])


def test_steps_and_method_win_over_the_script():
    words = ("--workers", 2, "--steps", 3, "--method", "bsp:buckets=wfbp", "--json")
    done = paceline("simulate", LAYERS, *words, *QUICK)
    result = json.loads(done.stdout)
    assert (result["steps"], result["method"]) == (3, "bsp:buckets=wfbp")


def test_compare_prints_a_table_and_leaves_records_and_traces(
    tmp_path, monkeypatch, capfd
):
    """Also of a comparison one of whose variants fails, which its row says."""
    runs = tmp_path / "paceline-runs"
    runs.mkdir()
    (runs / "mine.txt").write_text("not paceline's")
    (runs / "index.html").write_text("the last comparison's")
    claim(str(runs), "index.html")
    failing = "ssp:servers=dedicated"
    variants = ("bsp", failing, "bsp:buckets=single")
    words = [*(f"--method={variant}" for variant in variants), "--workers=2"]
    command = ["compare", LAYERS, *words, "--steps=4", "--no-html", *QUICK]
    monkeypatch.chdir(tmp_path)
    done = paceline_here(monkeypatch, capfd, *command)
    assert done.status == 1
    assert f"paceline: variant '{failing}' failed\n" in done.err
    for word in ("bsp:buckets=single", "compute", "exposed", "vs. first", "1.00x"):
        assert word in done.out
    row, *_ = (line for line in done.out.splitlines() if failing in line)
    assert " failed " in row
    assert f"{failing}: failed: worker 0 raised UsageError: servers=" in done.out
    assert sorted(path.name for path in runs.iterdir()) == [
        ".paceline-files",
        "1-bsp.trace.json",
        "3-bsp-buckets-single.trace.json",
        "mine.txt",
        "records.jsonl",
    ]
    lines = (runs / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 2 * 2 * 4  # variants, workers, steps
    assert {r["variant"] for r in records} == {"bsp", "bsp:buckets=single"}
    traces = sorted(runs.glob("*.trace.json"))
    events = json.loads(traces[0].read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows >= {"compute", "wait", "world lane 0"}


@pytest.mark.slow
def test_compare_in_the_real_runtime(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ("--method", "bsp", "--runtime", "real", "--workers", 2, "--json")
    command = ("compare", LAYERS, *words, "--steps", 4, *QUICK)
    done = paceline_here(monkeypatch, capfd, *command)
    assert done.status == 0, done.err
    (row,) = json.loads(done.out)["variants"]
    assert (row["variant"], row["runtime"], row["steps"]) == ("bsp", "real", 4)
    assert row["step_seconds"] >= 0.3
    lines = (tmp_path / "paceline-runs" / "records.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", LAYERS, "--method", "bps"], "Did you mean 'bsp'?"),
        (["simulate", LAYERS, "--method", "bsp:bukets=x"], "Did you mean 'buckets'?"),
        (["simulate", LAYERS, "--method", "bsp:buckets=x"], "unknown bucket rule 'x'"),
        (["simulate", LAYERS, "--method", "BSP!"], "expected NAME"),
        (["simulate", LAYERS, "--link", "5 furlong"], "--link: "),
        (["simulate", LAYERS, "--latency=-1us"], "--latency: "),
        (
            ["simulate", LAYERS, "--workers", "0"],
            "--workers: expected 1 to 100000, got 0",
        ),
        (["simulate", LAYERS, "--steps", "0"], "--steps: expected 1 or more"),
        (["simulate", LAYERS, "--forward=-1"], "--forward: expected zero or more"),
        (["simulate", "nothing.py"], "there is no script nothing.py"),
        (["simulate", LAYERS, "--cluster", "nothing.toml"], "cannot read the cluster"),
        (["run", "--workers", "0", LAYERS], "--workers: expected 1 or more"),
        (["run", "--workers", "2"], "expected a script"),
        (["run", "--wrkers", "2", LAYERS], "unknown option '--wrkers'"),
        (["run", "--workers=2", "--nproc-per-node=2", LAYERS], "give one of them"),
        (["profile", "--workers=2", LAYERS, "--workers=2"], "--workers is given twice"),
        (["simulate", LAYERS, "--workers=4", "--layers=3"], "arguments stand after --"),
        (["emulate", LAYERS, "--workers=4", "--layers=3"], "arguments stand after --"),
        (["compare", LAYERS, "--method=bsp", "--layers=3"], "stand after --"),
        (["probe", "--runtime=simulated", "--nnodes=2"], "--nnodes=2 means nothing"),
        *(
            ([verb, "--workers=4", f"--method=gssp:{key}", LAYERS], message)
            for verb in ("run", "simulate", "emulate")
            for key, message in (
                ("staleness=-1", "expected a bound of 0 or more steps"),
                ("number_of_groups=9", "expected at most the 4"),
                ("members=0-1+1-3", "rank 1 is named twice"),
                ("members=0-1+2", "rank 3 is in no group"),
                ("members=0-1+zwei", "of ranks and ranges joined by '.'"),
                ("nothing=1", "unknown key 'nothing'"),
            )
        ),
        (["compare", LAYERS, "--runtime=real"], "network is unknown"),
        (
            ["compare", LAYERS, "--method=bsp", "--consistency=delayed"],
            "leave one of them out",
        ),
        (["compare", LAYERS, "--method=bsp", "--until=loss"], "METRIC=VALUE"),
        (
            ["compare", LAYERS, "--consistency=exact,delayed"],
            "--consistency exact --consistency delayed",
        ),
        (["compare", LAYERS, "--consistency=delay"], "Did you mean 'delayed'"),
        (["compare", LAYERS, "--method", "bsp", "--method", "bps"], "unknown method"),
        (
            ["compare", LAYERS, "--method=bsp", "--runtime=real", "--link=1gbit"],
            "--link means nothing in the real runtime",
        ),
    ],
    ids=lambda value: (
        " ".join(value[:1] + value[2:]) if isinstance(value, list) else ""
    ),
)
def test_bad_input_is_one_message(words, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    output = paceline_here(monkeypatch, capfd, *words)
    assert output.status == 1
    assert output.err.startswith("paceline: ")
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_script_is_shown_with_its_own_frames(tmp_path):
    script = tmp_path / "breaks.py"
    script.write_text(
        "import paceline\npaceline.init()\n"
        "if paceline.rank() == 1:\n    raise RuntimeError('boom')\n"
    )
    done = paceline("simulate", script, "--workers", 3)
    assert done.returncode == 1
    assert "worker 1 raised RuntimeError: boom" in done.stderr
    assert 'breaks.py", line 4' in done.stderr
    assert "runtimes/simulated/clock.py" not in done.stderr


def test_a_script_that_trains_nothing_says_so(tmp_path):
    script = tmp_path / "empty.py"
    script.write_text("")
    done = paceline("simulate", script, "--workers", 2)
    assert done.returncode == 1
    assert "nothing was trained" in done.stderr


@pytest.mark.slow
def test_a_worker_that_blocks_outside_the_clock_is_given_up(tmp_path):
    script = tmp_path / "blocks.py"
    script.write_text(
        "import threading, paceline\npaceline.init()\n"
        "if paceline.rank() == 1:\n    threading.Lock().acquire()\n"
        "    threading.Event().wait()\n"
    )
    done = paceline("simulate", script, "--workers", 2, "--patience", 2)
    assert done.returncode == 70
    assert "worker 1 has blocked outside the virtual clock" in done.stderr
    assert "blocks.py" in done.stderr  # the stack says where


def test_metrics_that_are_not_numbers_are_shown_as_missing(
    tmp_path, monkeypatch, capfd
):
    script = tmp_path / "diverges.py"
    script.write_text(
        "import paceline, torch\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "paceline.init()\noptimizer = paceline.distribute(model, optimizer)\n"
        "for _ in range(3):\n    model(torch.ones(1, 2)).sum().backward()\n"
        "    paceline.log(loss=float('nan'))\n    optimizer.step()\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("--method", "bsp", "--workers", 2, "--forward", 0.01, "--json")
    done = paceline_here(monkeypatch, capfd, "compare", script, *words)
    assert done.status == 0, done.err
    (row,) = json.loads(done.out)["variants"]
    assert (row["variant"], row["steps"]) == ("bsp", 3)
    assert row["metrics"] == {"loss": None}


def test_what_follows_the_dashes_is_the_scripts(tmp_path):
    script = tmp_path / "says.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    words = ("run", "--workers", 1, script, "--", "--log-dir", "x", "-t", "3", "--json")
    done = paceline(*words, folder=tmp_path)
    assert done.stdout.strip() == "['--log-dir', 'x', '-t', '3', '--json']", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["says.py"]


def test_a_folder_that_cannot_be_written_is_found_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    for verb in (["simulate", "--workers", "2"], ["run", "--workers", "1"]):
        done = paceline(*verb, "--records", tmp_path / "file" / "x", LAYERS, *QUICK)
        assert done.returncode == 1
        assert done.stderr.startswith("paceline: cannot write records to")
