"""What --help says, that it fits a terminal, and that it says so at once."""

import inspect
import itertools

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli import app
from tests.packaging.test_import import loaded

VERBS = get_command(app).commands


def help_of(*words, columns):
    return CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": columns}).output


HELP = {verb: help_of(verb, columns="250") for verb in VERBS}
PANELS = {
    "Choose a method": ["plan", "compare", "doctor"],
    "Train": ["run", "simulate", "emulate"],
    "Measure": ["probe", "profile", "check"],
    "Servers": ["serve", "aggregate", "plan-switches"],
    "Reference": ["list"],
}


def line_of(verb, option):
    lines = HELP[verb].splitlines()
    (line,) = (line for line in lines if line.strip("│* ").startswith(f"{option} "))
    return line


def test_verbs_stand_in_groups():
    lines = help_of(columns="80").splitlines()
    found = {}
    for line in lines:
        words = line.strip("│╭╮─ ").split()
        if line.startswith("╭"):
            found[" ".join(words)] = verbs = []
        elif words and words[0] in VERBS:
            verbs.append(words[0])
    assert {name: verbs for name, verbs in found.items() if verbs} == PANELS
    assert [name for name in found if name in PANELS] == list(PANELS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_terminal_of_80_columns_breaks_no_paragraph(verb):
    lines = help_of(verb, columns="80").splitlines()
    assert max(map(len, lines)) <= 80
    above = [
        line.strip() for line in itertools.takewhile(lambda x: x[:1] != "╭", lines)
    ]
    docstring = inspect.cleandoc(VERBS[verb].callback.__doc__).split("\n\n")
    for paragraph in docstring:
        words = paragraph.split()
        first = above.index(
            next(x for x in above if x and words[: len(x.split())] == x.split())
        )
        shown = list(itertools.takewhile(bool, above[first:]))
        assert " ".join(shown).split() == words
        for line, following in itertools.pairwise(shown):
            assert len(line) + 1 + len(following.split()[0]) > 78, line


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("paceline plan-s", "plan-switches"),
        ("paceline simulate --wo", "--workload"),
        ("paceline simulate train.py --workers 2 --late", "--latency"),
        ("paceline list c", "compressors"),
    ],
)
def test_a_shell_completes(typed, offered):
    environment = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = CliRunner().invoke(app, [], env=environment, prog_name="paceline")
    assert offered in done.output.split()


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_what_holds_without_it(verb):
    for parameter in VERBS[verb].params:
        if parameter.param_type_name == "option" and not (
            parameter.required or parameter.hidden
        ):
            is_switch = parameter.is_flag and not parameter.secondary_opts
            if not is_switch and parameter.name not in ("help",):
                assert "[default: " in line_of(verb, parameter.opts[0])


@pytest.mark.parametrize(
    ("verb", "option", "said"),
    [
        ("simulate", "--workers", "[default: 4]"),
        ("simulate", "--link", "[default: 1gbit]"),
        ("simulate", "--latency", "[default: 50us]"),
        (
            "run",
            "--workers",
            "[default: 2; with torchrun's options, what they say or 1]",
        ),
        ("plan", "--workers", "[default: 4]"),
        ("emulate", "--workers", "[default: 4]"),
        (
            "doctor",
            "--workers",
            "[default: 4; in the real runtime 2, or what torchrun's",
        ),
        (
            "probe",
            "--workers",
            "[default: 4; in the real runtime 2, or what torchrun's",
        ),
        ("profile", "--workers", "[default: 1]"),
        ("run", "--steps", "code after the training loop does not run"),
        (
            "compare",
            "--workers",
            "[default: 4; in the real runtime 2, or what torchrun's",
        ),
        ("profile", "--steps", "[default: 20]"),
    ],
)
def test_defaults_are_named(verb, option, said):
    assert said in line_of(verb, option)


def test_words_are_read_before_torch_is_imported():
    asked = loaded(
        "import contextlib, io, sys\n"
        "from paceline.cli import main\n"
        "for words in (['--help'], ['run', '--help'], ['emulate', '--help'],\n"
        "        ['run', '--wrkers', '2', 'x.py'], ['simulate', 'nothing.py'],\n"
        "        ['simulate', __import__('os').__file__, '--workers', '0']):\n"
        "    sys.argv = ['paceline', *words]\n"
        "    with contextlib.suppress(SystemExit), \\\n"
        "            contextlib.redirect_stdout(io.StringIO()):\n"
        "        main()\n"
        "assert 'typer' in sys.modules"
    )
    assert not {"torch", "numpy", "zmq", "pyroute2", "matplotlib"} & set(asked.split())
