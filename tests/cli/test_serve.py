"""``paceline serve``: which token its server asks for, and what it says of it."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.serve import serve as serve_command
from paceline.errors import UsageError
from paceline.parameter_server.process import serve as servers
from paceline.parameter_server.process import snapshot
from paceline.parameter_server.process.host import ServiceEnded
from paceline.transport.protocol import ONLY_SERVICE, ServiceKey
from paceline.transport.security import SECRET, TOKEN, dedicated_token

LONG = "a secret of the job"


class Listener:
    """Listens nowhere; remembers what tokens were asked for."""

    port = 29600
    tokens: list[str]

    def __init__(self, *_: object, token: str, **__: object):
        self.tokens.append(token)

    def close(self) -> None:
        """There is nothing to close."""


class Host:
    """A host whose one training is over at once."""

    ends_well = True

    def __init__(self, listener: Listener):
        self.services: dict[ServiceKey, object] = {}

    def serve(self) -> Iterator[ServiceEnded]:
        yield ServiceEnded(ONLY_SERVICE, self.ends_well)

    def close(self) -> None:
        """There is nothing to close."""


def serve_once(*words):
    app(["serve", "--workers=1", "--port=0", "--once", *words], standalone_mode=False)


@pytest.fixture
def serve(monkeypatch, capsys):
    """Serves one training; returns the token, and what was printed."""
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(Listener, "tokens", [], raising=False)
    monkeypatch.setattr(servers, "ServerListener", Listener)
    monkeypatch.setattr(servers, "ServerHost", Host)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def once() -> tuple[str, str]:
        with pytest.raises(SystemExit, match="0"):
            serve_once()
        return Listener.tokens[-1], capsys.readouterr().out

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
    monkeypatch.setattr(Host, "ends_well", False)
    with pytest.raises(SystemExit, match="1"):
        serve_once()
    assert "a worker was lost" in capsys.readouterr().err


@pytest.mark.parametrize("name", [SECRET, TOKEN])
def test_what_all_know_already_is_not_printed(serve, monkeypatch, name):
    monkeypatch.setenv(name, LONG)
    token, out = serve()
    assert out == ""
    assert token == dedicated_token({name: LONG})


@pytest.mark.parametrize("bind", ["127.0.0.1:29600", "[::1]:29600", "[::1]"])
def test_an_address_with_a_port_is_refused(bind):
    ran = CliRunner().invoke(app, ["serve", "--workers", "2", "--bind", bind])
    assert isinstance(ran.exception, UsageError)
    assert f"--bind {bind}: expected an address alone" in str(ran.exception)
    assert "--port" in str(ran.exception)


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

    step = 0
    service_sessions = SimpleNamespace(
        all_have_departed=True, all_have_ended_well=False
    )
    server = SimpleNamespace(missing=lambda: [0])

    def __init__(self, *_: object, snapshot: Path, **__: object) -> None:
        self.path = snapshot

    def run(self, stop: int) -> Iterator[None]:
        return iter(())


@pytest.mark.parametrize("kept", [False, True])
def test_a_training_that_was_broken_off_is_no_good_end(
    serve, monkeypatch, capsys, tmp_path, kept
):
    path = tmp_path / "snapshot"
    if kept:
        path.touch()
    monkeypatch.setenv(TOKEN, LONG)
    monkeypatch.setattr(servers, "SurvivingJob", Job)
    with pytest.raises(SystemExit, match="1"):
        serve_once("--survive", f"--snapshot={path}")
    said = capsys.readouterr().err
    assert "workers 0 broke it off" in said
    assert ("start them again to go on" in said) is kept
    assert "the training is over" not in said


def test_snapshots_are_as_frequent_as_under_run():
    default = inspect.signature(serve_command).parameters["snapshot_seconds"].default
    assert default == snapshot.SECONDS
