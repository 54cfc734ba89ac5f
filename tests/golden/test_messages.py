"""Every error message stands in one file, where it is read as text."""

import difflib
from pathlib import Path

import pytest

from tests.golden.messages import FILE, Messages, messages

MODULE = """
class PacelineError(Exception): ...
class OwnError(PacelineError): ...

WORDS = "a constant"

def refuse(key, words):
    raise OwnError(words)

def told(count):
    if count:
        return f"{count} are too many"
    return "none is too few"

def use(value):
    why = f"{value} is odd" if value % 2 else "it is even"
    refuse("key", "given to a function")
    raise OwnError(WORDS)
    raise OwnError(told(value))
    raise OwnError(why)
    raise OwnError("two " + f"parts, {value:g}")
    raise LookupError("not of paceline")
"""


def test_messages_are_found_where_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    assert Messages(tmp_path).all() == [
        "OwnError: a constant",
        "OwnError: given to a function",
        "OwnError: it is even",
        "OwnError: none is too few",
        "OwnError: two parts, {value}",
        "OwnError: {count} are too many",
        "OwnError: {value} is odd",
    ]


@pytest.mark.slow
def test_all_messages_are_written_down() -> None:
    written, found = FILE.read_text().splitlines(), messages()
    changes = difflib.unified_diff(written, found, "messages.txt", "source", n=0)
    assert written == found, "\n".join(
        [*changes, "Read them, then: python -m tests.golden.messages"]
    )
