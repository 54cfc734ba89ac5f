"""Whoever comes next touches one file and one row, and passes the whole kit."""

import ast
import inspect
from pathlib import Path

import pytest

from paceline.cluster import uniform_cluster
from paceline.compression import COMPRESSORS, GradientCompression
from paceline.runtimes.simulated import Simulation
from paceline.testing import CHECKS, check_compressor
from paceline.testing.method_checks import trials
from tests.conformance.plugins.rows import TOYS, registered
from tests.conformance.plugins.table import chosen
from tests.packaging.test_structure import (
    FORBIDDEN_TO_METHODS,
    METHODS_MAY_IMPORT,
    PARTS,
)
from tests.support import forked
from tests.support.tables import crossed

FILES = sorted((Path(__file__).parent / "toys").glob("[!_]*.py"))
MOST_LINES = 75
MAY_IMPORT = METHODS_MAY_IMPORT | {"compression", "collectives"}


def names_of(path):
    """Everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_toy_is_one_short_file_that_touches_nothing_else(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines"
    names = set(names_of(path))
    assert FORBIDDEN_TO_METHODS.isdisjoint(names)
    parts = {name.split(".")[1] for name in names if name.startswith("paceline.")}
    assert parts & PARTS <= MAY_IMPORT
    assert not [name for name in names if name.split(".")[0] in ("tests", "")]


def test_every_toy_has_one_row():
    assert sorted(Path(inspect.getfile(toy.what)) for toy in TOYS) == FILES


@pytest.mark.parametrize(
    "toy", [t for t in TOYS if t.registry is COMPRESSORS], ids=lambda toy: toy.name
)
def test_the_laws_of_compressors(toy):
    check_compressor(toy.what())
    check_compressor(GradientCompression(toy.what(), error_feedback=True))


@pytest.mark.parametrize(
    ("toy", "workers"),
    crossed(3, TOYS, [1, 2, 3]),
    ids=lambda value: getattr(value, "name", None),
)
def test_a_sample_of_the_kit_in_virtual_time(toy, workers):
    with registered():
        for trial in chosen(workers, every=19):
            if trial.case is toy.case:
                simulation = Simulation(uniform_cluster(workers, "1gbit", "50us"))
                simulation.run(lambda rank, trial=trial: trial.run())


@pytest.mark.slow
@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_each_law_of_the_kit_in_virtual_time(toy):
    with registered():
        trials_of = {law: [] for law in CHECKS}
        for workers in (1, 2, 3):
            for trial in trials(workers, [toy.case]):
                trials_of[trial.check.name].append((workers, trial))
        for number, tried in enumerate(filter(None, trials_of.values())):
            workers, trial = tried[number % len(tried)]
            simulation = Simulation(uniform_cluster(workers, "1gbit", "50us"))
            simulation.run(lambda rank, trial=trial: trial.run())


@pytest.mark.slow
def test_a_sample_of_the_kit_on_real_processes():
    """All toys in one job."""
    first, *_ = forked.run_together(3, ["-m", "tests.conformance.plugins.table", 12])
    names = {f"{trial.name}: ok" for trial in chosen(3, 12)}
    assert names <= set(first.stderr.splitlines())
