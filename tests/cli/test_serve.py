"""``paceline serve``: which token its server asks for, and what it says of it."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch

from paceline.cli import app
from paceline.cli.serve import serve as serve_command
from paceline.errors import UsageError
from paceline.parameter_server.process import dedicated_server, host, snapshot
from paceline.transport.listener import Listener
from paceline.transport.security import SECRET, TOKEN, dedicated_token

LONG = "a secret of the job"


class Shell:
    """A server whose training is over at once; remembers what tokens were asked for."""

    port = 29600
    tokens: list[str]

    def __init__(self, workers: int, listener: Listener, token: str):
        self.tokens.append(token)

    all_have_ended_well = True

    def run(self, stop: int | None, lasts: bool) -> None:
        """There is nobody to serve."""

    def close(self) -> None:
        """There is nothing to close."""


def serve_once(*words):
    app(["serve", "--workers=1", "--port=0", "--once", *words], standalone_mode=False)


@pytest.fixture
def serve(monkeypatch, capsys):
    """Serves one training; returns the token, and what was printed."""
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(Shell, "tokens", [], raising=False)
    monkeypatch.setattr(dedicated_server, "make_shell", Shell)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def once() -> tuple[str, str]:
        with pytest.raises(SystemExit, match="0"):
            serve_once()
        return Shell.tokens[-1], capsys.readouterr().out

    return once


def test_without_a_secret_it_makes_a_token_and_prints_the_line_that_exports_it(serve):
    first, out = serve()
    assert out == f"export {TOKEN}={first}\n"
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert dedicated_token({TOKEN: first}) == first  # what workers make of that line
    second, _ = serve()
    assert first != second


def test_a_training_that_was_lost_is_said_and_ends_what_serves_once(
    serve, monkeypatch, capsys
):
    monkeypatch.setattr(Shell, "all_have_ended_well", False)
    with pytest.raises(SystemExit, match="1"):
        serve_once()
    assert "a worker was lost" in capsys.readouterr().err


@pytest.mark.parametrize("name", [SECRET, TOKEN])
def test_what_all_know_already_is_not_printed(serve, monkeypatch, name):
    monkeypatch.setenv(name, LONG)
    token, out = serve()
    assert out == ""
    assert token == dedicated_token({name: LONG})


def test_a_short_token_is_refused(serve, monkeypatch):
    monkeypatch.setenv(TOKEN, "dedicated")
    with pytest.raises(UsageError, match="at least 16 characters"):
        serve()


def test_variables_that_are_set_for_all_servers_of_a_machine_are_no_error(
    serve, monkeypatch
):
    monkeypatch.setenv("PACELINE_SILENT_SECONDS", "5")
    monkeypatch.setenv("PACELINE_SNAPSHOT_SECONDS", "5")
    serve()


class Job:
    """A job that survives, whose only worker said goodbye in the middle of its training."""

    port, step = 29600, 0
    shell = SimpleNamespace(all_have_departed=True)
    machine = SimpleNamespace(missing=lambda: [0])

    def __init__(self, *_: object, **__: object) -> None:
        """It listens nowhere."""

    def run(self, stop: int) -> bool:
        return False

    def figures(self) -> None:
        """Nobody asks."""

    def close(self) -> None:
        """There is nothing to close."""


@pytest.mark.parametrize("kept", [False, True])
def test_a_training_that_was_broken_off_is_no_good_end(
    serve, monkeypatch, capsys, tmp_path, kept
):
    path = tmp_path / "snapshot"
    if kept:
        path.touch()
    monkeypatch.setenv(TOKEN, LONG)
    monkeypatch.setattr(host, "SurvivingJob", Job)
    with pytest.raises(SystemExit, match="1"):
        serve_once("--survive", f"--snapshot={path}")
    said = capsys.readouterr().err
    assert "workers 0 broke it off" in said
    assert ("start them again to go on" in said) is kept
    assert "the training is over" not in said


def test_snapshots_are_as_frequent_as_under_run():
    default = inspect.signature(serve_command).parameters["snapshot_seconds"].default
    assert default == snapshot.SECONDS
