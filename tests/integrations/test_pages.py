"""The scripts of the pages on Lightning, Fabric, transformers and Accelerate train as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT
from tests.docs.test_snippets import blocks
from tests.integrations.test_trainers import LAUNCHED, needs
from tests.support import forked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("page", "number", "package"),
    [
        ("lightning", 0, "lightning"),
        ("lightning", 1, "lightning"),
        ("transformers", 0, "transformers"),
        ("accelerate", 0, "accelerate"),
    ],
)
def test_the_script_of_a_page_trains(
    page: str, number: int, package: str, tmp_path: Path, monkeypatch
) -> None:
    """By two processes."""
    needs(package)
    script = tmp_path / "train.py"
    script.write_text(blocks(ROOT / "docs" / "how-to" / f"{page}.md", "python")[number])
    monkeypatch.chdir(tmp_path)
    for end in forked.run_together(2, [script], environment=LAUNCHED):
        assert end.returncode == 0, end.stderr[-3000:]
