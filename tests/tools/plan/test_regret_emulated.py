"""Results of emulated regret, class by class."""

import importlib
import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_one_class_is_added_to_what_a_cell_has_or_has_not(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("regret_emulated")
    results = tmp_path / "results.json"
    monkeypatch.setattr(benchmark, "RESULTS", results)

    def run(name, classes):
        (consistency,) = classes
        regret = {"chosen": "a", "best": "a", "regret": 1.0, "predicted": 1.0}
        return {"measured": {consistency: [1.0]}, "regrets": {consistency: regret}}

    monkeypatch.setattr(benchmark, "run", run)
    for consistency in ("delayed", "exact"):
        words = [
            "regret_emulated.py",
            "--cell",
            "100mbit",
            "--consistency",
            consistency,
        ]
        monkeypatch.setattr(sys, "argv", words)
        benchmark.main()
    (cell,) = json.loads(results.read_text()).values()
    assert set(cell["regrets"]) == set(cell["measured"]) == {"delayed", "exact"}
