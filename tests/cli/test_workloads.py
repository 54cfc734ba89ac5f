"""Where compute times come from: measured, cached, given, or the script's own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster import Workload
from tests.support.cli_scripts import (
    ANOTHER_MODEL,
    CALLS_A_PART,
    FAILS,
    PACES,
    READS_SIZES,
    SLEEPS,
    STANDS_IN,
    TRAINS,
    TRAINS_NOTHING,
    TWO_MODELS,
    write,
)
from tests.support.commands import paceline_here
from tests.support.processes import PACELINE, Job

STAND_IN = Path(__file__).parent.parent.parent / "examples" / "workload.py"
RESULT = "train.workload.json"


@pytest.fixture
def cached(tmp_path_factory, monkeypatch):
    """Where the only profile is cached; None where there is none. A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))

    def path():
        files = list(folder.rglob("*.workload.json"))
        assert len(files) < 2
        return files[0] if files else None

    return path


@pytest.fixture
def paceline(tmp_path, monkeypatch, capfd):
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words, status=0):
        done = paceline_here(monkeypatch, capfd, *words)
        assert done.status == status, done.err
        return done

    return run


def in_processes(folder, *words, status=0):
    """The command and its workers, forked."""
    job = Job([*PACELINE, *map(str, words)], folder, forked="all").wait()
    assert job.status == status, job.output
    return job


# ---- simulate ----


def test_simulate_profiles_once_and_says_where(paceline, tmp_path, cached):
    write(tmp_path, "train.py", TRAINS)
    outputs = []
    for name in ("first", "second", "third"):
        words = ("--workers", 3, "--seed", 7, "--jitter", 0.1, "--records", name)
        outputs.append(paceline("simulate", "train.py", *words))
    first, *others = outputs
    assert f"compute: profiled train.py once: {cached()}\n" in first.err
    assert f"compute: {cached()}: forward " in first.err
    assert "of worker 0 of 3 in train.py, CPU, 1 thread" in first.err
    # what the script prints while it is profiled is not a result
    assert first.out.count("the script speaks") == 1
    assert first.err.count("the script speaks") == 1
    for other in others:
        assert f"compute: from {cached()} (of the same script and arg" in other.err
        assert other.out == first.out
    for file in ("records.jsonl", "records.trace.json"):
        contents = {
            (tmp_path / name / file).read_bytes()
            for name in ("first", "second", "third")
        }
        assert len(contents) == 1
    made = {"train.py", "runs.txt", "first", "second", "third"}
    assert {path.name for path in tmp_path.iterdir()} == made
    workload = Workload.load(cached())
    assert workload.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert workload.sizes == (192, 32, 32, 4)
    assert workload.batch == 4
    assert workload.forward_seconds > 0
    assert (tmp_path / "runs.txt").read_text().count("began") == 4


def test_a_workload_that_is_given_is_not_measured(paceline, tmp_path, cached):
    write(tmp_path, "train.py", TRAINS)
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    sizes = (192, 32, 32, 4)
    Workload(
        names=names, sizes=sizes, forward=(1,) * 4, backward=(2,) * 4, update=3
    ).save(tmp_path / "mine.json")
    words = ("--workers", 1, "--json", "--workload", "mine.json")
    output = paceline("simulate", "train.py", *words)
    assert json.loads(output.out)["step_seconds"] == pytest.approx(4 + 8 + 3)
    assert "compute: mine.json: forward 4 s, backward 8 s, update 3 s" in output.err
    assert cached() is None
    assert (tmp_path / "runs.txt").read_text().count("began") == 1


def test_a_profile_that_was_made_by_hand_is_refused_where_it_is_another_models(
    paceline, tmp_path, cached
):
    write(tmp_path, "train.py", TRAINS)
    paceline("simulate", "train.py", "--workers", 1)
    Workload.load(cached()).save(RESULT)  # as paceline profile would
    before = (tmp_path / RESULT).read_bytes()
    words = ("--workers", 2, "--workload", RESULT, "--", 9)
    output = paceline("simulate", "train.py", *words, status=1)
    assert (tmp_path / RESULT).read_bytes() == before
    assert (
        f"{RESULT} is the profile of another model: tensor 0 of this model is "
        "'0.weight' of 216 bytes, in the profile '0.weight' of 192 bytes"
    ) in output.err


def test_a_profile_that_nobody_names_does_not_count(paceline, tmp_path, cached):
    write(tmp_path, "train.py", TRAINS)
    (tmp_path / RESULT).write_text("not even a profile")
    output = paceline("simulate", "train.py", "--workers", 1)
    assert f"compute: profiled train.py once: {cached()}\n" in output.err


def test_other_arguments_are_another_file(paceline, tmp_path, cached):
    write(tmp_path, "train.py", TRAINS)
    paceline("simulate", "train.py", "--workers", 2)
    first = cached()
    before = first.read_bytes()
    output = paceline("simulate", "train.py", "--workers", 2, "--", 9)
    assert "profiling again" not in output.err
    (second,) = set(first.parent.iterdir()) - {first}
    assert f"compute: profiled train.py once: {second}\n" in output.err
    assert first.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            "height.txt",
            "the model's inputs have other shapes, samples of 9 x 6 instead of 5 x 6",
        ),
        ("hidden.txt", "the profile of another model: tensor 0 of this model is"),
    ],
)
def test_a_cached_profile_is_made_anew_where_it_does_not_fit(
    changed, said, paceline, tmp_path, cached
):
    write(tmp_path, "train.py", READS_SIZES)
    (tmp_path / "height.txt").write_text("5")
    (tmp_path / "hidden.txt").write_text("8")
    words = ("simulate", "train.py", "--workers", 2, "--json")
    paceline(*words)
    before = cached().read_bytes()
    (tmp_path / changed).write_text("9")
    output = paceline(*words)
    lines = output.err.splitlines()
    (line,) = (line for line in lines if line.startswith("compute: profiling again: "))
    assert str(cached()) in line
    assert said in line
    assert f"compute: profiled train.py once: {cached()}" in lines
    assert cached().read_bytes() != before
    output = paceline(*words)
    assert "profiling again" not in output.err


def test_where_nothing_can_be_cached_it_is_measured_each_time(
    paceline, tmp_path, monkeypatch
):
    write(tmp_path, "train.py", TRAINS)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")  # nobody can make files there
    for runs in (2, 4):
        output = paceline("simulate", "train.py", "--workers", 1, "--json")
        assert "compute: measured now: forward " in output.err
        assert (tmp_path / "runs.txt").read_text().count("began") == runs
        # It is said once: these two commands are one process.
        said = "compute: profiled train.py, for this time: cannot cache"
        assert (said in output.err) == (runs == 2)


def test_built_in_workloads_go_by_their_names(paceline, tmp_path):
    write(tmp_path, "train.py", TRAINS)
    words = ("simulate", "train.py", "--workers", 1, "--workload")
    output = paceline(*words, "resnet50", status=1)
    assert "resnet50 is the profile of another model: tensor 0" in output.err
    output = paceline(*words, "resnet5", status=1)
    assert "Did you mean 'resnet50'?" in output.err
    words = ("--workers", 1, "--steps", 2, "--workload", "googlenet-k80", "--json")
    output = paceline("simulate", STAND_IN, *words, "--", "googlenet-k80")
    assert "compute: googlenet-k80: forward " in output.err
    workload = Workload.load("googlenet-k80")
    assert json.loads(output.out)["step_seconds"] == pytest.approx(
        workload.forward_seconds + workload.backward_seconds + workload.update
    )


@pytest.mark.parametrize("option", ["forward", "backward"])
def test_workload_and_totals_contradict_each_other(option, paceline, tmp_path):
    write(tmp_path, "train.py", TRAINS)
    words = ("--workload", "resnet50", f"--{option}", 1)
    for verb in (["simulate"], ["compare", "--method", "bsp"]):
        output = paceline(*verb, "train.py", *words, status=1)
        assert output.err == (
            f"paceline: --{option} and --workload contradict each other: a workload has the compute "
            "times. Leave one of them out\n"
        )
    assert not (tmp_path / "runs.txt").exists()


def test_totals_that_are_given_are_not_measured(paceline, tmp_path, cached):
    write(tmp_path, "train.py", TRAINS)
    output = paceline("simulate", "train.py", "--workers", 1, "--forward", 1, "--json")
    assert json.loads(output.out)["step_seconds"] == pytest.approx(1.02)
    assert cached() is None


@pytest.mark.parametrize(
    ("text", "seconds", "said"),
    [
        (PACES, 0.5, "compute: paced by the script"),
        (
            STANDS_IN,
            6.0,
            "compute: that of the workload which the script's model stands",
        ),
        (CALLS_A_PART, 0.02, "compute: forward 0.01 s, backward 0.02 s a step"),
    ],
    ids=["paces", "stands in", "calls a part of the model"],
)
def test_scripts_that_cannot_be_profiled_leave_no_file(
    text, seconds, said, paceline, tmp_path, cached
):
    write(tmp_path, "train.py", text)
    output = paceline("simulate", "train.py", "--workers", 1, "--json")
    assert json.loads(output.out)["step_seconds"] == pytest.approx(seconds)
    assert said in output.err
    assert cached() is None


def test_of_two_models_after_each_other_the_first_is_profiled(
    paceline, tmp_path, cached
):
    write(tmp_path, "train.py", ANOTHER_MODEL)
    output = paceline("simulate", "train.py", "--workers", 2)
    assert (
        "compute: of model 2, which is charged forward 0.01 s and backward 0.02 s: "
        f"{cached()} is the profile of another model: tensor 0 of this model is 'weight'"
    ) in output.err
    assert output.err.count("of model 2") == 1
    assert Workload.load(cached()).names[0] == "0.weight"


def test_of_two_models_side_by_side_none_is_profiled(paceline, tmp_path, cached):
    write(tmp_path, "train.py", TWO_MODELS)
    output = paceline("simulate", "train.py", "--workers", 2)
    assert "spread over the tensors by bytes" in output.err
    assert cached() is None


def test_a_file_that_is_no_profile_is_refused(paceline, tmp_path):
    write(tmp_path, "train.py", TRAINS)
    (tmp_path / RESULT).write_text("{}")
    output = paceline("simulate", "train.py", "--workload", RESULT, status=1)
    assert f"{RESULT} is not a workload" in output.err


def test_what_a_compressor_takes_is_measured_when_it_is_first_used(
    paceline, tmp_path, cached
):
    """And nothing else is measured again."""
    write(tmp_path, "train.py", TRAINS)
    words = ("simulate", "train.py", "--workers", 2, "--json")
    paceline(*words)
    plain = Workload.load(cached())
    assert plain.shapes == ((8, 6), (8,), (1, 8), (1,))
    assert not plain.coding
    code = ("--method", "bsp:compression=int8")
    output = paceline(*words, *code)
    spec = "int8:rounding=nearest,error_feedback=false"
    assert (
        f"profiling again: {cached()}: it does not say what compression" in output.err
    )
    known = Workload.load(cached())
    assert list(known.coding) == [spec]
    assert known == replace(plain, coding=known.coding)
    result = json.loads(output.out)
    times = known.coding[spec]
    assert result["step_seconds"] >= times.encode + times.after(2)
    assert "estimated from bytes" not in str(result["notes"])
    again = paceline(*words, *code)
    assert again.out == output.out
    assert "profiling again" not in again.err
    paceline(*words, "--method", "bsp:compression=bf16")
    assert set(Workload.load(cached()).coding) == {spec, "bf16:error_feedback=false"}


def test_a_workload_that_is_given_and_does_not_say_it_is_added_to_by_a_guess(
    paceline, tmp_path, cached
):
    write(tmp_path, "train.py", TRAINS)
    paceline("simulate", "train.py", "--workers", 1)
    Workload.load(cached()).save("mine.json")
    words = ("--workers", 2, "--json", "--workload", "mine.json")
    code = ("--method", "bsp:compression=bf16")
    output = paceline("simulate", "train.py", *words, *code)
    (note,) = (
        n for n in json.loads(output.out)["notes"] if "estimated from bytes" in n
    )
    assert "paceline profile SCRIPT --compression bf16:error_feedback=false" in note


# ---- compare ----


@pytest.mark.slow
def test_compare_profiles_once_for_all_variants(paceline, tmp_path, cached):
    write(tmp_path, "train.py", TRAINS)
    words = ("--method", "bsp", "--method", "bsp:buckets=wfbp", "--workers", 2)
    done = paceline("compare", "train.py", *words, "--no-html", "--json")
    rows = json.loads(done.out)["variants"]
    assert (tmp_path / "runs.txt").read_text().count("began") == 1 + 2
    workload = Workload.load(cached())
    seconds = workload.forward_seconds + workload.backward_seconds + workload.update
    for row in rows:
        assert row["compute_seconds"] == pytest.approx(seconds)


def test_compare_in_the_real_runtime_refuses_a_workload(paceline, tmp_path):
    write(tmp_path, "train.py", TRAINS)
    words = ("--method", "bsp", "--runtime", "real", "--workload", "resnet50")
    output = paceline("compare", "train.py", *words, status=1)
    assert "--workload means nothing in the real runtime; leave it out" in output.err


# ---- profile ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [[], ["--nproc-per-node=2"]], ids=["1 worker", "2 workers"]
)
def test_profile_measures_every_tensor(workers, tmp_path):
    write(tmp_path, "train.py", SLEEPS)
    words = ["profile", *workers, "--steps", 8, "train.py", "--json"]
    words += ["--compression", "bf16", "--compression", "fp16:error_feedback=true"]
    done = in_processes(tmp_path, *words)
    assert json.loads(done.stdout) == json.loads((tmp_path / RESULT).read_text())
    workload = Workload.load(tmp_path / RESULT)
    assert workload.batch == 8
    # Sleeps are a little longer than asked for, and more so on a busy machine.
    forward = [sum(workload.forward[:2]), sum(workload.forward[2:])]
    backward = [sum(workload.backward[:2]), sum(workload.backward[2:])]
    for measured, asked in zip(
        [*forward, *backward, workload.update],
        [0.01, 0.03, 0.03, 0.01, 0.02],
        strict=True,
    ):
        assert asked <= measured < asked + 0.05
    assert forward[0] < forward[1]
    assert backward[1] < backward[0]
    count = 2 if workers else 1
    assert f"medians of 7 steps, {count} worker" in workload.source
    assert workload.shapes == ((4, 4), (4,)) * 2
    assert set(workload.coding) == {
        "bf16:error_feedback=false",
        "fp16:error_feedback=true,decay=1.0",
    }
    assert min(times.encode for times in workload.coding.values()) > 0


@pytest.mark.slow
def test_profile_prints_a_table_and_names_the_file(tmp_path):
    write(tmp_path, "train.py", TRAINS)
    done = in_processes(
        tmp_path, "profile", "train.py", "--output", "made/for/it.json", "--", 16
    )
    assert "made/for/it.json" in done.stdout.splitlines()[-1]
    for word in ("0.weight", "384 B", "all 4 tensors", "update: "):
        assert word in done.stdout
    assert Workload.load(tmp_path / "made/for/it.json").sizes[0] == 6 * 16 * 4
    assert not (tmp_path / RESULT).exists()


@pytest.mark.slow
def test_profile_prints_what_compressors_cost_and_gain(tmp_path):
    write(tmp_path, "train.py", TRAINS)
    words = ["--compression", "fp16", "--compression", "none"]
    done = in_processes(tmp_path, "profile", "train.py", *words)
    for text in (
        "4 workers",
        "fp16",
        "pays below B, where 2(n-1)/n S / B = encode + decode + sent / B",
        "paceline compare",
        "none does not suit: sends every tensor",
    ):
        assert text in done.stdout
    assert "fp16" not in done.stderr  # progress is for terminals
    coding = Workload.load(tmp_path / RESULT).coding
    assert list(coding) == ["fp16:error_feedback=false"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRAINS_NOTHING, "ended without a profile: it trained nothing"),
        (FAILS, "the job failed: rank 0 ended with exit status 1"),
        (CALLS_A_PART, "nothing to profile: expected more than 1 training steps"),
        (TWO_MODELS, "the script trains 2 models, and a workload is one model's"),
    ],
    ids=["trains nothing", "fails", "calls a part of the model", "two models"],
)
def test_a_profile_that_cannot_be_made_leaves_the_old_one(text, message, tmp_path):
    write(tmp_path, "train.py", text)
    (tmp_path / RESULT).write_text("the old one")
    done = in_processes(tmp_path, "profile", "train.py", status=1)
    assert message in done.stderr
    assert (tmp_path / RESULT).read_text() == "the old one"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "file/x.json"], "cannot write the profile to file"),
        (["--output", "."], "--output: expected a file, got the folder ."),
        (["--workers", "0"], "--workers: expected 1 or more"),
        (["--workers", "2", "--nproc-per-node=2"], "give one of them"),
        (["--steps", "0"], "--steps: expected 1 or more"),
        (["--compression", "bf61"], "unknown compression 'bf61'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_profile_command_is_one_message_and_leaves_the_old_one(
    words, message, paceline, tmp_path
):
    write(tmp_path, "train.py", TRAINS)
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / RESULT).write_text("the old one")
    output = paceline("profile", *words, "train.py", status=1)
    assert output.err.startswith("paceline: ")
    assert message in output.err
    assert (tmp_path / RESULT).read_text() == "the old one"
    assert not (tmp_path / "runs.txt").exists()
