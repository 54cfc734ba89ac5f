"""The answer of a plan: the recommended method, weaker consistencies that are worth it, and one machine."""

import pytest

from paceline.cluster import Cluster, Rack
from paceline.tools.plan.estimates import DDP
from paceline.tools.plan.recommendation import (
    faster_but_not_recommended,
    headline,
    times,
)
from paceline.tools.plan.report import best_of_each_class, commands
from paceline.tools.plan.what_if import BreakEven, Suggestions
from tests.tools.plan.helpers import (
    NOTHING,
    cluster,
    helped,
    made,
    report,
    section,
    sped,
)


def test_the_answer_names_ddp_the_best_method_and_faster_classes():
    lines = headline(
        made(
            sped("diloco", "local", 0.09),
            sped("bsp:compression=int8", "lossy", 0.095),
            sped("dear", seconds=0.18),
            sped(DDP, seconds=0.27),
        )
    )
    assert len(lines) == 3
    assert "4 workers with DDP train 1.33x" in lines[0]
    assert "270 ms" in lines[0]
    assert "180 ms" in lines[0]  # exposed
    assert lines[1].endswith("dear, 180 ms (1.50x DDP).")
    assert lines[2].endswith("bsp:compression=int8, 95 ms (2.84x DDP).")
    # diloco is of a weaker class, and hardly faster
    assert "diloco" not in " ".join(lines)


def test_the_answer_has_at_most_five_lines():
    classes = ("exact", "delayed", "lossy", "local", "asynchronous")
    rows = [sped(name, name, 0.2 / (place + 1)) for place, name in enumerate(classes)]
    lines = headline(made(*rows, sped(DDP, seconds=0.3)))
    assert len(lines) == 5
    assert "asynchronous, 40 ms" in lines[-1]


@pytest.mark.parametrize(
    ("fastest", "said"), [("dear", "1 % faster"), (DDP, "no exact method is faster")]
)
def test_a_method_that_is_hardly_faster_than_ddp_is_no_reason_to_change(fastest, said):
    rows = [
        sped(DDP, seconds=0.18),
        sped("osp", "delayed", 0.179),
        sped("bsp:compression=int8", "lossy", 0.09),
    ]
    if fastest != DDP:
        rows.append(sped(fastest, seconds=0.178))
    plan = made(*rows)
    lines = headline(plan)
    assert lines[1].startswith("Stay with DDP")
    assert said in lines[1]
    assert "osp" not in " ".join(lines)
    assert commands(plan, "x.py") == {
        "exact": "paceline run x.py --method bsp:buckets=ddp",
        "lossy": "paceline run x.py --method bsp:compression=int8",
    }
    shown = [one.spec for _, _, one in best_of_each_class(plan)]
    names = ["one machine", DDP, "dear", "osp", "bsp:compression=int8"]
    assert shown == [name for name in names if name != "dear" or fastest == "dear"]


def test_without_an_estimate_of_ddp_gains_are_over_one_machine():
    plan = made(sped("osp", "delayed", 0.1), sped("int8", "lossy", 0.05))
    first, second = headline(plan)
    assert "with osp train 3.60x" in first
    assert second.endswith("int8, 50 ms (7.20x one machine).")
    assert "vs. DDP" not in section(report(*plan.estimates), "Best").headings


def test_the_answer_says_that_one_machine_is_faster():
    equal = BreakEven(spec="bsp", rate=290e6, words="as fast at 2.3 Gbit/s")
    found = Suggestions(
        break_even=(equal,),
        helps=(
            helped("gradient accumulation over 16 batches", 1.7),
            helped("gradient accumulation over 4 batches", 1.16),
            helped("8 workers instead of 9", 0.9),
        ),
    )
    slow = sped("bsp", seconds=0.72, sent=2e6)
    lines = headline(made(slow), found, cluster(4))
    assert "4 workers" in lines[0]
    assert "(bsp, 720 ms) reaches 0.50x" in lines[0]
    assert "2 MB, which takes 160 ms at 100 Mbit/s; computing takes 90 ms" in lines[1]
    assert "links above 2.3 Gbit/s with bsp" in lines[2]
    assert "gradient accumulation over 4 batches (1.16x)" in lines[2]
    assert "16 batches" not in lines[2]
    assert "instead" not in lines[2]  # slower than one machine, too
    assert "No class" in lines[3]
    lines = headline(made(sped("local-sgd", "local", 0.09), slow), found, cluster(4))
    assert "local-sgd 4.00x (local updates)" in lines[2]
    assert len(lines) == 3


def test_seconds_on_the_wire_are_unknown_where_workers_share_a_host():
    rack = Rack(workers=4, link=125e6, latency=0.0, workers_per_host=2)
    lines = headline(made(sped("bsp", seconds=0.72)), NOTHING, Cluster((rack,)))
    assert "1 MB; computing" in lines[1]


def test_faster_methods_that_send_less_are_named():
    plan = made(
        sped("random", "lossy", 0.1, sent=1e3), sped("int8", "lossy", 0.11, sent=1e6)
    )
    assert "random (lossy, 100 ms)" in faster_but_not_recommended(plan)
    assert not faster_but_not_recommended(made(sped("bsp")))


@pytest.mark.parametrize(
    ("factor", "text"), [(0.523, "0.52x"), (2.0, "2.00x"), (12.345, "12.3x")]
)
def test_times(factor, text):
    assert times(factor) == text
