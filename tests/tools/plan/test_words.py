"""What people read of a plan: the verdict, why, which is recommended, and what was gained."""

import msgspec

from paceline.runtimes.results import FailedRun, RunResult
from paceline.tools.compare.gains import Gain, gains, print_gains
from paceline.tools.compare.goal import Goal
from paceline.tools.plan.estimates import DDP
from paceline.tools.plan.headline import command, commands, reasons, summary, verdict
from paceline.tools.plan.report import plan_page
from paceline.tools.plan.suggestions import BreakEven, Suggestion, Suggestions
from paceline.tools.plan.tables import print_plan, to_json
from tests.tools.plan.helpers import cluster
from tests.tools.plan.test_more import made, row

NOTHING = Suggestions(break_even=(), helps=())


def sped(spec, consistency="exact", seconds=0.1, sent=1e6, **others):
    """Four workers, 90 ms alone."""
    return row(spec, consistency, seconds, bytes_sent=sent, **others)


def test_the_verdict_says_what_exact_means_give_and_what_less_would():
    plan = made(
        sped("diloco", "local", 0.09),
        sped("bsp:compression=int8", "lossy", 0.095),
        sped("dear", seconds=0.18),
        sped(DDP, seconds=0.27),
    )
    said = verdict(plan, NOTHING)
    assert said.startswith("4 workers train 2.00 x as fast as one machine with dear")
    assert "1.50 x as fast as with DDP's rule" in said
    assert "3.79 x with bsp:compression=int8 (lossy)" in said
    assert "diloco" not in said  # promises less, and is hardly faster


def test_what_is_hardly_faster_than_ddps_rule_is_no_reason_to_change():
    """Neither in the sentence nor in the commands; what is clearly faster is still named."""
    rows = [
        sped("dear", seconds=0.178),
        sped(DDP, seconds=0.18),
        sped("osp", "delayed", 0.179),
        sped("bsp:compression=int8", "lossy", 0.09),
    ]
    plan = made(*rows)
    said = verdict(plan, NOTHING)
    assert said.startswith("4 workers train 2.00 x as fast as one machine with DDP's")
    assert "stay with DDP (dear, the best exact method, is 1 % faster)" in said
    assert "4.00 x with bsp:compression=int8 (lossy)" in said
    assert "osp" not in said
    assert commands(plan, "x.py") == {
        "exact": "paceline run x.py --method bsp:buckets=ddp",
        "lossy": "paceline run x.py --method bsp:compression=int8",
    }
    assert [spec for _, spec in to_json_advised(plan)] == [DDP, "bsp:compression=int8"]
    assert plan.fastest["exact"].spec == "dear"  # the table still shows it
    clearly = made(sped("dear", seconds=0.17), *rows[1:])
    assert "1.06 x as fast as with DDP's rule" in verdict(clearly, NOTHING)
    assert commands(clearly, "x.py")["exact"].endswith("--method dear")
    assert commands(clearly, "x.py")["delayed"].endswith("--method osp")
    assert "no exact method is faster" in verdict(made(rows[1]), NOTHING)
    # Where DDP's rule is not allowed there is nothing to stay with.
    assert commands(made(rows[2]), "x.py") == {
        "delayed": "paceline run x.py --method osp"
    }


def to_json_advised(plan):
    content = msgspec.json.decode(to_json(plan, NOTHING, [], []))
    return content["recommended"].items()


def test_a_method_that_learns_long_says_from_when_on_it_is_that_fast(capsys):
    plan = made(
        sped("bsp", steady_after=6),
        sped("osp:collective=native", "delayed", 0.08, steady_after=153),
        sped("post-local-sgd", "local", 0.09, steady_after=1000),
    )
    print_plan(plan, NOTHING, cluster(4), "train.py")
    text = " ".join(capsys.readouterr().out.split())
    assert "osp:collective=native (from step 154 on)" in text
    assert "post-local-sgd (from step 1001 on)" in text
    assert "bsp (from" not in text
    page = plan_page(plan, NOTHING, [], [], cluster=cluster(4), script="x", command="")
    assert "from step 154 on" in repr(page)


def test_changes_that_do_not_help_are_counted_and_not_listed():
    plan = made(sped("bsp", seconds=0.15))
    tried = Suggestions(break_even=(), helps=(), tried=5)
    text = "\n".join(words for _, words in summary(plan, cluster(4), tried))
    assert "none of 5 changes that were tried" in text
    text = "\n".join(words for _, words in summary(plan, cluster(4), NOTHING))
    assert "tried" not in text


def test_the_verdict_says_that_one_machine_is_faster():
    equal = BreakEven(spec="bsp", rate=290e6, words="as fast at 2.3 Gbit/s")
    found = Suggestions(break_even=(equal,), helps=())
    slow = sped("bsp", seconds=0.72)
    said = verdict(made(slow), found)
    assert "slower than one machine with every exact method (0.50 x" in said
    assert "links of 2.3 Gbit/s would make them equal" in said
    assert "No class is faster here than one machine alone" in said
    said = verdict(made(sped("local-sgd", "local", 0.09), slow), found)
    assert "4.00 x with local-sgd (local)" in said
    assert "No class" not in said


def test_of_what_loses_something_the_one_that_sends_most_is_advised():
    plan = made(
        sped("random", "lossy", 0.100, sent=1e3),
        sped("int4", "lossy", 0.114, sent=5e5),
        sped("int8", "lossy", 0.121, sent=9e5),
        sped("ef-sign", "lossy", 0.116, sent=5.2e5),
        sped("int4:collective=tree", "lossy", 0.115, sent=1e3),
        sped("int4:buckets=wfbp", "lossy", 0.119, sent=9e5),
        sped("delayed", "delayed", 0.1, sent=1e3),
        sped("later", "delayed", 0.101, sent=9e5),
        sped("cut", "lossy", 0.110, sent=9e9, rejected=True),
    )
    assert plan.fastest["lossy"].spec == "random"
    assert plan.recommended["lossy"].spec == "int4"
    assert plan.recommended["delayed"].spec == "delayed"
    only = made(
        sped("cut", "lossy", rejected=True),
        sped("too", "lossy", 0.11, 9e9, rejected=True),
    )
    assert only.recommended["lossy"].spec == "too"


def test_the_summary_names_the_network_and_what_hides_it():
    helped = Suggestion(what="accumulate 4", spec="bsp", step_seconds=0.5, speedup=3.0)
    found = Suggestions(break_even=(), helps=(helped,))
    plan = made(sped("bsp", seconds=0.15, sent=1e6), sped(DDP, seconds=0.2))
    text = "\n".join(words for _, words in summary(plan, cluster(4), found))
    assert "90 ms a batch of its own, 360 ms for as many samples as 4 take" in text
    assert "150 ms a step = 90 ms computing + 60 ms waiting, with bsp" in text
    # 80 ms on the wire, of which 60 are waited for
    assert (
        "1 MB leave each worker in a step: 80 ms at 100 Mbit/s, of which 20 ms" in text
    )
    assert "DDP's rule: 200 ms; no exact mean is faster than 200 ms" in text
    assert "accumulate 4: 3.00 x one machine" in text


def test_commands_run_what_is_advised_and_quote_what_a_shell_would_eat():
    plan = made(sped("bsp"), sped("local-sgd", "local"))
    assert commands(plan, "my train.py", ["--lr", "1"]) == {
        "exact": "paceline run 'my train.py' --method bsp -- --lr 1",
        "local": "paceline run 'my train.py' --method local-sgd -- --lr 1",
    }
    assert command("bsp", "x.py", verb="emulate", options=["--workers=2"]) == (
        "paceline emulate x.py --workers=2 --method bsp"
    )


def test_the_answer_stands_first_and_what_cannot_run_only_where_asked(capsys):
    from paceline.tools.plan.estimates import Infeasible

    outs = tuple(
        Infeasible(spec=f"x{i}", consistency="delayed", reason=why)
        for i, why in enumerate(("needs a switch", "it clips", "it clips"))
    )
    plan = msgspec.structs.replace(made(sped("bsp"), sped(DDP)), infeasible=outs)
    assert list(reasons(plan)) == ["it clips", "needs a switch"]
    print_plan(plan, NOTHING, cluster(4), "train.py")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 workers train")
    assert lines[-1].split() == [
        "exact",
        "paceline",
        "run",
        "train.py",
        "--method",
        "bsp:buckets=ddp",
    ]
    assert len(lines) < 40
    text = "\n".join(lines)
    assert "3 cannot run here: --all lists each" in text
    assert "it clips" not in text
    network = ["--workers=4", "--link=100mbit"]
    print_plan(plan, NOTHING, cluster(4), "train.py", network=network, everything=True)
    text = capsys.readouterr().out
    assert "it clips" in text
    assert text.rstrip().endswith(
        "paceline emulate train.py --workers=4 --link=100mbit --method bsp:buckets=ddp"
    )
    assert text.count("4 workers train") == 2  # also below the tables
    print_plan(
        *(plan, NOTHING, cluster(4), "train.py"), network=network, stand_in="t.json"
    )
    text = capsys.readouterr().out
    assert text.rstrip().endswith(
        "paceline emulate examples/workload.py --workers=4 --link=100mbit --method "
        "bsp:buckets=ddp -- t.json --steps 100"
    )


def test_each_reason_for_a_brief_look_has_its_own_line(capsys):
    plan = made(
        sped("bsp"),
        sped("priority", seconds=0.11, fidelity="short"),
        sped("slow", seconds=0.5, fidelity="short", rejected=True),
        sped("slower", seconds=0.6, fidelity="short", rejected=True),
    )
    plan = msgspec.structs.replace(plan, skipped=5)
    print_plan(plan, NOTHING, cluster(4), "train.py")
    lines = capsys.readouterr().out.splitlines()
    assert "4 candidates ran: --all lists each, and why" in lines
    assert "2 of them ran briefly (~): too slow in their class" in lines
    assert "5 more were not looked at: candidates' part of --budget is spent" in lines
    hopeful = "1 of them ran briefly (~): candidates' part of --budget had no time"
    assert f"{hopeful} for more" in lines


def test_what_was_gained_is_over_one_machine_and_over_ddp(capsys):
    def ran(seconds):
        return RunResult(
            runtime="simulated",
            workers=4,
            method="bsp",
            steps=9,
            buckets=1,
            step_seconds=seconds,
            compute_seconds=0.09,
            exposed_communication_seconds=seconds - 0.09,
            bytes_sent_per_worker=1.0,
            metrics={"accuracy": 0.9},
        )

    rows = [
        Gain("DDP", DDP, ran(0.36), planned=0.35, reached=3.0, steps=8),
        Gain("delayed", "osp", ran(0.18)),
        Gain("local", "x", FailedRun(failed="no", exit_status=1)),
    ]
    headings, table = gains(rows, 4, 0.09, Goal("accuracy", 0.95))
    named = [dict(zip(headings, line, strict=True)) for line in table]
    assert [one["vs. 1 machine"] for one in named] == ["1.00", "1.00", "2.00", "-"]
    assert [one["vs. DDP"] for one in named] == ["1.00", "1.00", "2.00", "-"]
    assert [one["to accuracy=0.95"] for one in named] == [
        "2.88 s (8 steps)",
        "3 s (8 steps)",
        "never",
        "-",
    ]
    assert named[3]["step"] == "failed"
    rows[1].outcome.cautions.append("asked for 20 steps")
    print_gains(rows, 4, 0.09, None, "here")
    below = capsys.readouterr().out.splitlines()[-2:]
    assert below == ["osp: asked for 20 steps", "x: failed: no"]
    assert named[2]["accuracy"] == "0.9"
