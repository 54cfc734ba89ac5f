"""A rank that the others wait for is named, and nothing else happens: which rank it is, as the
hub decides, and real processes."""

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from paceline.records import StepRecorder
from paceline.runtimes.python_internals import Frame
from paceline.runtimes.real.hang_report import (
    MOST_FRAMES,
    MOST_NAMED,
    MOST_WAITING,
    Hangs,
    HangWatch,
    Whereabouts,
    stack_of,
)
from paceline.runtimes.real.peer_monitor import LINE_BYTES, FailureNotice, line_of
from paceline.timeouts import timeouts
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "hangs.py"
PATIENCE = timeouts.rank_hang
WAITS = Whereabouts(step=6, waits=True, still=31.0, changes=4)
WAITS_A_LITTLE = Whereabouts(step=6, waits=True, still=1.0, changes=4)
HANGS = Whereabouts(step=6, still=31.0, changes=5, stack=["a.py:1 in b", "a.py:2 in f"])
WORKS = Whereabouts(step=6, still=1.0, changes=5)
THREE = {rank: f"(host h, process {100 + rank})" for rank in range(3)}


def concluded(hangs, answers, now=0.0, present=THREE):
    """What is said after the first of *answers*, which is a report, and the others."""
    (reporter, report), *others = answers.items()
    if not hangs.receive_report(reporter, report, now):
        return None
    for rank, answer in others:
        assert not hangs.receive_report(rank, answer, now)
    return hangs.conclude(present, now + timeouts.hang_answer)


def test_who_does_not_wait_is_named_with_its_stack():
    said = concluded(Hangs(), {2: WAITS, 0: WAITS_A_LITTLE, 1: HANGS})
    first, *frames = said.splitlines()
    for words in ("rank 1 (host h, process 101)", "ranks 0, 2 ", "step 6", "31 s"):
        assert words in first
    assert "a.py:2 in f" in first
    assert [frame.strip() for frame in frames] == HANGS.stack


@pytest.mark.parametrize("other", [WAITS, WAITS_A_LITTLE, WORKS])
def test_nobody_is_named_where_all_wait_or_go_on(other):
    assert concluded(Hangs(), {0: WAITS, 1: other, 2: WAITS}) == ""


@pytest.mark.parametrize("report", [WAITS_A_LITTLE, HANGS, WORKS])
def test_only_a_long_wait_lets_the_ranks_be_asked(report):
    assert concluded(Hangs(), {0: report}) is None


def test_a_hang_is_said_once_and_a_later_one_anew():
    hangs = Hangs()
    assert concluded(hangs, {0: WAITS, 1: HANGS, 2: WAITS})
    assert concluded(hangs, {0: WAITS, 1: HANGS, 2: WAITS}, PATIENCE) == ""
    later = Whereabouts(step=9, still=31.0, changes=11)
    said = concluded(hangs, {0: WAITS, 1: later, 2: WAITS}, 2 * PATIENCE)
    assert "It is in step 9" in said


def test_ranks_are_not_asked_for_each_report():
    hangs = Hangs()
    assert concluded(hangs, {0: WAITS, 1: HANGS, 2: WAITS}, 0.0)
    assert not hangs.receive_report(2, WAITS, 1.0)
    assert hangs.milliseconds(1.0) is None


def test_who_does_not_answer_is_named_when_it_has_had_its_time():
    hangs = Hangs()
    assert hangs.receive_report(0, WAITS, 0.0)
    hangs.receive_report(2, WAITS, 0.0)
    assert not hangs.is_due(3, 1.0)
    assert hangs.conclude(THREE, 1.0) == ""
    assert hangs.is_due(3, timeouts.hang_answer)
    said = hangs.conclude(THREE, timeouts.hang_answer)
    assert "rank 1 (host h" in said
    assert "does not answer" in said


def test_who_has_ended_meanwhile_is_not_named():
    hangs = Hangs()
    assert hangs.receive_report(0, WAITS, 0.0)
    assert hangs.conclude({0: THREE[0]}, 0.0) == ""


def test_what_is_said_of_many_ranks_is_bounded():
    many = {rank: f"(host h, process {rank})" for rank in range(1000)}
    answers = {rank: WAITS if rank < 500 else HANGS for rank in many}
    lines = concluded(Hangs(), answers, present=many).splitlines()
    assert len(lines) == MOST_NAMED * (1 + len(HANGS.stack)) + 1
    assert f"{500 - MOST_WAITING} more" in lines[0]
    assert f"{500 - MOST_NAMED} more" in lines[-1]


def test_a_deep_stack_of_long_names_fits_into_a_line_of_the_hub():
    """Also of letters that take four bytes, and of those that are none."""
    found = []
    name = "\N{MATHEMATICAL FRAKTUR SMALL A}" * 900
    text = f"def f{name}(n):\n    f{name}(n - 1) if n else look()\nf{name}(99)"
    look = {"look": lambda: found.extend(stack_of(frames()))}
    exec(compile(text, '/\udcff\n"' + "\U0001d51e" * 5000, "exec"), look)
    assert len(found) == MOST_FRAMES
    news = FailureNotice(
        rank=10**6, where=Whereabouts(step=10**9, still=1e9 / 7, stack=found)
    )
    assert len(line_of(news)) < LINE_BYTES


def frames():
    frame, found = sys._getframe(), []
    while frame is not None:
        code = frame.f_code
        found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return found


def test_a_watch_counts_from_the_last_thing_that_its_rank_has_sent():
    recorder = StepRecorder(0, time.perf_counter)
    watch = HangWatch(recorder, lambda: 1)
    first = watch.look()
    second = watch.look()
    assert second.changes == first.changes
    assert second.still > 0
    recorder.count_bytes(8)
    third = watch.look()
    assert (third.changes, third.still) == (first.changes + 1, 0.0)
    assert (
        third.stack[-1].split(" in ")[1]
        == (
            test_a_watch_counts_from_the_last_thing_that_its_rank_has_sent.__name__[:30]
        )
    )
    seen = []
    recorder.block("sum", lambda: seen.append(watch.look()))
    assert (seen[0].waits, seen[0].stack) == (True, [])
    assert not watch.look().waits


@pytest.fixture
def job():
    """Starts ranks of `SCRIPT`, which name a hang after *patience* seconds."""
    started = []

    def start(case, patience="1"):
        started.extend(forked.together(3, [SCRIPT, case, patience]))
        return started

    yield start
    for rank in started:
        rank.kill()


def named(ranks, hung, step=""):
    """What rank 0 says of the *hung* rank, which keeps others in *step*. A start that is slow on one rank may be named,
    too: the patience is short here."""
    words = f"rank {hung} (host ", f"process {ranks[hung].pid})", f"up step {step}"
    lines = ranks[0].stderr.splitlines()
    return [line for line in lines if all(word in line for word in words)]


@pytest.mark.slow
@pytest.mark.parametrize("hung", [0, 1])
def test_a_hung_rank_is_named_once_for_each_hang_and_the_job_goes_on(job, hung):
    ranks = job(f"{hung} training")
    for step in (6, 8):
        wait_until(lambda step=step: named(ranks, hung, step), SECONDS, "its name")
        [line] = named(ranks, hung, step)
        others = ", ".join(str(rank) for rank in range(3) if rank != hung)
        assert f"ranks {others} wait for it" in line
        assert re.search(rf"in step {step}, at .*hangs\.py:\d+ in slow_function", line)
        ranks[hung].send_signal(signal.SIGUSR2)
    for rank in ranks:
        assert rank.done().returncode == 0, rank.stderr
    assert [len(named(ranks, hung, step)) for step in (6, 8)] == [1, 1]
    assert "in <module>" in ranks[0].stderr
    assert not any("paceline:" in rank.stderr for rank in ranks[1:])


def test_a_rank_that_does_not_come_to_a_collective_of_the_script_is_named(job):
    ranks = job("2 barrier")
    wait_until(lambda: named(ranks, 2, 9), SECONDS, "its name")
    assert "ranks 0, 1 wait" in named(ranks, 2, 9)[0]
    assert "slow_function" in named(ranks, 2, 9)[0]


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_servers_round_is_named(job):
    ranks = job("1 training ssp:staleness=0")

    def lines():
        return [line for line in named(ranks, 1) if "slow_function" in line]

    wait_until(lines, SECONDS, "its name")
    assert "It is in step 6, at " in lines()[0]


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(job):
    ranks = job("1 stopped")
    wait_until(lambda: named(ranks, 1, 9), SECONDS, "its name")
    assert "does not answer" in named(ranks, 1, 9)[0]


@pytest.mark.slow
def test_nobody_is_named_where_all_are_slow_alike(job):
    ranks = job("0 all", patience="2")
    for rank in ranks:
        assert rank.done().returncode == 0, rank.stderr
    assert not any("paceline:" in rank.stderr for rank in ranks)
