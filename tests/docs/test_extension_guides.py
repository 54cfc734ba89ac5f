"""The compressor and the collective that docs/how-to show hold their laws, as the pages say."""

import importlib
import re
import sys

import pytest
import torch

from paceline.cluster import uniform_cluster
from paceline.collectives.registry import COLLECTIVES
from paceline.collectives.timing import seconds
from paceline.compression import COMPRESSORS, Gather, RankInfo
from paceline.testing import check_collective
from tests.docs.test_examples import ROOT


def python_of(page):
    text = (ROOT / "docs" / "how-to" / f"write-a-{page}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """Imports the file that a page shows, and leaves no row of it in a registry."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    imported = []

    def follow(page, name):
        (tmp_path / f"{name}.py").write_text(python_of(page)[0])
        imported.append(name)
        return importlib.import_module(name)

    yield follow
    for name in imported:
        COMPRESSORS.pop(name, None)
        COLLECTIVES.pop(name, None)
        del sys.modules[name]


def test_the_compressor_of_the_page_has_the_size_that_it_says(followed):
    compressor = followed("compressor", "ternary").Ternary()
    assert COMPRESSORS["ternary"] is type(compressor)
    gradient = torch.tensor([[3.0, -3.0, 0.1], [0.0, 2.0, -1.0]])
    code = compressor.encode([gradient], [{}])
    assert code.numel() == compressor.code_bytes([gradient.shape], gradient.dtype) == 10
    result = torch.empty_like(gradient)
    compressor.decode(code, [result])
    scale = gradient.abs().mean()
    expected = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]) * scale
    torch.testing.assert_close(result, expected)
    asked = next(compressor.average([gradient], [{}], RankInfo(0, 2)))
    assert isinstance(asked, Gather)


def test_the_collective_of_the_page_holds_laws_of_schedules(followed):
    line = followed("collective", "line").Line
    assert COLLECTIVES["line"] is line
    laws = ["schedules_are_equal_on_all_ranks", "sums_and_maxima_are_exact"]
    check_collective(line, racks=[(3,)], laws=laws)


def test_the_seconds_of_a_schedule(followed):
    names = {}
    exec(python_of("collective")[2], names)
    cluster = uniform_cluster(4, "100mbit", "50us")
    ring = names["Ring"](4, 1_000_000)
    # 2 (n - 1) messages of a quarter each.
    assert seconds(ring, cluster) == pytest.approx(6 * (50e-6 + 250_000 / 12.5e6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name"), [("compressor", "ternary"), ("collective", "line")]
)
def test_all_laws_as_the_page_checks_them(followed, page, name):
    followed(page, name)
    exec(python_of(page)[1], {})
