"""One paragraph: what was found, what is used, why, and what the next class would give."""

from __future__ import annotations

from paceline.cluster import Cluster
from paceline.interfaces import Consistency
from paceline.tools.auto.decision import Answer, Found, Tried
from paceline.units import show_seconds


def paragraph(
    found: Found,
    consistency: Consistency,
    answer: Answer | None = None,
    cluster: Cluster | None = None,
    file: str = "",
) -> str:
    """For people, from rank 0."""
    if found.recalled:
        return (
            f"auto: {found.chosen} as decided before ({file}): the network is the same, and a step "
            f"takes {show_seconds(found.usual)}"
        )
    said = [f"auto ({consistency}): {_step(found)}"]
    if cluster is not None:
        said.append(f"the network is {cluster.describe()}")
    if answer is not None:
        said.append(_predicted(answer))
    said += [_tried(one) for one in found.tried]
    said += [
        f"{spec}, predicted {show_seconds(seconds)}, is tried when more steps have been done: a "
        "change costs too much of so few"
        for spec, seconds in found.later
    ]
    said.append(_chosen(found, answer))
    if answer is not None and answer.next is not None:
        said.append(_next(answer))
    if file:
        said.append(f"kept in {file}, which the next start reads")
    return "; ".join(said)


def _step(found: Found) -> str:
    seconds = show_seconds(found.usual if not found.tried else _before(found))
    text = f"a step with {found.before} takes {seconds}"
    if found.waited < 0:
        return text
    return f"{text}, of which {100 * found.waited:.0f} % wait for the network"


def _before(found: Found) -> float:
    return found.tried[0].before_seconds


def _predicted(answer: Answer) -> str:
    if answer.fault:
        return f"nothing could be predicted: {answer.fault}"
    text = f"{answer.candidates} candidates predicted"
    if answer.present is not None:
        text += f", {answer.present.spec} with {show_seconds(answer.present.seconds)}"
    return f"{text}, the limit of an exact mean with {show_seconds(answer.limit)}"


def _tried(one: Tried) -> str:
    text = f"{one.spec}, predicted {show_seconds(one.predicted)}"
    if one.seconds:
        text += (
            f", took {show_seconds(one.seconds)} against {show_seconds(one.before_seconds)} "
            f"with {one.before}"
        )
    return f"{text}: {one.why}"


def _chosen(found: Found, answer: Answer | None) -> str:
    if found.chosen != found.before:
        return f"{found.chosen} is used{' until then' if found.later else ''}, with {show_seconds(found.usual)} a step"
    if found.tried or found.later:
        return f"{found.chosen} stays" + (" until then" if found.later else "")
    if answer is None:
        return f"{found.chosen} stays: no other method has anything to gain there"
    if answer.fault:
        return f"{found.chosen} stays"
    return f"{found.chosen} stays: nothing is predicted to be clearly faster"


def _next(answer: Answer) -> str:
    assert answer.next is not None
    seconds = answer.next.seconds
    best = min(
        [one.seconds for one in (*answer.best, answer.present) if one is not None],
        default=seconds,
    )
    ratio = best / seconds if seconds else 1.0
    gain = (
        f"{ratio:.2f} times as fast as the best of these"
        if ratio > 1.005
        else "no faster"
    )
    return (
        f"consistency={answer.next.consistency} would allow {answer.next.spec}, predicted "
        f"{show_seconds(seconds)}: {gain}"
    )
