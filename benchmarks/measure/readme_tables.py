"""Two tables of the README whose figures are stored ones: the systems, and how far to trust paceline.

`page_tables` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.measure import (
    agreement,
    ddp_over_emulated_links,
    ddp_over_loopback,
    stored,
    virtual_scale,
)
from benchmarks.papers import load, stored_rows
from benchmarks.papers.results import Results, formatted

PAPERS = "docs/explanation/papers"


def claims(name: str) -> list[float]:
    """Our figures for the claims of a paper, in the order of its page."""
    paper = load(name)
    results = Results(paper.path, measures=False)
    found = (claim.ours(results) for claim in paper.claims)
    return [one[0] if isinstance(one, tuple) else one for one in found]


def times(value: float, digits: int = 2) -> str:
    return f"{formatted(value, f'.{digits}f')}x"


# ---- systems implemented ----


def mg_wfbp() -> str:
    over_wfbp, over_one, exact = claims("mg_wfbp")
    return (
        f"steps per second on GoogLeNet's trace with 64 workers: {times(over_wfbp)} those of WFBP and "
        f"{times(over_one)} those of one bucket; with the exact planner {times(exact)} those of WFBP"
    )


def osp() -> str:
    _, native, _ = claims("osp")
    return (
        f"after 500 steps {times(native)} the steps per second of `bsp`, if an all-reduce takes as long "
        "as computing; no measurable loss of accuracy"
    )


def ds_sync() -> str:
    rows = [
        row for row in stored_rows("ds_sync", "gains-8") if row["network"][0] == "2"
    ]
    gains = [row["bsp, ring"] for row in rows]
    return (
        f"96 % accuracy on digits {times(min(gains), 1)} to {times(max(gains), 1)} sooner than with ring "
        "all-reduce, in two racks with thin uplinks"
    )


def rina() -> str:
    """The claims over one server: by core, small cluster and large one in turn."""
    thin, thin_large, full, full_large, *_ = claims("rina")
    return (
        f"with some switches upgraded, at least {times(min(thin, thin_large), 1)} the throughput of ATP "
        f"with one server on an oversubscribed core, and at least {times(min(full, full_large), 1)} on a "
        "non-blocking core"
    )


def gssp() -> str:
    speeds = claims("gssp")[:3]
    coded = {row["method"]: row for row in stored_rows("gssp", "coded")}
    mine = coded["gssp, gd-top-k, differences"]
    over_ssp, _ = mine["times as fast as ssp"]
    over_coded = coded["ssp, gd-top-k"]["s to 96"] / mine["s to 96"]
    return (
        f"if communication takes no time, {times(min(speeds))} to {times(max(speeds))} the steps per second "
        f"of SSP; at 100 Mbit/s 96 % accuracy on digits {times(over_ssp)} sooner than SSP, and "
        f"{times(over_coded, 1)} sooner than SSP with GDTopK"
    )


SYSTEMS = (
    (
        f"[MG-WFBP]({PAPERS}/mg-wfbp.md)",
        "`--method bsp:buckets=mg-wfbp`; exact planner: `bsp:buckets=optimal`",
        mg_wfbp,
    ),
    (
        f"[OSP with local-gradient correction]({PAPERS}/osp.md)",
        "`--method osp:collective=native`; over a server: `osp`",
        osp,
    ),
    (f"[DS-Sync]({PAPERS}/ds-sync.md)", "`--method ds-sync`", ds_sync),
    (
        f"[Rina]({PAPERS}/rina.md)",
        "`--method bsp:collective=rina`, `paceline aggregate`",
        rina,
    ),
    (
        f"[GSSP with GDTopK]({PAPERS}/gssp.md)",
        "`--method gssp:compression=gd-top-k,replies=deltas`",
        gssp,
    ),
)
"""Paper, use, and what is measured here."""


def systems() -> Iterator[list[str]]:
    for paper, use, measured in SYSTEMS:
        yield [paper, use, measured()]


# ---- how far to trust it ----

SHOWN_LINKS = (200, 400, 1000)


def listed(texts: Iterable[object]) -> str:
    """As words: "1, 2 and 3"."""
    *first, last = map(str, texts)
    return f"{', '.join(first)} and {last}"


def predictions() -> list[str]:
    rows = [row for group in agreement.stored().values() for row in group]
    within, _ = agreement.within_bounds(rows)
    median = agreement.median_error(rows).removesuffix("%")
    return [
        f"{len(rows)} predicted step times, compared with real processes on emulated links",
        f"{within} are off by at most 10 %; the median is off by {median} %",
        "`python -m benchmarks.measure.agreement` "
        "([all groups](docs/explanation/how-prediction-works.md))",
    ]


def steps_beside_ddp() -> list[str]:
    benchmark = ddp_over_emulated_links
    figures = stored.Figures(benchmark.benchmark(compression=False))
    over_limit = (
        figures.text(benchmark.row_name("paceline bsp", "bound_ratio", mbit))
        for mbit in SHOWN_LINKS
    )
    table = {name: cells for name, *cells in benchmark.exact_table()}
    over_best = dict(
        zip(benchmark.LINKS, table["bsp / DDP, best of five bucket caps"], strict=True)
    )
    return [
        f"step of `bsp` on 8 hosts at {listed(SHOWN_LINKS)} Mbit/s",
        f"{listed(over_limit)} times the physical limit; "
        f"{listed(over_best[mbit] for mbit in SHOWN_LINKS)} times DDP's step with the best of five "
        "bucket sizes",
        "`python -m benchmarks.measure.ddp_over_emulated_links`",
    ]


def steps_over_loopback() -> list[str]:
    figures = stored.Figures("ddp_over_loopback")
    return [
        "step of 2 processes over loopback as a multiple of DDP's (8 MB of gradients, no computing), median",
        figures.text(f"layers, {ddp_over_loopback.DEFAULTS}, ratio"),
        "`python -m benchmarks.measure.ddp_over_loopback`",
    ]


def scale() -> list[str]:
    figures = stored.Figures("virtual_scale")

    def took(workers: int, representatives: bool) -> str:
        title = virtual_scale.row_name(workers, 3, representatives)
        seconds = figures.text(f"{title}, seconds", ".2g")
        memory = figures.text(f"{title}, memory", ".2g")
        return f"{seconds} s, {memory} GB"

    return [
        "simulation of 3 steps",
        f"2,048 workers: {took(2048, False)} of memory; 10,000 workers with `--representatives`: "
        f"{took(10_000, True)}",
        "`python -m benchmarks.measure.virtual_scale`",
    ]


def trust() -> list[list[str]]:
    return [predictions(), steps_beside_ddp(), steps_over_loopback(), scale()]
