"""Whole trainings by themselves, in virtual time."""

from pathlib import Path

import msgspec
import pytest
import torch

import paceline
from paceline.errors import UsageError, WorkerFailedError
from paceline.run_options import RunOptions
from paceline.tools.auto import measurements, method_switching
from paceline.tools.auto.decision_cache import FORMAT
from paceline.tools.auto.planner_process import Answer, Predicted
from paceline.tools.plan import predictor
from tests.support import forked
from tests.support.simulations import run, run_on, simulation
from tests.tools.auto.cases import assert_equal_everywhere, changing, flat
from tests.tools.plan.helpers import layers

ROOT = Path(__file__).parent.parent.parent.parent
CODED = "bsp:compression=bf16"
LOSSY = "auto:consistency=lossy"
ANSWER = Answer(
    best=(
        Predicted(spec=CODED, consistency="lossy", seconds=0.1),
        Predicted(spec="osp:servers=per-node", consistency="delayed", seconds=0.1),
    ),
    present=Predicted(spec="bsp", consistency="exact", seconds=0.3),
    candidates=3,
    lower_bound=0.1,
)
SLOW = 40e6
"""320 Mbit/s: gradients take about as long as a step computes."""


class Canned:
    """In the place of the planner's process."""

    answer_given = ANSWER
    asked = ()

    def __init__(self, question):
        type(self).asked = (*self.asked, question)

    is_over = True

    def wait(self):
        pass

    def end(self):
        pass

    def answer(self):
        return self.answer_given


@pytest.fixture
def planner(monkeypatch):
    class Mine(Canned):
        asked = ()

    monkeypatch.setattr(measurements, "PlannerProcess", Mine)
    return Mine


def training(method, steps=140, clip=False, **options):
    """Of a stand-in; returns the specs of all steps, and the notes."""

    def body(rank):
        model = paceline.stand_in(layers())
        optimizer = paceline.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), method=method, **options
        )
        recorder = paceline.api._runtime().recorder
        specs = []
        for _ in range(steps if isinstance(steps, int) else steps[rank]):
            optimizer.zero_grad()
            model(torch.full((8,), 1.0 + rank)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            specs.append(recorder.brief)
            optimizer.step()
        optimizer.finish()
        assert_equal_everywhere(flat(model))
        return specs, list(recorder.notes), recorder.steps[-1].step_seconds

    return body


def auto(method=LOSSY, **options):
    return run_on(network(), training(method, **options))


def network():
    from tests.support.simulations import cluster, rack

    return simulation(cluster(rack(2, link=SLOW)))


def test_the_best_is_used_on_all_ranks_from_the_same_step_on(planner):
    (mine, notes, last), (theirs, _, _) = auto()
    assert mine == theirs
    assert mine[0] == "bsp"
    assert mine[-1] == CODED
    (plain, _, before), _ = run_on(network(), training("bsp", steps=40))
    assert set(plain) == {"bsp"}
    assert last < 0.97 * before
    assert any(f"switched from bsp to {CODED}" in note for note in notes)
    assert len(planner.asked) == 1


def test_what_the_planner_is_asked(planner):
    auto(steps=80)
    (asked,) = planner.asked
    known = layers()
    assert tuple(asked.workload["names"]) == known.names
    assert tuple(asked.workload["sizes"]) == known.sizes
    assert sum(asked.workload["forward"]) == pytest.approx(0.03)
    assert sum(asked.workload["backward"]) == pytest.approx(0.06)
    assert asked.consistency == "lossy"
    assert asked.optimizer == "SGD"
    assert asked.hyperparameters["lr"] == 0.1
    assert asked.present == "bsp"


def test_a_script_that_clips_is_not_given_what_has_sent_by_then(planner):
    planner.answer_given = Answer(best=ANSWER.best[1:], present=ANSWER.present)
    (specs, notes, _), _ = auto("auto:consistency=delayed", clip=True)
    assert set(specs) == {"bsp"}
    assert "osp" in planner.asked[0].refused
    assert any("it cannot be used" in note for note in notes)


def test_a_plan_that_failed_leaves_bsp(planner):
    planner.answer_given = Answer(fault="it ended with status 1")
    (specs, notes, _), _ = auto(steps=80)
    assert set(specs) == {"bsp"}
    assert any("stays with bsp" in note and "status 1" in note for note in notes)


def test_workers_that_are_out_of_data_stop_all_changes(planner):
    (long, _, _), (short, _, _) = auto(steps=(150, 40))
    assert set(long) == set(short) == {"bsp"}


def test_a_class_that_was_not_allowed_is_never_tried(planner):
    (specs, notes, _), _ = auto("auto", steps=90)
    assert set(specs) == {"bsp"}
    assert any("stays with bsp" in note for note in notes)


def test_a_fast_network_asks_nobody(planner):
    (specs, _, _), _ = run(2, training("auto", steps=60))
    assert set(specs) == {"bsp"}


def test_one_worker_is_bsp(planner, capfd):
    ((specs, _, _),) = run(1, training("auto", steps=2))
    assert set(specs) == {"bsp"}
    assert "one worker sends nothing" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("auto", {"compression": "int8"}, "compression"),
        ("auto", {"buckets": "ddp"}, "buckets"),
        ("auto:consistency=asynchronous", {}, "name the method"),
    ],
)
def test_what_is_refused(method, options, words):
    with pytest.raises(WorkerFailedError, match=words) as raised:
        run(2, training(method, steps=1, **options))
    assert isinstance(raised.value.__cause__, UsageError)


def test_the_command_lines_auto_wins_over_the_scripts_choices(planner):
    runtime = simulation(2, options=RunOptions(method="auto:consistency=delayed"))
    (specs, _, _), _ = run_on(runtime, training("osp", steps=3, buckets="ddp"))
    assert set(specs) == {"bsp"}


def test_a_decision_is_kept_and_used_at_once(planner, tmp_path):
    file = tmp_path / "decision.json"
    method = f"{LOSSY},file={file}"
    auto(method)
    kept = file.read_bytes()
    (again, notes, _), _ = auto(method, steps=50)
    assert again[3] == again[-1] == CODED
    assert any("as decided in an earlier run" in note for note in notes)
    assert len(planner.asked) == 1
    assert file.read_bytes() == kept
    other = simulation(2)  # the network is another one
    (specs, notes, _), _ = run_on(other, training(method, steps=60))
    assert set(specs) == {"bsp"}
    assert any("not that of the earlier run" in note for note in notes)


def test_a_decision_says_what_it_was_made_by(planner, tmp_path):
    file = tmp_path / "decision.json"
    auto(f"{LOSSY},file={file}")
    written = msgspec.json.decode(file.read_bytes())
    assert written["format"] == FORMAT
    (decision,) = written["decisions"]
    assert decision["spec"] == CODED
    assert decision["decision"]["trials"][0]["better"]
    assert decision["key"]["workers"] == 2
    assert "2 workers" in decision["text"]


@pytest.mark.slow
def test_runs_repeat_bit_for_bit_with_the_planner_in_its_process(monkeypatch):
    monkeypatch.setattr(predictor, "usual_events", lambda cluster: 2000)
    first = auto("auto", steps=70)
    assert first == auto("auto", steps=70)
    assert any("candidates (exact)" in note for note in first[0][1])


def test_nothing_is_left_running(planner, monkeypatch):
    closed = []
    for cls in (measurements.TrainingMeasurements, method_switching.DeferredMessages):
        usual = cls.close

        def close(self, usual=usual):
            closed.append(type(self).__name__)
            usual(self)

        monkeypatch.setattr(cls, "close", close)
    auto(steps=10)
    assert sorted(closed) == [
        *["DeferredMessages"] * 2,
        *["TrainingMeasurements"] * 2,
    ]


def test_who_comes_back_to_a_spec_does_not_measure_its_buckets_again(capfd):
    specs = {40: CODED, 60: "bsp", 70: CODED}
    run_on(network(), training(changing(specs), steps=90, buckets="optimal"))
    said = capfd.readouterr().err.count("planned from measured times")
    assert said == 2
    run_on(network(), training(changing({40: CODED}), steps=70, buckets="optimal"))
    assert capfd.readouterr().err.count("planned from measured times") == 2


@pytest.mark.slow
def test_real_processes_measure_their_links_and_try_what_is_proposed(tmp_path):
    ends = forked.run_together(
        2,
        ["-m", "tests.tools.auto.real_job", tmp_path / "decision.json"],
        folder=ROOT,
    )
    for rank, end in enumerate(ends):
        assert f"rank {rank}: ok" in end.stdout, end.stderr
