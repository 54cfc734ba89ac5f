"""Small jobs to plan, plans without predictions, and a predictor that simulates nothing."""

import math

from paceline.cluster import Workload, uniform_cluster
from paceline.tools.plan.estimates import Baseline, Estimate, Plan
from paceline.tools.plan.predictor import Predictor
from paceline.tools.plan.report import Question, plan_report
from paceline.tools.plan.what_if import Suggestion, Suggestions


def layers(count=4, megabytes=4.0, forward=0.03, backward=0.06):
    """Equal layers, in that many seconds."""
    size = int(megabytes * 1e6 / 4) // count * 4
    return Workload(
        names=tuple(f"layer{i}" for i in range(count)),
        sizes=(size,) * count,
        forward=(forward / count,) * count,
        backward=(backward / count,) * count,
        batch=8.0,
        shapes=((size // 4,),) * count,
    )


def cluster(workers=4, link="100mbit", latency="50us", servers=0):
    return uniform_cluster(workers, link, latency, servers)


def row(spec, consistency="exact", seconds=0.09, **others):
    figures = {
        "compute_seconds": 0.09,
        "exposed_seconds": seconds - 0.09,
        "bytes_sent": 0.0,
        "buckets": 1,
    }
    return Estimate(
        spec=spec, consistency=consistency, step_seconds=seconds, **(figures | others)
    )


def made(*rows):
    """A plan of these estimates: 4 workers, of which one alone takes 90 ms for its batch."""
    return Plan(
        cluster="4 workers",
        workload="layers",
        baseline=Baseline(
            workers=4,
            batch=32.0,
            single=row("one machine", seconds=4 * 0.09),
            lower_bound_seconds=0.2,
        ),
        estimates=rows,
        infeasible=(),
    )


class FakePredictor(Predictor):
    """Answers with ``answer(spec, fidelity)``, each for *each* events, and notes what was asked."""

    def __init__(self, answer, max_events=math.inf, each=1):
        super().__init__(max_events=max_events)
        self.answer, self.each, self.asked = answer, each, []

    def predict(self, asked, fidelity="full", *, until=None):
        def one(job, spec):
            self.asked.append((job, spec, fidelity))
            return self.answer(spec, fidelity), self.each

        return self.map(one, asked, until=until)


NOTHING = Suggestions(break_even=(), helps=())
ASKED = Question(
    cluster=cluster(4),
    workload=layers(),
    script="train.py",
    network=["--workers=4", "--link=100mbit"],
)


def sped(spec, consistency="exact", seconds=0.1, sent=1e6, **others):
    """Four workers; one machine takes 360 ms for their batch."""
    return row(spec, consistency, seconds, bytes_sent=sent, **others)


def helped(what, speedup):
    return Suggestion(what=what, spec="bsp", step_seconds=0.1, speedup=speedup)


def report(*estimates, suggestions=NOTHING, question=ASKED, **others):
    return plan_report(made(*estimates), suggestions, question, **others)


def section(found, title):
    """The only section whose title begins so."""
    (one,) = (one for one in found.sections if one.title.startswith(title))
    return one
