"""Which words of a command are whose: the same for every verb that runs a script."""

import pytest

from paceline.cli.arguments import Arguments, Grammar, Option, split_arguments
from paceline.errors import UsageError

OWN = {
    "--workers": Option("workers", 1),
    "--steps": Option("steps", 1),
    "--json": Option("json", 0),
    "--measure": Option("measure", 0),
    "--no-measure": Option("measure", 0),
    "--method": Option("variant", 1, repeats=True),
}
TORCHRUN = {"--nnodes": Option("--nnodes", 1, repeats=True), "-m": Option("-m", 0)}
ELSEWHERE = {"--link": "simulate", "--workers": "simulate"}
GRAMMAR = Grammar("run", OWN, lambda: TORCHRUN, ELSEWHERE)


def split(text):
    return split_arguments(text.split(), GRAMMAR)


@pytest.mark.parametrize(
    ("text", "own", "torchrun", "arguments"),
    [
        ("t.py", "", "", ""),
        ("--workers 2 t.py", "--workers 2", "", ""),
        ("t.py --workers 2 --json", "--workers 2 --json", "", ""),
        ("--workers=2 t.py --json", "--workers=2 --json", "", ""),
        ("--nnodes 2 --workers 2 t.py", "--workers 2", "--nnodes 2", ""),
        ("t.py --nnodes=2", "", "--nnodes=2", ""),
        # as with torchrun
        ("--workers 2 t.py --epochs 3 a", "--workers 2", "", "--epochs 3 a"),
        ("t.py config.py --num-workers=4", "", "", "config.py --num-workers=4"),
        # after -- everything is the script's
        ("t.py --workers 2 -- --workers 3", "--workers 2", "", "--workers 3"),
        ("t.py -- --wrkers 3 -- x", "", "", "--wrkers 3 -- x"),
        ("--workers 2 t.py -- --link x", "--workers 2", "", "--link x"),
        ("--method a --method b t.py", "--method a --method b", "", ""),
        # a value may look like an option, or like a script
        ("--workers -1 t.py", "--workers -1", "", ""),
    ],
)
def test_arguments_are_split(text, own, torchrun, arguments):
    expected = Arguments(own.split(), torchrun.split(), "t.py", arguments.split())
    assert split(text) == expected


def test_without_a_script():
    assert split("--workers 2") == Arguments(["--workers", "2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pl.py --workers 4 --epochs 3",
            "'--epochs' is no option of paceline run. The script's own arguments stand "
            "after --, and paceline's options before the script:\n"
            "    paceline run pl.py -- --workers 4 --epochs 3",
        ),
        (
            "--workers 2 t.py --resume --ckpt r.pt --steps 120",
            "\n    paceline run --workers 2 t.py -- --resume --ckpt r.pt --steps 120",
        ),
        (
            "t.py --epochs 3 --nnodes 2",
            "\n    paceline run t.py -- --epochs 3 --nnodes 2",
        ),
        ("t.py --json a -- b", "\n    paceline run --json t.py -- a b"),
        ("t.py --wrkers=4 -- b", "\n    paceline run t.py --workers=4 -- b\nIf"),
        ("t.py --wrkers=4 -- b", "\n    paceline run t.py -- --wrkers=4 b"),
        (
            "t.py --wrkers 4 --epochs 3",
            "\n    paceline run t.py --workers 4 --epochs 3\nIf",
        ),
        ("t.py a.py --json", "'a.py' is no option of paceline run."),
        ("t.py workers --json", "'workers' is no option of paceline run."),
        ("t.py a -- b", "paceline run t.py -- a b"),
        (
            "t.py --wrkers 4",
            "unknown option '--wrkers' of paceline run; did you mean '--workers'?\n"
            "    paceline run t.py --workers 4\n",
        ),
        ("t.py --link 1gbit", "'--link' is no option of paceline run, but one of "),
        ("--wrkers 4 t.py", "unknown option '--wrkers' of paceline run; did you mean"),
        (
            "--link 1gbit t.py",
            "unknown option '--link' of paceline run; paceline simul",
        ),
        ("--this t.py", "neither paceline's nor torchrun's; a script's own options"),
        ("--workers 1 t.py --workers 2", "--workers is given twice: give it once; if"),
        ("--workers=1 --workers=1 t.py", "--workers is given twice: give it once"),
        ("--measure --no-measure t.py", "--no-measure is given twice, first as --meas"),
    ],
)
def test_what_could_be_either_is_not_guessed(text, message):
    with pytest.raises(UsageError) as error:
        split(text)
    assert message in str(error.value)


def test_what_is_misspelt_is_said_without_asking_torchrun():
    def never():
        raise AssertionError("torch was imported")

    with pytest.raises(UsageError, match="did you mean '--workers'"):
        split_arguments(["--wrkers", "2", "t.py"], Grammar("run", OWN, never))


def test_a_verb_that_passes_nothing_on():
    grammar = Grammar("serve", OWN, runs_script=False)
    with pytest.raises(
        UsageError, match=r"unknown option '--nnodes' of paceline serve$"
    ):
        split_arguments(["--nnodes", "2"], grammar)
