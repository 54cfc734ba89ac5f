"""What a script does in a step is in its plan: passes that accumulate, gradients that it uses."""

from dataclasses import replace

import pytest
import torch

from paceline.cluster import Workload, uniform_cluster
from paceline.cluster.profiling import StepHabits
from paceline.cluster.profiling.step_profiler import MOST_STEPS
from paceline.errors import UsageError
from paceline.interfaces import CONSISTENCIES
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.runtimes.simulated.launch import run_script
from paceline.runtimes.simulated.profile_cache import profile_script
from paceline.tools.auto.measurements import with_all_compute
from paceline.tools.plan.estimates import Estimate, lower_bound_seconds
from paceline.tools.plan.predict import TrainingJob, predict, predict_single
from paceline.tools.plan.script import analyze_script
from tests.support.tables import crossed, sampled
from tests.tools.plan.helpers import cluster, layers

SCRIPT = """
import sys, torch, paceline
from torch import nn
passes, clips = int(sys.argv[1]), sys.argv[2]
paceline.init()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
keys = {"clip_norm": {"clip_norm": 1.0}, "check": {"check_finite": True}}.get(clips, {})
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, inner, **keys)
for step in range(40):
    optimizer.zero_grad()
    for _ in range(passes - 1):
        with optimizer.no_sync():
            model(torch.ones(8, 64)).mean().backward()
    model(torch.ones(8, 64)).mean().backward()
    if clips == "by hand":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if clips == "log" and step % 50 == 0:
        print([p.grad.norm() for p in model.parameters()])
    optimizer.step()
optimizer.finish()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("facts") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("passes", "clips", "uses"),
    sampled(
        3,
        [
            (3, "no", False),
            (1, "no", False),
            (1, "by hand", True),
            (2, "clip_norm", True),
            (1, "check", True),
            (1, "log", False),
        ],
    ),
)
def test_passes_and_uses_of_gradients_are_found_out(
    passes, clips, uses, script, tmp_path
):
    """A norm that is logged in one step of three is no habit."""
    facts = analyze_script(script, [str(passes), clips], tmp_path)
    assert (facts.passes, facts.uses_gradients) == (passes, uses)
    known = replace(layers(), passes=7, uses_gradients=not uses, source="a file")
    made = facts.of_script(known)
    assert (made.passes, made.uses_gradients) == (passes, uses)
    assert (f"{passes} passes" in made.source) == (passes > 1)
    assert ("gradients" in made.source) == uses


@pytest.mark.parametrize(
    ("way", "spec"),
    crossed(
        4,
        [(2, "clip_norm"), (1, "no"), (2, "no"), (1, "by hand")],
        ["bsp:buckets=ddp", "dear"],
    ),
)
def test_a_prediction_is_what_the_script_itself_takes(way, spec, script, tmp_path):
    passes, clips = way
    facts = analyze_script(script, [str(passes), clips], tmp_path)
    spread = Workload.spread(facts.names, facts.sizes, 0.02, 0.04)
    slow = uniform_cluster(4, "10mbit", "50us")
    said = predict(TrainingJob(cluster=slow, workload=facts.of_script(spread)), spec)
    simulation = Simulation(
        slow,
        options=RunOptions(method=spec, tells=False),
        compute=ComputeModel(workload=spread),
    )
    recorder = run_script(simulation, script, [str(passes), clips]).recorders[0]
    taken = recorder.stats()
    assert isinstance(said, Estimate)
    assert said.step_seconds == pytest.approx(taken.step_seconds, rel=2e-3)
    assert said.compute_seconds == pytest.approx(0.06 * passes)


def test_who_clips_gains_nothing_by_waiting_late():
    """And who does not, does: the parameters of the next pass wait instead."""
    for uses in (False, True):
        job = TrainingJob(
            cluster=cluster(), workload=replace(layers(), uses_gradients=uses)
        )
        dear, bsp = (predict(job, spec).step_seconds for spec in ("dear", "bsp"))
        assert (dear < 0.97 * bsp) == (not uses)


def test_a_workloads_passes_are_a_jobs_unless_it_says_others():
    job = TrainingJob(cluster=cluster(), workload=replace(layers(), passes=3))
    assert job.passes == 3
    assert replace(job, accumulate=16).passes == 16
    assert replace(job, workload=layers()).passes == 1  # as of files that do not say it
    found = predict(job, "bsp:buckets=single")
    assert found.compute_seconds == pytest.approx(3 * 0.09)
    assert predict_single(job).step_seconds == pytest.approx(4 * 3 * 0.09)
    fast = uniform_cluster(4, "100gbit", "0s")
    assert lower_bound_seconds(fast, job.workload) == pytest.approx(3 * 0.09)


def test_a_profile_has_both(script):
    job = ScriptJob(script, ["2", "by hand"], RunOptions(method="bsp"))
    profile = profile_script(job, cluster(2))
    assert profile is not None
    assert (profile.workload.passes, profile.workload.uses_gradients) == (2, True)


def test_auto_counts_what_earlier_passes_take_once():
    """A step of 0.5 s: two passes of 0.09 s, and 0.32 s of loading between them."""
    twice = with_all_compute(replace(layers(), passes=2), 0.5, 1.0)
    assert twice.compute_seconds == pytest.approx(0.5)
    assert twice.backward == layers().backward


def habits_after(steps, looks):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    habits = StepHabits([parameter])
    for step in range(steps):
        habits.step_begins()
        habits.gradient(0)
        habits.gradient_ready(0)
        habits.means_are_there()
        if looks(step):
            parameter.grad.norm()
        habits.step_is_called()
        parameter.grad.mul_(1.0)  # the optimizer's doing
        habits.step_ended()
        assert type(parameter.grad) is torch.Tensor  # nobody watches it
    return habits


def test_habits_are_what_most_steps_have():
    assert StepHabits([]).passes is None
    assert StepHabits([]).uses_gradients is None
    assert habits_after(4, lambda step: step > 0).uses_gradients
    assert not habits_after(4, lambda step: step > 2).uses_gradients
    long = habits_after(3 * MOST_STEPS, lambda step: step >= MOST_STEPS)
    assert not long.uses_gradients  # nobody watches for ever
    assert long.passes == 1


def test_what_a_pass_does_to_a_gradient_is_not_the_scripts_doing():
    """A step that was skipped: the next pass adds to the gradients of the one before."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    habits = StepHabits([parameter])
    habits.means_are_there()
    assert type(parameter.grad) is not torch.Tensor  # it is watched
    habits.step_begins()
    parameter.grad.add_(1.0)
    habits.step_is_called()
    habits.step_ended()
    assert habits.uses_gradients is False


COUNTED = """
import pathlib, sys, torch, paceline
from torch import nn
paceline.init()
if paceline.rank() == 0:
    with pathlib.Path(sys.argv[1]).open("a") as file:
        print(paceline.runtime_name(), file=file)
model = nn.Linear(4, 1)
{optimizer}
optimizer = paceline.distribute(model, inner)
for step in range(4):
    paceline.pace(0.01)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
optimizer.finish()
"""
ADAM = "inner = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))"
FULL_DISK = """
if pathlib.Path(sys.argv[1]).read_text().count("simulated") > 1:
    raise OSError(28, "No space left on device")
"""
OWN = """
class Own(torch.optim.SGD):
    pass
inner = Own(model.parameters(), lr=0.1)
"""


def count_runs(folder, optimizer):
    script, runs = folder / "train.py", folder / "runs.txt"
    script.write_text(COUNTED.format(optimizer=optimizer))
    texts = []

    def analyze(*allowed):
        runs.write_text("")
        texts.clear()
        found = analyze_script(
            str(script),
            [str(runs)],
            folder / "scratch",
            allowed,
            lambda text, *_: texts.append(text),
        )
        names = runs.read_text().split()
        assert names == ["simulated"] * len(texts)
        return found, len(names)

    return analyze, texts


def test_a_script_runs_once_for_each_kind_that_is_allowed_and_was_not_run(tmp_path):
    analyze, texts = count_runs(tmp_path, ADAM)
    first, runs = analyze("exact")
    assert runs == 2
    assert [text.partition(": ")[2][:6] for text in texts] == ["1 of 2", "2 of 2"]
    assert not first.refused.keys() & {"asp", "local-sgd"}
    again, runs = analyze("exact")
    assert runs == 0
    assert again.file
    assert replace(again, file="", optimizer=first.optimizer) == first
    more, runs = analyze(*CONSISTENCIES)
    assert runs == 2  # servers' and local methods' kinds
    assert "asp" in more.refused
    last, runs = analyze("exact", "local")
    assert runs == 0
    made = last.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(made) is torch.optim.Adam
    assert made.defaults["betas"] == (0.8, 0.9)
    (tmp_path / "train.py").write_text("raise SystemExit")
    with pytest.raises(UsageError, match="without calling"):
        analyze_script(str(tmp_path / "train.py"), [], tmp_path, ("exact",))


def test_a_failure_that_may_be_over_is_not_cached(tmp_path):
    analyze, _ = count_runs(tmp_path, FULL_DISK + ADAM)
    for _ in range(2):
        found, runs = analyze("exact")
        assert runs == 2
        assert "No space left" in found.refused["dear"]


def test_an_optimizer_of_the_scripts_own_is_not_cached(tmp_path):
    analyze, _ = count_runs(tmp_path, OWN)
    assert [analyze("lossy")[1] for _ in range(2)] == [1, 1]
