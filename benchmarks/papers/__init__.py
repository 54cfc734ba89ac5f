"""What five papers and their baselines claim, and what paceline reaches: `make reproduce`.

- `results`: figures in files, the claims that they are held against, the page of both.
- `mg_wfbp`: MG-WFBP: buckets by a cost model.
- `osp`, `osp_comparisons`: OSP: synchronization in two stages; other readings of the paper.
- `ds_sync`, `ds_sync_accuracy`: DS-Sync: small groups that avoid the bottleneck.
- `rina`, `rina_picture`: Rina: a ring of racks whose switches add up.
- `gssp`, `gssp_accuracy`: GSSP: groups of similar speed, with gradient top-k.
- `baselines`: R2SP and bounded staleness.

Each paper's module has a `PAPER`. Commands are in `__main__`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks.papers.results import Paper, Results

NAMES = ("mg_wfbp", "osp", "ds_sync", "rina", "gssp", "baselines")


def load(name: str) -> Paper:
    """A paper by the name of its module."""
    paper: Paper = import_module(f"benchmarks.papers.{name}").PAPER
    return paper


def stored_rows(name: str, table: str) -> list[dict[str, Any]]:
    """The rows of a paper's table as they are stored; nothing is measured."""
    paper = load(name)
    return list(paper.tables[table](Results(paper.path, measures=False)))
