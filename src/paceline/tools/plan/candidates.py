"""The specs that a plan predicts: method x collective x compressor x bucket rule, from the registries.

All combinations would be thousands. `first` has every method with its defaults, and bsp with one change: each
bucket rule, each collective, each compressor. `crossed` takes the best spec of each consistency and changes one
more setting. In both:

- If the cluster has no server hosts, methods with servers have a server on each host: a single server would carry
  all gradients over one link.
- Collectives that need aggregators are infeasible if no rack has one.
- The collective ``ring`` is left out: native does the same. So are the compressors of `CONTRIB`.
- Compressors have their defaults. The best spec of a consistency is combined with bsp's `CODES` fastest ones.

Whether a candidate can run is only known from its prediction: the error says why not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from paceline.bucketing.rules import FIXED, RULES
from paceline.cluster import Cluster
from paceline.collectives.registry import COLLECTIVES
from paceline.compression import COMPRESSORS, CONTRIB, make
from paceline.core.settings import Settings, parse_method
from paceline.errors import UsageError
from paceline.interfaces import Consistency, Method, weaker
from paceline.methods import METHODS
from paceline.spec import Spec, parse
from paceline.tools.plan.estimates import DDP, Infeasible

CODES = 2
"""Number of compressors that the best spec of each consistency is combined with."""


class Candidate(msgspec.Struct, frozen=True):
    """A spec and its consistency."""

    spec: str
    consistency: Consistency


def candidate(spec: str | Spec) -> Candidate:
    """Make the candidate of a spec.

    Raises:
        UsageError: The spec is not valid for training.
    """
    text = str(spec)
    method, settings = parse_method(text)
    return Candidate(text, consistency_of(method, settings))


def consistency_of(method: Method, settings: Settings) -> Consistency:
    """Return the weakest consistency of a method, its collective and its compressor."""
    own: Consistency = getattr(method, "consistency", "asynchronous")
    how: Consistency = getattr(COLLECTIVES[settings.collective], "consistency", "exact")
    return weaker(weaker(own, how), settings.compression.code.consistency)


def declared_consistency(text: str) -> Consistency:
    """Return the consistency of a spec, even of one that is not valid for training."""
    try:
        return candidate(text).consistency
    except UsageError:
        spec = parse(text)
        row = METHODS.get(spec.name)
        own: Consistency = getattr(row, "consistency", "asynchronous")
        return weaker(own, "lossy") if "compression" in spec.values else own


def summary_line(text: str) -> str:
    """Return how a spec differs from DDP: what it waits for, and what it sends.

    The text is from the registries' summaries; it is empty without a summary.
    """
    try:
        method, settings = parse_method(text)
    except UsageError:
        return ""
    parts = []
    summary = getattr(method, "summary", None)
    if summary is not None and method.name != parse(DDP).name:
        parts.append(f"waits for {summary.waits_for}; sends {summary.sends}")
    collective = getattr(COLLECTIVES[settings.collective], "summary", None)
    if settings.collective != Settings().collective and collective is not None:
        parts.append(f"sums by {collective.formed_by}")
    code = settings.compression.code
    summary = getattr(code, "summary", None)
    if settings.compression.compresses and summary is not None:
        parts.append(f"compressed by {code.name}: {_with_values(summary.sends, code)}")
    return _with_values("; ".join(parts), method)


def _with_values(text: str, row: object) -> str:
    """Replace each key in backticks in *text* by its number, if it has one.

    A number of 0 means that the key is tuned.
    """

    def value(key: re.Match[str]) -> str:
        number = getattr(row, key[1], None)
        known = isinstance(number, int | float) and not isinstance(number, bool)
        return f"{number:g}" if known and number else key[1]

    return re.sub(r"`(\w+)`", value, text)


def first(cluster: Cluster) -> tuple[list[Candidate], list[Infeasible]]:
    """Candidates and infeasible specs of the first round: bsp first, so that it wins a tie."""
    names = ["bsp", *(name for name in METHODS if name != "bsp")]
    specs = [
        Spec(name, dict(form))
        for name in names
        for form in ({}, *getattr(METHODS[name], "forms", ()))
    ]
    usual = Settings()
    searched = [name for name in COMPRESSORS if name not in CONTRIB]
    changes: list[tuple[str, Iterable[str], str]] = [
        ("buckets", RULES, usual.buckets),
        ("collective", COLLECTIVES, usual.collective),
        ("compression", searched, usual.compression.name),
    ]
    specs += [
        Spec("bsp", {key: name})
        for key, among, default in changes
        for name in among
        if name != default
    ]
    return _candidates(specs, cluster)


def crossed(
    best: Mapping[Consistency, str], codes: Sequence[str], cluster: Cluster
) -> tuple[list[Candidate], list[Infeasible]]:
    """Candidates and infeasible specs of the second round.

    Args:
        best: The best spec of each consistency.
        codes: Compressors, the fastest first.
        cluster: The network.
    """
    specs = []
    for text in best.values():
        spec = parse(text)
        method, settings = parse_method(text)
        if method.updates_on != "server" and settings.collective == "native":
            others = (name for name in COLLECTIVES if name != "native")
            specs += [_with(spec, collective=name) for name in others]
        if not settings.compression.compresses and text != "bsp":
            pushed = method.updates_on == "server"
            usable = [
                name for name in codes if make(name).decodes_per_worker or not pushed
            ]
            for name in usable[:CODES]:
                specs.append(_with(spec, compression=name))
                if pushed:
                    specs.append(_with(spec, compression=name, replies="deltas"))
        if method.updates_on != "server" and "buckets" not in spec.values:
            specs += [_with(spec, buckets=rule) for rule in FIXED]
    return _candidates(specs, cluster)


def _with(spec: Spec, **keys: str) -> Spec:
    return Spec(spec.name, spec.values | keys)


def _candidates(
    specs: Iterable[Spec], cluster: Cluster
) -> tuple[list[Candidate], list[Infeasible]]:
    found, left = [], []
    for spec in specs:
        collective = COLLECTIVES.get(spec.values.get("collective", ""))
        if collective is not None and collective.name == "ring":
            continue
        try:
            made = candidate(_placed(spec, cluster))
        except UsageError as error:
            text = str(spec)
            consistency = declared_consistency(text)
            left.append(
                Infeasible(spec=text, consistency=consistency, reason=str(error))
            )
            continue
        needs = None if collective is None else collective.needs
        if needs == "aggregators" and not _aggregates(cluster):
            reason = "no rack of this cluster has an aggregator (aggregates = true)"
            left.append(
                Infeasible(spec=made.spec, consistency=made.consistency, reason=reason)
            )
        else:
            found.append(made)
    return found, left


def _placed(spec: Spec, cluster: Cluster) -> Spec:
    """Return the spec with a server on each host, if it uses servers but the cluster has no server hosts."""
    method, settings = parse_method(str(spec))
    served = (
        method.updates_on == "server"
        or COLLECTIVES[settings.collective].needs == "servers"
    )
    if not served or cluster.servers or settings.servers != "auto":
        return spec
    return _with(spec, servers="per-node")


def _aggregates(cluster: Cluster) -> bool:
    return any(getattr(rack, "aggregates", False) for rack in cluster.racks)
