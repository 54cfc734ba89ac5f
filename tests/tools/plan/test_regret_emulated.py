"""Results of emulated regret, class by class."""

import json
import sys

from benchmarks.measure import regret_emulated as benchmark


def test_one_class_is_added_to_what_a_cell_has_or_has_not(monkeypatch, tmp_path):
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
