"""Whenever it is killed, a checkpoint is found: the one before, or the new one."""

import pytest

from paceline.core.checkpoint import folder as folders
from paceline.errors import UsageError
from tests.core.checkpoint.kill import killed_after


def write(folder, text):
    """As `save` does it, with one file and the index."""
    folders.recover(folder)
    partial = folders.partial(folder)
    partial.mkdir()
    (partial / "data").write_text(text)
    (partial / "index.pt.tmp").write_text(text)
    (partial / "index.pt.tmp").rename(partial / "index.pt")
    folders.replace(folder)


def read(folder):
    found = folders.find(folder)
    text = (found / "data").read_text()
    assert (found / "index.pt").read_text() == text
    return text


def test_a_second_kill_at_any_instant_destroys_nothing_either(tmp_path):
    """A save is killed, and the next one too, each after every number of steps; then one
    ends, and nothing is left beside it."""
    first, folder, tried = 0, tmp_path / "checkpoint", 0
    while True:
        second = 0
        while True:
            write(folder, "0")
            killed = killed_after(first, tmp_path, lambda: write(folder, "1"))
            between = read(folder)
            assert between in "01"
            again = killed_after(second, tmp_path, lambda: write(folder, "2"))
            assert read(folder) in (between, "2")
            assert again or read(folder) == "2"
            write(folder, "3")
            assert read(folder) == "3"
            assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
            tried += 1
            if not again:
                break
            second += 1
        if not killed:
            break
        first += 1
    assert tried > 50


def test_the_first_checkpoint_is_there_once_it_is_complete(tmp_path):
    steps, found = 0, []
    while True:
        folder = tmp_path / str(steps)
        killed = killed_after(steps, tmp_path, lambda f=folder: write(f, "x"))
        if any(place.exists() for place in tmp_path.glob(f"{steps}*/index.pt")):
            found.append(read(folder))
        else:
            with pytest.raises(UsageError, match="there is no checkpoint"):
                read(folder)
            found.append("")
        if not killed:
            break
        steps += 1
    assert found == sorted(found)
    assert found[0] == ""
    assert found[-1] == "x"


@pytest.mark.parametrize("what", ["file", "other folder"])
def test_what_is_no_checkpoint_is_not_replaced(what, tmp_path):
    folder = tmp_path / "results"
    if what == "file":
        folder.write_text("mine")
    else:
        folder.mkdir()
        (folder / "figures").write_text("mine")
    with pytest.raises(UsageError, match="results is no checkpoint"):
        folders.recover(folder)
    kept = folder if what == "file" else folder / "figures"
    assert kept.read_text() == "mine"


def test_an_empty_folder_may_become_one(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    write(folder, "x")
    assert read(folder) == "x"


def test_a_path_without_a_name_is_refused():
    with pytest.raises(UsageError, match="got '/'"):
        folders.as_folder("/")
    assert folders.as_folder(".").name
