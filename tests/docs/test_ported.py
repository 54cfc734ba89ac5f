"""Scripts moved from DDP to paceline: how many lines change, and that they print the same."""

import difflib
import re

import pytest

from tests.docs.test_examples import ROOT
from tests.support import forked, hanging

PORTED = ROOT / "examples" / "ported"
SOON = 60
"""Seconds after which a script of DDP's has another try."""
TRIES = 4
TIMES = re.compile(r"(time [\d.]+ms|Time [\d.]+ \([\d.]+\))")

# What each is started with, once after the other; and its losses of rank 0, how many they are.
RUNS = {
    "gpt": (["--max_iters=20"],),
    "multinode": (["2", "2"], ["4", "2"]),
    "resnet": (["--arch=resnet8", "--print-freq=1"],),
}
SIMULATED = ("gpt", "resnet")
LOSSES = {
    "gpt": (r"iter \d+: loss \d\.\d{8}", 21),
    "multinode": (r"\[0\] Epoch \d .* Loss: \d\.\d{9}", 2),
    "resnet": (r"\[0\] .*Loss \d+\.\d{6}.*", 16 + 2),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_diff_is_true_and_short(name):
    sides = [f"{name}_ddp.py", f"{name}.py"]
    texts = [(PORTED / side).read_text().splitlines(True) for side in sides]
    true = list(difflib.unified_diff(*texts, *sides))
    labels = " ".join(f"--label {side}" for side in sides)
    assert "".join(true) == (PORTED / f"{name}.diff").read_text(), (
        f"run, in examples/ported: diff -u {labels} {' '.join(sides)} > {name}.diff"
    )
    added, removed = ([line for line in true[2:] if line[0] == sign] for sign in "+-")
    assert 0 < max(len(added), len(removed)) <= 5
    assert "import paceline\n" not in texts[0]


def said(text):
    """What a rank printed, without how long things took."""
    return TIMES.sub("", text).splitlines()


def losses(name, lines):
    """What stands in them of rank 0's losses."""
    found = (re.search(LOSSES[name][0], line) for line in lines)
    return [match[0] for match in found if match]


def trained(name, suffix, folder, seconds=hanging.SECONDS):
    """What each of two processes printed, run after run in the same folder."""
    folder.mkdir()
    script = PORTED / f"{name}{suffix}.py"
    return [
        [
            said(rank.stdout)
            for rank in forked.run_together(
                2, [script, *words], folder=folder, seconds=seconds
            )
        ]
        for words in RUNS[name]
    ]


def trained_by_ddp(name, folder):
    """The same of DDP's script, which is run again if it does not end: at times torch waits for
    itself when a model under DDP is let go of (pytorch#56297)."""
    for tried in range(TRIES):
        try:
            return trained(name, "_ddp", folder / f"ddp {tried}", SOON)
        except AssertionError as error:
            if "still runs" not in str(error) or tried == TRIES - 1:
                raise
    raise AssertionError("no try")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_moved_prints_what_ddp_prints(name, tmp_path):
    theirs = trained_by_ddp(name, tmp_path)
    ours = trained(name, "", tmp_path / "paceline")
    assert ours == theirs
    expected = losses(name, theirs[-1][0])
    assert len(expected) == LOSSES[name][1]
    if name in SIMULATED:
        assert losses(name, said(simulated(name, tmp_path))) == expected


def simulated(name, folder):
    """What the moved script prints in virtual time."""
    (words,) = RUNS[name]
    command = ["-m", "paceline", "simulate", "--workers=2", "--link=100mbit"]
    script = [PORTED / f"{name}.py", "--", *words]
    done = forked.run([*command, "--forward=0.01", *script], folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
