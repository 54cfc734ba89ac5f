"""SparseLoCo: a method whose compression comes with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from paceline.cli.list import methods_table
from paceline.compression import make
from paceline.core.settings import Settings, parse_method
from paceline.errors import UsageError
from paceline.methods import METHODS
from paceline.methods.local_updates import SparseLoCo
from paceline.runtimes.join import join_runtime
from tests.methods.local_updates.helpers import adam, train
from tests.methods.local_updates.test_compressed import PLAIN, WIDE, to_own, wide
from tests.methods.local_updates.test_laws import CLOSE, apart
from tests.support.training import simulate

PRESET = SparseLoCo.default_compression


def test_it_is_diloco_with_options_and_a_code() -> None:
    keys = WIDE | {"optimizer": adam}
    own = train("sparse-loco:sync_every=3", 3, 10, **keys)
    options = f"diloco:sync_every=3,{PLAIN}"
    same = train(options, 3, 10, **keys, compression=PRESET)
    other = train(options, 3, 10, **keys, compression="top-k")
    for one, twin, third in zip(own, same, other, strict=True):
        assert torch.equal(one.end, twin.end)
        assert not torch.equal(one.end, third.end)


def test_with_all_elements_and_no_decay_it_is_local_sgd() -> None:
    own = train(
        "sparse-loco:sync_every=3",
        3,
        9,
        **WIDE,
        compression="top-k:density=1,decay=0.95",
    )
    plain = train("local-sgd:sync_every=3", 3, 9, **WIDE)
    assert apart([one.end for one in own], [one.end for one in plain]) < CLOSE


def test_a_round_is_the_papers_equation() -> None:
    """Beside the code itself, which is asked of the compressor, worker by worker."""
    workers, rounds = 2, 4
    after = [
        one.steps for one in train("sparse-loco:sync_every=1", workers, rounds, **WIDE)
    ]
    models = [wide() for _ in range(workers)]
    inner = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for m in models
    ]
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
        assert apart([here], [after[0][step]]) < CLOSE
        assert torch.equal(after[0][step], after[1][step])


# ---- who says what the code is ----


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
def test_the_code_is_the_methods_unless_the_user_names_one(
    spec: str, code: str
) -> None:
    settings = parse_method(spec)[1]
    assert settings.compression == make(code)
    given = parse_method(spec, Settings(compression=make("bf16")))[1].compression
    assert given == make(code if "compression" in spec else "bf16")


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("sparse-loco", {}, "sparse-loco"),
        ("sparse-loco", {"compression": "none"}, "sparse-loco:compression=none"),
        ("sparse-loco", {"compression": PRESET}, "sparse-loco"),
        (SparseLoCo(), {}, "sparse-loco"),
        (
            "local-sgd",
            {"compression": "bf16"},
            "local-sgd:compression=bf16",
        ),
    ],
    ids=str,
)
def test_what_is_saved_says_it(spec: Any, options: dict[str, Any], said: str) -> None:
    def body(rank: int) -> tuple[str, str]:
        model = wide()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=spec, **options)
        optimizer.finish()
        recorder = join_runtime().recorder
        return recorder.method, recorder.brief

    full, brief = simulate(1, body)[0]
    assert brief == said
    assert parse_method(full) == parse_method(brief)
    if said == "sparse-loco":
        assert "compression=top-k" in full
        assert "compression.decay=0.95" in full


def test_the_table_of_methods_shows_it() -> None:
    rows = methods_table().splitlines()
    (row,) = (row for row in rows if row.startswith("| `sparse-loco`"))
    for key in ("compression=top-k", "compression.bits=2", "compression.decay=0.95"):
        assert f"`{key}`" in row


def test_every_default_is_a_compression() -> None:
    for cls in METHODS.values():
        make(getattr(cls, "default_compression", "none"))


def test_a_code_of_gradients_alone_is_refused() -> None:
    with pytest.raises(UsageError, match=r"momentum .* of gradients"):
        parse_method("diloco:compression=dgc")
    parse_method("bsp:compression=dgc")
