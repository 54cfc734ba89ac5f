"""What --help says, and that it says so at once."""

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli import app
from tests.packaging.test_import import loaded

VERBS = get_command(app).commands
HELP = {
    verb: CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "250"}).output
    for verb in VERBS
}


def line_of(verb, option):
    (line,) = (line for line in HELP[verb].splitlines() if f" {option} " in line[:40])
    return line


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_what_holds_without_it(verb):
    for parameter in VERBS[verb].params:
        if parameter.param_type_name == "option" and not parameter.required:
            is_switch = parameter.is_flag and not parameter.secondary_opts
            if not is_switch and parameter.name not in ("variant", "help"):
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
            "[default: 2; with options of torchrun's what these say, or 1]",
        ),
        ("plan", "--workers", "[default: 4]"),
        ("emulate", "--workers", "[default: 4]"),
        (
            "doctor",
            "--workers",
            "[default: 4; in the real runtime 2, or what options of",
        ),
        (
            "probe",
            "--workers",
            "[default: 4; in the real runtime 2, or what options of",
        ),
        ("profile", "--workers", "[default: 1, which nobody disturbs]"),
        ("run", "--steps", "what stands after its training loop is not run"),
        (
            "compare",
            "--workers",
            "[default: 4; in the real runtime 2, or what options of",
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
