"""Every example, against the output that stands beside it."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import paceline_here

ROOT = Path(__file__).parent.parent.parent
EXPECTED = sorted((ROOT / "examples" / "expected").glob("*.txt"))
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")

# Trained values differ between processors: rounding grows over hundreds of steps.
RELATIVE = 0.15


LONG = ("bytes_lm", "digits", "layers", "workload")


@pytest.mark.parametrize(
    "expected",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LONG))
        for path in EXPECTED
    ],
)
def test_example_prints_what_it_says(expected, tmp_path, monkeypatch, capfd):
    command, _, text = expected.read_text().partition("\n")
    words = [w.replace("examples/", f"{ROOT}/examples/") for w in shlex.split(command)]
    assert words[:2] == ["$", "paceline"]
    monkeypatch.chdir(tmp_path)
    done = paceline_here(monkeypatch, capfd, *words[2:])
    assert done.status == 0, done.err
    printed = done.out.replace(f"{ROOT}/examples/", "examples/")
    assert shape(printed) == shape(text)
    for ours, theirs in zip(numbers(printed), numbers(text), strict=True):
        assert ours == pytest.approx(theirs, rel=RELATIVE)


def test_every_example_has_its_output():
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert examples == {path.stem for path in EXPECTED}


def test_digits_reaches_its_accuracy():
    text = (ROOT / "examples" / "expected" / "digits.txt").read_text()
    accuracies = re.findall(r"test accuracy (\d\.\d+)", text)
    assert float(accuracies[-1]) >= 0.95


def shape(text):
    """The text without its numbers and without table padding, which follows them."""
    return re.sub(r"[\s━─]+", " ", NUMBER.sub("#", text))


def numbers(text):
    return [float(number) for number in NUMBER.findall(text)]
