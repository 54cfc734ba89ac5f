"""The file of a decision, and what people read."""

from dataclasses import replace as replace_wish

import msgspec
import pytest

from paceline.cluster import uniform_cluster
from paceline.errors import UsageError
from paceline.run_options import RunOptions
from paceline.tools.auto.config import Auto
from paceline.tools.auto.decision import Answer, Found, Predicted, Tried
from paceline.tools.auto.decision_cache import (
    FILE,
    About,
    Decision,
    digest,
    file_of,
    read,
    write,
)
from paceline.tools.auto.decision_text import paragraph

ABOUT = About(
    model="abc", optimizer="SGD", workers=4, consistency="delayed", runtime="real"
)
TRIED = Tried(
    spec="osp",
    before="bsp",
    predicted=0.7,
    seconds=0.72,
    before_seconds=1.0,
    better=True,
    why="osp is clearly faster, and is used",
)
FOUND = Found(before="bsp", chosen="osp", usual=0.72, waited=0.5, tried=[TRIED])


def decision(**changes):
    usual = Decision(about=ABOUT, spec="osp", seconds=0.72, cluster="", found=FOUND)
    return msgspec.structs.replace(usual, **changes)


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "run" / FILE
    assert read(file, ABOUT) is None
    write(file, decision())
    assert read(file, ABOUT) == decision()
    assert [path.name for path in file.parent.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "def"),
        ("optimizer", "Adam"),
        ("workers", 5),
        ("consistency", "exact"),
        ("runtime", "emulated"),
        ("version", "0.0.1"),
    ],
)
def test_a_decision_on_something_else_does_not_count(tmp_path, key, value):
    file = tmp_path / FILE
    write(file, decision())
    with pytest.raises(UsageError, match=key):
        read(file, msgspec.structs.replace(ABOUT, **{key: value}))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": "x"}', b"\xff\xfe"])
def test_a_file_that_is_no_decision(tmp_path, content):
    file = tmp_path / FILE
    file.write_bytes(content)
    with pytest.raises(UsageError, match="no decision"):
        read(file, ABOUT)


def test_another_format(tmp_path):
    file = tmp_path / FILE
    write(file, decision(format="paceline auto 0"))
    with pytest.raises(UsageError, match="format"):
        read(file, ABOUT)


def test_where_it_is(tmp_path):
    assert file_of(Auto(), "real", RunOptions()).name == FILE
    records = RunOptions(records=str(tmp_path))
    assert file_of(Auto(), "real", records) == tmp_path / FILE
    wish = replace_wish(Auto(), file="mine.json")
    assert str(file_of(wish, "simulated", records)) == "mine.json"
    assert file_of(Auto(), "simulated", records) is None


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "in the way").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write(tmp_path / "in the way" / FILE, decision())


def test_a_model_is_known_by_its_tensors():
    assert digest(["a", "b"], [1, 2]) == digest(["a", "b"], [1, 2])
    assert digest(["a", "b"], [1, 2]) != digest(["a", "b"], [2, 1])


def test_the_paragraph_says_what_was_found_chosen_why_and_what_more_would_give():
    answer = Answer(
        best=(Predicted(spec="osp", consistency="delayed", seconds=0.7),),
        present=Predicted(spec="bsp", consistency="exact", seconds=0.98),
        next=Predicted(spec="bsp:compression=int8", consistency="lossy", seconds=0.35),
        candidates=40,
        limit=0.65,
        one_machine=0.3,
    )
    cluster = uniform_cluster(4, "200mbit", "50us")
    text = paragraph(FOUND, "delayed", answer, cluster, "paceline-auto.json")
    for words in (
        "a step with bsp takes 1 s, of which 50 % wait",
        "200 Mbit/s",
        "40 candidates",
        "osp, predicted 700 ms, took 720 ms against 1 s with bsp: osp is clearly faster",
        "osp is used, with 720 ms a step",
        "consistency=lossy would allow bsp:compression=int8",
        "2.00 times as fast",
        "paceline-auto.json",
    ):
        assert words in text, text


def test_the_paragraph_where_nothing_could_be_predicted_or_gained():
    nothing = Found(before="bsp", chosen="bsp", usual=1.0, waited=0.01)
    assert "anything to gain" in paragraph(nothing, "exact")
    failed = paragraph(nothing, "exact", Answer(fault="it ended with status 1: why"))
    assert "status 1: why; bsp stays" in failed
    recalled = Found(chosen="osp", usual=0.7, recalled=True)
    assert "as decided before (f.json)" in paragraph(recalled, "delayed", file="f.json")


def test_the_paragraph_says_what_is_put_off():
    put_off = Found(
        before="bsp", chosen="bsp", usual=0.01, waited=0.5, later=[("osp", 0.008)]
    )
    text = paragraph(put_off, "delayed", Answer(candidates=3))
    assert "osp, predicted 8 ms, is tried when more steps have been done" in text
    assert "bsp stays until then" in text
