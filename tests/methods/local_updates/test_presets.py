"""Names of local updates: each is a preset of options, and sparse-loco has a compression with it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from paceline.cli.registry_entries import methods
from paceline.compression import make
from paceline.core.settings import Settings, parse_method
from paceline.errors import UsageError
from paceline.methods import METHODS
from paceline.methods.local_updates import LocalSGD, LocalUpdates, SparseLoCo
from paceline.runtimes.join import join_runtime
from tests.methods.local_updates.helpers import CLOSE, apart, momentum, train
from tests.methods.local_updates.test_rounds import WIDE, to_own, wide

PRESET = SparseLoCo.default_compression
PRESETS = [cls for cls in METHODS.values() if LocalUpdates in cls.__mro__]


@pytest.mark.parametrize("cls", PRESETS, ids=lambda cls: cls.name)
def test_a_name_is_a_preset_and_nothing_else(cls: type[LocalUpdates]) -> None:
    """Local SGD with another one's options does what that one does, the code apart that a name
    may have."""
    options: dict[str, Any] = {}
    if cls().sync_every > 16:
        options = {"sync_every": 4, "sync_each_step_until": 0}
    if cls().delay:
        options |= {"fragments": 2, "delay": 1}
    preset = cls(**options)
    named = {f.name: getattr(preset, f.name) for f in fields(preset)}
    if preset.has_groups:
        named["group"] = options["group"] = "2"
    methods = cls(**options), LocalSGD(**named)
    one, other = (train(m, 2, 5, compression="none")[0].end for m in methods)
    assert torch.equal(one, other)


def test_a_round_of_sparse_loco_is_the_papers_equation() -> None:
    """Beside the code itself, which is asked of the compressor, worker by worker."""
    workers, rounds = 2, 4
    first, second = train("sparse-loco:sync_every=1", workers, rounds, **WIDE)
    models = [wide() for _ in range(workers)]
    inner = [momentum(model.parameters()) for model in models]
    code: Any = make(PRESET).code
    anchors = [p.detach().clone() for p in models[0].parameters()]
    residuals = [[torch.zeros_like(x) for x in anchors] for _ in models]
    for step in range(rounds):
        sums = [torch.zeros_like(x) for x in anchors]
        for rank, model in enumerate(models):
            inner[rank].zero_grad()
            to_own(model, rank, step).backward()
            inner[rank].step()
            for n, p in enumerate(model.parameters()):
                e = 0.95 * residuals[rank][n] + (anchors[n] - p.detach()) / workers
                coded = torch.empty_like(e)
                code.decode(code.encode([e], [code.init_state(e, "", rank)]), [coded])
                sums[n] += coded  # c_i
                residuals[rank][n] = e - coded
        with torch.no_grad():
            for n, x in enumerate(anchors):
                x -= sums[n]
                for model in models:
                    list(model.parameters())[n].copy_(x)
        here = torch.cat([x.reshape(-1) for x in anchors])
        assert apart([here], [first.steps[step]]) < CLOSE
        assert torch.equal(first.steps[step], second.steps[step])


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("sparse-loco", PRESET),
        ("sparse-loco:sync_every=9", PRESET),
        ("sparse-loco:compression=int4", "int4"),
        ("sparse-loco:compression=none", "none"),
        ("diloco", "none"),
    ],
)
def test_the_compression_is_the_method_s_unless_the_user_names_one(
    spec: str, code: str
) -> None:
    assert parse_method(spec)[1].compression == make(code)
    given = parse_method(spec, Settings(compression=make("bf16")))[1].compression
    assert given == make(code if "compression" in spec else "bf16")


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("sparse-loco", {}, "sparse-loco"),
        ("sparse-loco", {"compression": "none"}, "sparse-loco:compression=none"),
        ("sparse-loco", {"compression": PRESET}, "sparse-loco"),
        (SparseLoCo(), {}, "sparse-loco"),
        ("local-sgd", {"compression": "bf16"}, "local-sgd:compression=bf16"),
    ],
    ids=str,
)
def test_a_run_is_called_by_the_compression_that_is_not_the_method_s(
    spec: Any, options: dict[str, Any], said: str
) -> None:
    found = []

    def watch(rank: int, step: int, model: Any, optimizer: Any) -> None:
        recorder = join_runtime().recorder
        found.append((recorder.method, recorder.brief))

    train(spec, 1, 1, **WIDE, **options, watch=watch, buckets="optimal")
    ((full, brief),) = found
    assert brief == said
    assert parse_method(full) == parse_method(brief)
    if said == "sparse-loco":
        assert "compression=top-k" in full
        assert "compression.decay=0.95" in full


def test_the_description_of_a_method_has_its_default_compression() -> None:
    (entry,) = (one for one in methods() if one.name == "sparse-loco")
    assert SparseLoCo.default_compression in dict(entry.facts)["compression"]


def test_every_default_is_a_compression() -> None:
    for cls in METHODS.values():
        make(getattr(cls, "default_compression", "none"))


def test_a_compression_of_gradients_alone_is_refused() -> None:
    with pytest.raises(UsageError, match=r"momentum of gradients"):
        parse_method("diloco:compression=dgc")
    parse_method("bsp:compression=dgc")
