"""``paceline WORDS`` in this process, with forked variants where it compares."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from paceline.cli import main
from paceline.tools.compare import runner
from tests.support.forked import Forked


class Ended(NamedTuple):
    """A command's exit status, and what it has printed."""

    status: int
    out: str
    err: str


class Variant(Forked):
    """A variant's process, as `paceline.tools.compare` uses it."""

    def communicate(self) -> tuple[str, str]:
        self.wait()
        return self.stdout, self.stderr


def _forked_variant(words: list[str], *, env: dict[str, str], **_: Any) -> Variant:
    # Without the words that tie it to this process.
    return Variant(words[words.index("-m") :], environment=env)


def paceline_here(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *words: object,
) -> Ended:
    """Run the command to its end, in the working folder."""
    processes = SimpleNamespace(Popen=_forked_variant, PIPE=None)
    with monkeypatch.context() as patched, open(1, "w", closefd=False) as stdout:
        patched.setattr(runner, "subprocess", processes)
        patched.setattr(sys, "argv", ["paceline", *map(str, words)])
        # Not pytest's own, which a redirection of the file descriptor would miss.
        patched.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, *capfd.readouterr())
