"""What is cleared away before new results are written: what paceline made, and no more."""

from __future__ import annotations

from pathlib import Path

from paceline.report.files import claim, clear


def test_what_was_claimed_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    theirs = tmp_path / "1-bsp"
    theirs.mkdir()
    claim(str(tmp_path), "index.html", "1-bsp", "2-asp", "never-made.svg")
    claim(str(tmp_path), "index.html", "records.jsonl")
    for name in ("index.html", "records.jsonl", "notes.txt", "1-bsp/notes.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "2-asp").mkdir()
    (tmp_path / "2-asp" / "worker-0.json").write_text("left by a killed run")
    clear(str(tmp_path))
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert left == ["1-bsp", "1-bsp/notes.txt", "notes.txt"]
    clear(str(tmp_path))
    assert theirs.is_dir()


def test_nothing_outside_the_folder_is_ever_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    outside = tmp_path / "outside.txt"
    outside.write_text("precious")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("precious")
    (folder / "link").symlink_to(tmp_path / "kept")
    listed = f"../outside.txt\n{outside}\n..\n.\nlink\n\n"
    (folder / ".paceline-files").write_text(listed)
    clear(str(folder))
    assert outside.read_text() == "precious"
    assert (tmp_path / "kept" / "file").exists()
    assert list(folder.iterdir()) == []
