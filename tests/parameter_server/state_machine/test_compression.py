"""Codes to a server and back: what is decoded, what is held, and what is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from msgspec import structs

from paceline.compression import COMPRESSORS, GatheredCompressor, State, make
from paceline.compression.base import Reader, to_bytes
from paceline.errors import UsageError
from paceline.interfaces import Reply
from paceline.interfaces.server_messages import (
    DTYPES,
    Join,
    Joined,
    Leave,
    Load,
    Parameters,
    Pull,
    Rejected,
    Unit,
)
from paceline.methods.asp import ASP
from paceline.methods.backup import Backup
from paceline.parameter_server.process.services import make_parameter_server
from paceline.parameter_server.state_machine.compression import code_bytes, views
from paceline.parameter_server.state_machine.server import ParameterServer
from tests.parameter_server.state_machine.test_server import HOW, Case, pushed

MATRIX = Unit(0, 0, 6, 0, (2, 3))
PIECE = Unit(1, 2, 6, 0)
UNITS = [[MATRIX, PIECE], [Unit(2, 0, 3, 0, (3,))]]
SIZES = [10, 3]


@dataclass(frozen=True, kw_only=True)
class Largest(GatheredCompressor):
    """The largest element of each tensor, and its place."""

    name: ClassVar[str] = "largest"
    unbiased: ClassVar[bool] = False
    state: ClassVar[str] = "none"

    def memory_passes(self, workers: int) -> tuple[float, float]:
        return 3.0, 2.0

    def _size(self, shapes: Any, dtype: torch.dtype) -> int:
        return len(shapes) * (8 + dtype.itemsize)

    def _encode(self, parts: Any, states: Any) -> torch.Tensor:
        code = []
        for part in parts:
            flat = part.reshape(-1)
            # What is not finite counts as largest.
            place = flat.abs().nan_to_num(nan=torch.inf).argmax()
            code += [place.reshape(1), flat[place].reshape(1)]
        return to_bytes(*(to_bytes(one) for one in code))

    def _decode(
        self, code: torch.Tensor, parts: Any, dtype: torch.dtype, add: bool
    ) -> None:
        reader = Reader(code)
        for part in parts:
            place = int(reader.take(torch.int64, 1))
            value = reader.take(dtype, 1)[0]
            if not 0 <= place < part.numel():
                raise UsageError(f"place {place} of {part.numel()}")
            if not add:
                part.zero_()
            part.view(-1)[place] += value
        reader.end()


@pytest.fixture(autouse=True)
def largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPRESSORS, Largest.name, Largest)


def join_of(
    compression: str = "largest", replies: Any = "full", dtype: str = "float64"
) -> Join:
    return Join(
        options="",
        units=UNITS,
        dtypes=[dtype] * 2,
        optimizer="SGD",
        hyperparameters=HOW,
        compression=compression,
        replies=replies,
    )


class Talk(Case):
    """Workers 0 and 1 of a training whose pushes are codes."""

    def __init__(
        self,
        compression: str = "largest",
        replies: Any = "full",
        method: Any = None,
        dtype: str = "float64",
    ) -> None:
        super().__init__(method or ASP())
        self.code: Any = make(compression)
        self.kind = DTYPES[dtype]
        self.joins = join_of(compression, replies, dtype)
        self.states: dict[tuple[int, int], list[State]] = {}
        for worker in (0, 1):
            self.ask(worker, self.joins)
        for bucket, size in enumerate(SIZES):
            self.ask(0, Load(bucket=bucket), torch.zeros(size, dtype=self.kind))

    def encoded(self, worker: int, bucket: int, flat: torch.Tensor) -> torch.Tensor:
        parts = views(flat.to(self.kind), UNITS[bucket])
        states = self.states.setdefault(
            (worker, bucket),
            [self.code.init_state(p, f"{n}", worker) for n, p in enumerate(parts)],
        )
        found: torch.Tensor = self.code.encode(parts, states)
        return found

    def push_code(
        self, worker: int, step: int, bucket: int, code: Any, **others: Any
    ) -> list[Reply]:
        life = others.pop("life", 0)
        used = [True] * len(UNITS[bucket])
        message = pushed(step, bucket, used=used, **others)
        return self.ask(worker, message, code, life)

    def pull(self, worker: int, bucket: int, life: int = 0, **others: Any) -> Any:
        (answer,) = self.ask(worker, Pull(bucket=bucket, **others), None, life)
        return answer

    def held(self, worker: int, bucket: int) -> torch.Tensor | None:
        coded = self.server.shard.compression
        assert coded is not None
        assert coded.replicas is not None
        shadow = coded.replicas.get((worker, bucket))
        return None if shadow is None else shadow.values

    def all_is(self) -> tuple[Any, ...]:
        """Whatever a refused push might have changed."""
        store, members = self.server.shard.store, self.server.shard.members
        return (
            [flat.tolist() for flat in store.flats],
            list(store.versions),
            [(members.clock(w), dict(members[w].begun)) for w in (0, 1)],
            members.furthest,
        )


def flat(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


GIVEN = flat(1, -5, 2, 0, 0, 3, 7, 1, 1, -2)
DECODED = [0, -5, 0, 0, 0, 0, 7, 0, 0, 0]


def refusal_of(answers: list[Reply]) -> str:
    (answer,) = answers
    assert isinstance(answer.message, Rejected), answer
    return answer.message.reason


# ---- pushes ----


def test_a_push_is_decoded_and_goes_on_as_a_gradient() -> None:
    talk = Talk()
    code = talk.encoded(0, 0, GIVEN)
    (answer,) = talk.push_code(0, 0, 0, code)
    assert answer.payload is not None
    assert (-answer.payload).tolist() == DECODED


def test_a_part_of_a_tensor_is_coded_as_a_tensor() -> None:
    """Each unit by itself, so that no server needs what another one holds."""
    shapes = [view.shape for view in views(GIVEN, UNITS[0])]
    assert shapes == [(2, 3), (1, 4)]


@pytest.mark.parametrize("weight", [0.25, 1 / 3, 1.0])
def test_a_code_of_a_share_is_a_gradient_at_its_weight(weight: float) -> None:
    """Adam does not depend on a gradient's size, but on its weight."""
    talk = Talk()
    code = talk.encoded(0, 0, GIVEN * weight)
    (answer,) = talk.push_code(0, 0, 0, code, weight=weight)
    assert answer.payload is not None
    found = (-answer.payload / weight).tolist()
    assert found == pytest.approx([float(v) for v in DECODED])


def test_nothing_is_pushed_with_no_weight() -> None:
    talk = Talk()
    (answer,) = talk.push_code(0, 0, 0, talk.encoded(0, 0, GIVEN * 0), weight=0.0)
    assert answer.payload is not None
    assert not answer.payload.any()


def test_a_mean_is_of_what_was_decoded() -> None:
    talk = Talk(method=Backup())
    for worker, sign in ((0, 1), (1, -3)):
        code = talk.encoded(worker, 0, GIVEN * sign * 0.5)
        answers = talk.push_code(worker, 0, 0, code, weight=0.5)
    assert len(answers) == 2
    assert answers[0].payload is not None
    assert answers[0].payload.tolist() == DECODED


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_travels(bad: float) -> None:
    talk = Talk()
    given = GIVEN.clone()
    given[2] = bad
    (answer,) = talk.push_code(0, 0, 0, talk.encoded(0, 0, given))
    assert answer.payload is not None
    assert not answer.payload.isfinite().all()


def test_coding_is_counted_as_work() -> None:
    talk = Talk(replies="deltas")
    for worker in (0, 1):
        talk.pull(worker, 0)
    talk.server.take_work()
    talk.push_code(0, 0, 0, talk.encoded(0, 0, GIVEN))
    before, after = talk.code.memory_passes(1)
    work = talk.server.take_work()
    assert work.stepped == 80
    assert work.coded == 80 * (after + before + after + 6)


# ---- what is refused ----


def codes_that_do_not_fit(good: torch.Tensor) -> dict[str, Any]:
    far = good.clone()
    far[:8] = to_bytes(torch.tensor([6]))
    below = good.clone()
    below[:8] = to_bytes(torch.tensor([-1]))
    return {
        "cut off": good[:-1],
        "nothing of it": good[:0],
        "too long": torch.cat([good, good[:1]]),
        "outside": far,
        "below": below,
        "no payload": None,
        "a gradient": GIVEN,
        "other bytes": good.view(torch.int32),
    }


@pytest.mark.parametrize("replies", ["full", "deltas"])
@pytest.mark.parametrize(
    "what", codes_that_do_not_fit(torch.zeros(32, dtype=torch.uint8))
)
def test_a_code_that_does_not_fit_changes_nothing(what: str, replies: str) -> None:
    talk = Talk(replies=replies)
    for worker in (0, 1):
        for bucket in range(2):
            talk.pull(worker, bucket)
    good = talk.encoded(0, 0, GIVEN)
    before = talk.all_is()
    refusal_of(talk.push_code(0, 0, 0, codes_that_do_not_fit(good)[what]))
    assert talk.all_is() == before
    (answer,) = talk.push_code(0, 0, 0, good)
    assert isinstance(answer.message, Parameters)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"units": [0]}, "a bucket is pushed as a whole"),
        ({"late": True}, "a bucket is pushed as a whole"),
        ({"weight": -1.0}, "a weight of 0 or more"),
        ({"weight": float("nan")}, "a weight of 0 or more"),
        ({"step": 10**9}, "nobody is beyond"),
    ],
    ids=str,
)
def test_a_push_that_makes_no_sense_changes_nothing(others: Any, said: str) -> None:
    talk = Talk()
    code, before = talk.encoded(0, 0, GIVEN), talk.all_is()
    step = others.pop("step", 0)
    assert said in refusal_of(talk.push_code(0, step, 0, code, **others))
    assert talk.all_is() == before
    unknown = talk.ask(0, pushed(0, 5), code)
    assert "expected a bucket of" in refusal_of(unknown)


def test_without_compression_bytes_are_no_gradient() -> None:
    talk = Talk()
    talk.server = ParameterServer(2, lambda _: ASP().server(2))
    talk.numbers.clear()
    talk.begin(0, 1)
    code = torch.zeros(2, dtype=torch.uint8)
    assert "expected 2 elements" in refusal_of(talk.ask(0, pushed(0, 0), code))


def alone() -> list[str]:
    """Compressors whose codes stand alone, as they are registered."""
    return sorted(name for name in COMPRESSORS if make(name).decodes_per_worker)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("name", ["largest", *alone()])
def test_mutated_codes_are_decoded_or_refused(name: str, dtype: str) -> None:
    """Whatever comes, the server lives, and a push that is refused has changed nothing."""
    talk = Talk(name, dtype=dtype)
    rng, step, refused = random.Random(name), [0, 0], 0
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        worker = number % 2
        bucket = 0
        given = torch.randn(SIZES[bucket], generator=generator, dtype=torch.float64)
        code = talk.encoded(worker, bucket, given)
        bad = _mutated(rng, code)
        before = talk.all_is()
        (answer,) = talk.push_code(worker, step[worker], bucket, bad)
        if isinstance(answer.message, Rejected):
            refused += 1
            assert repr(talk.all_is()) == repr(before)
            talk.push_code(worker, step[worker], bucket, code)
        tail = talk.encoded(worker, 1, torch.zeros(3))
        talk.push_code(worker, step[worker], 1, tail)
        step[worker] += 1
    assert refused > 20


def _mutated(rng: random.Random, code: torch.Tensor) -> torch.Tensor:
    data = bytearray(code.numpy().tobytes())
    kind = rng.randrange(4)
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        data += rng.randbytes(rng.choice((1, 4, 1000)))
    elif kind == 2:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        data[:] = rng.randbytes(len(data))
    return torch.frombuffer(data or bytearray(1), dtype=torch.uint8)[: len(data)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["largest", *alone()])
def test_a_code_is_as_large_as_is_said(name: str, dtype: str) -> None:
    kind = DTYPES[dtype]
    if not (kind.is_floating_point or kind.is_complex):
        return
    code: Any = make(name)
    parts = [torch.ones(shape, dtype=kind) for shape in ((64, 48), (5,), (), (0, 3))]
    states = [code.init_state(part, f"{n}", 0) for n, part in enumerate(parts)]
    if any("steps" in str(state) for state in states):
        return  # it changes from step to step
    shapes = [part.shape for part in parts]
    assert code.encode(parts, states).numel() == code_bytes(code, shapes, kind)


# ---- who may join ----


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"compression": ""}, "compression is 'largest' for who joined first and ''"),
        ({"replies": "deltas"}, "replies is 'full' for who joined first and"),
    ],
    ids=str,
)
def test_another_compression_is_refused(theirs: Any, said: str) -> None:
    talk = Case(ASP())
    talk.ask(0, join_of())
    assert said in talk.refusal(1, structs.replace(join_of(), **theirs))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nothing-such", "unknown compression"),
        ("int8:nothing=1", "unknown key"),
        ("largest:warmup_steps=3", "begins later"),
        ("none", "needs those of all workers"),
    ],
)
def test_what_a_server_cannot_decode_is_refused_at_the_start(
    spec: str, said: str
) -> None:
    case = Case(ASP())
    assert said in case.refusal(0, join_of(spec))
    assert not case.server.shard.is_held
    (answer,) = case.ask(0, join_of())
    assert isinstance(answer.message, Joined)


# ---- differences ----


def differing() -> Talk:
    talk = Talk(replies="deltas")
    for worker in (0, 1):
        for bucket in range(2):
            assert talk.pull(worker, bucket).message.sequence == 1
    return talk


def added(talk: Talk, bucket: int, held: torch.Tensor, answer: Any) -> torch.Tensor:
    """What a worker makes of an answer."""
    difference = torch.empty_like(held)
    talk.code.decode(answer.payload, views(difference, UNITS[bucket]))
    return held + difference


def test_a_push_is_answered_with_a_code_of_what_has_changed() -> None:
    talk = differing()
    held = [talk.pull(worker, 0).payload.clone() for worker in (0, 1)]
    for step in range(4):
        for worker in (0, 1):
            given = GIVEN.roll(3 * step + worker)
            code = talk.encoded(worker, 0, given)
            (answer,) = talk.push_code(worker, step, 0, code)
            assert answer.payload is not None
            assert answer.payload.numel() == 2 * 16
            assert answer.message.sequence == step + 3
            held[worker] = added(talk, 0, held[worker], answer)
            mine = talk.held(worker, 0)
            assert mine is not None
            assert torch.equal(mine, held[worker])
            talk.push_code(worker, step, 1, talk.encoded(worker, 1, torch.zeros(3)))
    # What was left out is in the next ones, until nothing is left.
    now = talk.server.shard.store.flats[0]
    assert not torch.equal(held[0], now)
    for step in range(4, 12):
        code = talk.encoded(0, 0, GIVEN * 0)
        (answer,) = talk.push_code(0, step, 0, code)
        held[0] = added(talk, 0, held[0], answer)
        talk.push_code(0, step, 1, talk.encoded(0, 1, torch.zeros(3)))
    torch.testing.assert_close(held[0], now, rtol=1e-14, atol=1e-14)


def test_a_look_changes_nothing_that_is_held() -> None:
    talk = differing()
    talk.push_code(0, 0, 0, talk.encoded(0, 0, GIVEN))
    before = talk.held(1, 0)
    assert before is not None
    answer = talk.pull(1, 0, peek=True)
    assert (-answer.payload).tolist() == DECODED
    assert torch.equal(before, talk.held(1, 0))
    (difference,) = talk.push_code(1, 0, 0, talk.encoded(1, 0, GIVEN * 0))
    assert difference.message.sequence == 2
    assert added(talk, 0, before, difference).tolist() == (-flat(*DECODED)).tolist()


def test_a_pull_is_dense_and_is_what_is_held_from_then_on() -> None:
    talk = differing()
    talk.push_code(0, 0, 0, talk.encoded(0, 0, GIVEN))
    answer = talk.pull(1, 0)
    assert answer.message.sequence == 2
    assert torch.equal(answer.payload, talk.held(1, 0))
    (difference,) = talk.push_code(1, 0, 0, talk.encoded(1, 0, GIVEN * 0))
    assert difference.message.sequence == 3
    assert torch.equal(added(talk, 0, answer.payload, difference), answer.payload)


def test_an_answer_is_not_written_to_by_the_next() -> None:
    talk = differing()
    first = talk.pull(0, 0).payload
    kept = first.clone()
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(3):
        (answer,) = talk.push_code(0, step, 0, talk.encoded(0, 0, GIVEN))
        assert answer.payload is not None
        earlier.append((answer.payload, answer.payload.clone()))
        assert all(torch.equal(now, then) for now, then in earlier)
        talk.push_code(0, step, 1, talk.encoded(0, 1, torch.zeros(3)))
    assert torch.equal(first, kept)


def test_a_push_that_comes_again_is_refused_and_advances_nothing() -> None:
    talk = differing()
    message = pushed(0, 0, used=[True, True])
    code = talk.encoded(0, 0, GIVEN)
    talk.server.on_request(talk.sender(0), message, code.clone(), 0.0)
    before = talk.all_is(), talk.held(0, 0)
    assert before[1] is not None
    kept = before[1].clone()
    assert "has pushed bucket 0 of step 0 before" in refusal_of(
        talk.push_code(0, 0, 0, code)
    )
    assert talk.all_is() == before[0]
    assert torch.equal(kept, before[1])


def test_who_has_not_pulled_gets_no_difference() -> None:
    talk = Talk(replies="deltas")
    code = talk.encoded(0, 0, GIVEN)
    said = refusal_of(talk.push_code(0, 0, 0, code))
    assert "worker 0 has not pulled bucket 0" in said


def test_another_life_begins_with_all_of_it() -> None:
    talk = differing()
    talk.push_code(0, 0, 0, talk.encoded(0, 0, GIVEN))
    talk.server.on_worker_lost(0, 0, 0.0)
    assert talk.held(0, 0) is None
    assert talk.held(1, 0) is not None
    talk.ask(0, talk.joins, None, 1)
    answer = talk.pull(0, 0, life=1)
    assert answer.message.sequence == 1
    assert (-answer.payload).tolist() == DECODED


def test_copies_are_bounded_by_the_workers() -> None:
    """However many lives they have; and who leaves needs none."""
    talk = differing()
    coded = talk.server.shard.compression
    assert coded is not None
    assert coded.replicas is not None
    for life in range(1, 6):
        talk.ask(1, talk.joins, None, life)
        for bucket in range(2):
            talk.pull(1, bucket, life=life)
        assert len(coded.replicas) == 4
    talk.ask(1, Leave(), None, 5)
    talk.ask(0, Leave())
    talk.pull(0, 0)
    assert {worker for worker, _ in coded.replicas} == {1}
    talk.pull(1, 0, life=5)
    assert not coded.replicas


def test_a_load_begins_anew_for_all() -> None:
    talk = differing()
    talk.push_code(0, 0, 0, talk.encoded(0, 0, GIVEN))
    talk.push_code(0, 0, 1, talk.encoded(0, 1, torch.ones(3)))
    for worker in (0, 1):
        talk.arrive(worker)
    for bucket, size in enumerate(SIZES):
        talk.ask(0, Load(bucket=bucket), torch.full((size,), 5.0, dtype=torch.float64))
    for worker in (0, 1):
        for bucket in range(2):
            answer = talk.pull(worker, bucket)
            assert answer.payload.unique().tolist() == [5.0]
    for worker in (0, 1):
        talk.arrive(worker, kind="pulled")
    (difference,) = talk.push_code(0, 1, 0, talk.encoded(0, 0, GIVEN * 0))
    held = torch.full((10,), 5.0, dtype=torch.float64)
    assert torch.equal(added(talk, 0, held, difference), held)


def test_after_a_restart_of_the_server_all_begin_with_all_of_it() -> None:
    join = structs.replace(join_of(replies="deltas"), method="asp")
    talk = Talk(replies="deltas")
    talk.server, talk.joins = make_parameter_server(2, "server"), join
    talk.numbers.clear()
    for worker in (0, 1):
        talk.ask(worker, join)
    for bucket, size in enumerate(SIZES):
        talk.ask(0, Load(bucket=bucket), torch.zeros(size, dtype=torch.float64))
    for worker in (0, 1):
        for bucket in range(2):
            talk.pull(worker, bucket)
            given = GIVEN[: SIZES[bucket]]
            talk.push_code(worker, 0, bucket, talk.encoded(worker, bucket, given))
    saved = talk.server.snapshot()
    again = make_parameter_server(2, "server")
    again.restore(saved)
    assert again.shard.compression is not None
    assert again.shard.compression.replicas == {}
    talk.server = again
    for worker in (0, 1):
        talk.ask(worker, join, None, 1)
        answer = talk.pull(worker, 0, life=1)
        assert answer.message.sequence == 1
        assert torch.equal(answer.payload, saved["store"]["flats"][0])
