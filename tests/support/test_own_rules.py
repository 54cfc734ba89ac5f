"""Rules of the tests themselves: no clock in a property test, no skip without a
reason, no text that changes with a move or with a sentence."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.skips import is_allowed

TESTS = Path(__file__).parent.parent


def test_profiles_alone_set_deadlines_and_seeds():
    words = re.compile(r"\b(deadline|suppress_health_check|derandomize)=|examples=\d")
    found = [
        str(path.relative_to(TESTS))
        for path in sorted(TESTS.rglob("*.py"))
        if "hypothesis" in (text := path.read_text()) and words.search(text)
    ]
    assert found == ["support/profiles.py"]


def test_no_dotted_text_is_patched():
    """A move would break it; an imported module, a class or `timeouts` says so at once."""
    dotted = re.compile(r"(setattr|patch)\(\s*[\"']paceline\.")
    found = [path for path in TESTS.rglob("*.py") if dotted.search(path.read_text())]
    assert not found


def test_errors_are_known_by_key_and_value_and_not_by_their_sentences():
    """Sentences are in golden/messages.txt. A pattern has four plain words in a row at most."""
    found = [
        f"{path.relative_to(TESTS)}: {word.value.value}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "match" and isinstance(word.value, ast.Constant)
        if re.search(r"(?<![\w.'])([A-Za-z]+[,;:]? ){4}[A-Za-z]+\b", word.value.value)
    ]
    assert not found


SUITE = """
import pytest
from hypothesis import given, strategies as st
from tests.conftest import pytest_runtest_makereport

drawn = []

@given(st.integers())
def test_draws(number):
    drawn.append(number)

def test_shows():
    print("DRAWN", sorted(drawn))

def test_skips():
    pytest.skip("{reason}")
"""


def run_suite(folder):
    """A run of two files, of which one skips a test for no good reason."""
    folder.mkdir()
    (folder / "conftest.py").write_text(
        "from tests.support import profiles\nprofiles.load()\n"
    )
    for name, reason in ("lazy", "no time today"), ("lacking", "needs a CUDA device"):
        (folder / f"test_{name}.py").write_text(SUITE.format(reason=reason))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.conftest", folder],
        env={
            "PATH": "",
            "HYPOTHESIS_PROFILE": "fast",
            "PYTHONPATH": str(TESTS.parent),
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout
    return done.stdout


def test_only_an_allowed_reason_skips_a_test_and_fast_runs_draw_the_same(tmp_path):
    one, two = (run_suite(tmp_path / name) for name in ("one", "two"))
    assert "1 failed, 4 passed, 1 skipped" in one
    assert "no time today" in one
    drawn = re.findall("DRAWN .*", one)
    assert drawn == re.findall("DRAWN .*", two)
    assert [5 < len(line.split(",")) <= 25 for line in drawn] == [True] * 2


@pytest.mark.parametrize("needed", ["", "namespaces", "trainers site"])
def test_what_a_run_needs_may_not_be_missing(needed):
    assert is_allowed("needs a CUDA device", needed)
    assert is_allowed("namespaces need root", needed) is (needed != "namespaces")
    assert is_allowed("lightning is not installed", needed) is (
        "trainers" not in needed
    )
