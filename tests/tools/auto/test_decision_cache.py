"""The file of decisions, and what people read."""

from pathlib import Path

import msgspec
import pytest

from paceline.cluster import uniform_cluster
from paceline.errors import UsageError
from paceline.run_options import RunOptions
from paceline.tools.auto.config import AutoConfig
from paceline.tools.auto.controller import Decision, TrialResult
from paceline.tools.auto.decision_cache import (
    FILE,
    MOST_DECISIONS,
    CacheKey,
    DecisionCache,
    describe_decision,
    model_digest,
)
from paceline.tools.auto.planner_process import Answer, Predicted

KEY = CacheKey(
    model="abc", optimizer="SGD", workers=4, consistency="delayed", runtime="real"
)
TRIAL = TrialResult(
    spec="osp",
    before="bsp",
    predicted=0.7,
    seconds=0.72,
    before_seconds=1.0,
    better=True,
    why="osp is clearly faster, and is used",
)
DECISION = Decision(
    before="bsp", chosen="osp", step_seconds=0.72, exposed=0.5, trials=[TRIAL]
)
CLUSTER = uniform_cluster(4, "200mbit", "50us")


def key(**changes):
    return msgspec.structs.replace(KEY, **changes)


def saved(path, key=KEY, chosen="osp"):
    decision = msgspec.structs.replace(DECISION, chosen=chosen)
    DecisionCache(path, key).save(decision, CLUSTER, "why")


def test_what_is_saved_is_loaded(tmp_path):
    file = tmp_path / "run" / FILE
    assert DecisionCache(file, KEY).load() is None
    saved(file)
    found = DecisionCache(file, KEY).load()
    assert (found.spec, found.seconds, found.text) == ("osp", 0.72, "why")
    assert found.decision == DECISION
    assert "workers = 4" in found.cluster
    assert [path.name for path in file.parent.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "def"),
        ("optimizer", "Adam"),
        ("workers", 5),
        ("consistency", "exact"),
        ("runtime", "emulated"),
        ("version", "0.0.1"),
    ],
)
def test_a_decision_of_another_training_does_not_hold(tmp_path, name, value):
    saved(tmp_path / FILE)
    saved(tmp_path / FILE, key(model="other", workers=9, optimizer="x"))
    with pytest.raises(UsageError, match=name):
        DecisionCache(tmp_path / FILE, key(**{name: value})).load()


def test_two_trainings_in_one_folder_keep_a_decision_each(tmp_path):
    file = tmp_path / FILE
    for spec, model in (("osp", "a"), ("dear", "b"), ("priority", "a")):
        saved(file, key(model=model), spec)
    found = {model: DecisionCache(file, key(model=model)).load().spec for model in "ab"}
    assert found == {"a": "priority", "b": "dear"}
    for workers in range(2, 2 + MOST_DECISIONS):
        saved(file, key(workers=100 + workers))
    with pytest.raises(UsageError):
        DecisionCache(file, key(model="a")).load()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": "x"}', b"\xff\xfe"])
def test_a_file_without_decisions_is_refused_and_replaced(tmp_path, content):
    file = tmp_path / FILE
    file.write_bytes(content)
    with pytest.raises(UsageError, match="no decisions"):
        DecisionCache(file, KEY).load()
    saved(file)
    assert DecisionCache(file, KEY).load().spec == "osp"


def test_another_format(tmp_path):
    (tmp_path / FILE).write_text('{"format": "paceline auto 0", "decisions": []}')
    with pytest.raises(UsageError, match="format"):
        DecisionCache(tmp_path / FILE, KEY).load()


@pytest.mark.parametrize(
    ("file", "runtime", "records", "expected"),
    [
        ("", "real", None, Path(FILE)),
        ("", "real", "folder", Path("folder") / FILE),
        ("mine.json", "simulated", "folder", Path("mine.json")),
        ("", "simulated", "folder", None),
    ],
)
def test_where_it_is(file, runtime, records, expected):
    config, options = AutoConfig(file=file), RunOptions(records=records)
    assert DecisionCache.of(config, options, key(runtime=runtime)).path == expected


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "in the way").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        saved(tmp_path / "in the way" / FILE)


def test_a_model_is_known_by_its_tensors():
    assert model_digest(["a", "b"], [1, 2]) == model_digest(["a", "b"], [1, 2])
    assert model_digest(["a", "b"], [1, 2]) != model_digest(["a", "b"], [2, 1])


def facts_of(decision, *arguments):
    """The headline, and each line's fact, or facts, by its name."""
    headline, *lines = describe_decision(decision, "delayed", *arguments)
    assert all(line.startswith("  ") for line in lines)
    facts = {}
    for line in lines:
        name, fact = line.split(maxsplit=1)
        facts.setdefault(name, []).append(fact)
    return headline, facts


def test_the_text_has_a_line_for_each_fact():
    answer = Answer(
        best=(Predicted(spec="osp", consistency="delayed", seconds=0.7),),
        present=Predicted(spec="bsp", consistency="exact", seconds=0.98),
        next=Predicted(spec="bsp:compression=int8", consistency="lossy", seconds=0.35),
        candidates=40,
        lower_bound=0.65,
    )
    headline, facts = facts_of(DECISION, answer, CLUSTER, "paceline-auto.json")
    assert "from bsp to osp: 1 s -> 720 ms" in headline
    names = ["method", "measured", "predicted", "tried", "also", "saved"]
    assert list(facts) == names
    for name, figures in {
        "method": ("waits for every worker", "not deferred"),
        "measured": ("50 %", "4 workers", "200 Mbit/s"),
        "predicted": ("40 candidates", "650 ms", "980 ms"),
        "tried": ("osp", "700 ms", "720 ms", "1 s"),
        "also": ("consistency=lossy", "bsp:compression=int8", "350 ms", "2.00x"),
        "saved": ("paceline-auto.json",),
    }.items():
        (fact,) = facts[name]
        assert all(figure in fact for figure in figures), fact


def test_the_text_where_nothing_could_be_predicted_or_gained():
    nothing = Decision(before="bsp", chosen="bsp", step_seconds=1.0, exposed=0.01)
    headline, facts = facts_of(nothing)
    assert "stays with bsp: 1 s" in headline
    assert list(facts) == ["measured"]
    _, facts = facts_of(nothing, Answer(fault="it ended with status 1: why"))
    assert "status 1: why" in facts["predicted"][0]
    recalled = Decision(chosen="osp", step_seconds=0.7, recalled=True)
    headline, facts = facts_of(recalled, None, None, "f.json")
    assert "osp, as decided in an earlier run: 700 ms" in headline
    assert "f.json" in facts["saved"][0]


def test_the_text_says_what_is_postponed():
    postponed = Decision(
        before="bsp",
        chosen="bsp",
        step_seconds=0.01,
        exposed=0.5,
        postponed=[("osp", 0.008), ("dear", 0.009)],
    )
    headline, facts = facts_of(postponed, Answer(candidates=3))
    assert "stays with bsp" in headline
    assert ["8 ms" in facts["postponed"][0], "9 ms" in facts["postponed"][1]] == [
        True
    ] * 2
