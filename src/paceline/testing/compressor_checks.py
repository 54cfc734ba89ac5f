"""The laws of compressors: each runs on simulated workers in one process, in milliseconds.

A compressor of your own:

    from paceline.testing import check_compressor
    check_compressor(MyCompressor(density=0.01))
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from paceline.compression import (
    COMMON,
    AllToAll,
    Compressor,
    Gather,
    GradientCompression,
    Leg,
    RankInfo,
    Request,
    Rounds,
    State,
    Sum,
)
from paceline.errors import PacelineError, UsageError
from paceline.testing.problems import require

SHAPES = ((4, 3), (257,), (0,), (40, 30), (5,), (), (24, 5, 12))
"""Small and large matrices, vectors, an empty tensor, a scalar."""

Gradients = Sequence[Sequence[torch.Tensor]]
"""The tensors of each worker."""


@dataclass(frozen=True)
class Mean:
    """A mean and its communication. *results* and *sent* are by worker; *codes* are one worker's compressed
    gradients in each round, unchanged."""

    results: list[list[torch.Tensor]]
    sent: list[list[torch.Tensor]]
    codes: list[Request]

    @property
    def bytes(self) -> int:
        """Bytes of one worker's compressed gradients on the network."""
        return sum(round(leg.size) for leg in self.legs)

    @property
    def legs(self) -> list[Leg]:
        """One worker's compressed gradients, round by round."""
        return [
            Leg(_KINDS[type(asked)], asked.code.numel() * asked.code.itemsize)
            for asked in self.codes
        ]

    @property
    def is_compressed_twice(self) -> bool:
        """Whether owners have compressed the sums again."""
        return any(isinstance(asked, AllToAll) for asked in self.codes)

    @property
    def rounding(self) -> float:
        """Largest difference between two orders of adding the same numbers, relative to the largest."""
        kinds = [part.dtype for part in self.results[0]]
        kinds += [one.code.dtype for one in self.codes if isinstance(one, Sum)]
        floating = [kind for kind in kinds if kind.is_floating_point]
        coarsest = max(torch.finfo(kind).eps for kind in (torch.float64, *floating))
        return 4 * len(self.results) * coarsest


_KINDS: dict[type, Literal["sum", "gather", "all-to-all"]] = {
    Sum: "sum",
    Gather: "gather",
    AllToAll: "all-to-all",
}


class Workers:
    """Several workers with tensors like *like*, and their compressor states."""

    def __init__(
        self,
        compressor: Compressor | GradientCompression,
        like: Sequence[torch.Tensor],
        workers: int,
    ) -> None:
        self.compression = compression = _as_compression(compressor)
        self.states: list[list[State]] = [
            [compression.init_state(t, f"tensor {i}", rank) for i, t in enumerate(like)]
            for rank in range(workers)
        ]

    def mean(self, gradients: Gradients) -> Mean:
        """Form one mean. Raises `CheckFailedError` if workers yield different requests, or tensors that
        cannot be sent."""
        results = [[part.clone() for part in own] for own in gradients]
        sent = [[torch.zeros_like(part) for part in own] for own in gradients]
        rows = zip(results, self.states, sent, strict=True)
        workers = len(results)
        codings = [
            self.compression.average(parts, states, RankInfo(rank, workers), own)
            for rank, (parts, states, own) in enumerate(rows)
        ]
        codes: list[Request] = []
        answers: list[torch.Tensor | None] = [None] * workers
        while True:
            asked = [_resume(c, a) for c, a in zip(codings, answers, strict=True)]
            first = asked[0]
            _require_alike(asked)
            if first is None:
                return Mean(results, sent, codes)
            codes.append(type(first)(first.code.clone()))
            answers = list(_answers([one for one in asked if one is not None]))

    def inherit(self, former: Workers) -> None:
        """Continue a job with these workers after the *former* ones."""
        for states in self.states:
            for number, state in enumerate(states):
                theirs = [of_one[number] for of_one in former.states]
                self.compression.inherit_state(state, theirs, len(self.states))


def gradients(
    workers: int = 3,
    seed: int = 0,
    scale: float = 1.0,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[list[torch.Tensor]]:
    """Each worker's gradients, of different magnitude in different tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(shape, generator=generator) * scale * 10.0**-number
            for number, shape in enumerate(shapes)
        ]
        for _ in range(workers)
    ]


def _resume(coding: Rounds, answer: torch.Tensor | None) -> Request | None:
    try:
        return next(coding) if answer is None else coding.send(answer)
    except StopIteration:
        return None


def _answers(asked: Sequence[Request]) -> list[torch.Tensor]:
    """The results that a collective returns to each worker."""
    if isinstance(asked[0], Gather):
        together = torch.stack([one.code for one in asked])
        return [together.clone() for _ in asked]
    if isinstance(asked[0], AllToAll):
        rows = [one.code.view(len(asked), -1) for one in asked]
        return [torch.stack([row[to] for row in rows]) for to in range(len(asked))]
    total = asked[0].code.clone()
    for one in asked[1:]:
        total += one.code
    return [one.code.copy_(total) for one in asked]


def _require_alike(asked: Sequence[Request | None]) -> None:
    described = [_described(one) for one in asked]
    require(
        len(set(described)) == 1,
        f"workers yield different requests: {'; '.join(described)}",
    )
    if asked[0] is not None:
        code = asked[0].code
        require(
            code.dim() == 1 and code.is_contiguous() and bool(code.numel()),
            f"yields {described[0]}: expected a tensor that is flat, contiguous and not empty",
        )
    if isinstance(asked[0], AllToAll):
        require(
            asked[0].code.numel() % len(asked) == 0,
            f"yields {described[0]}: expected {len(asked)} equal rows, one for each worker",
        )


def _described(one: Request | None) -> str:
    if one is None:
        return "nothing more"
    kind = str(one.code.dtype).removeprefix("torch.")
    return f"{type(one).__name__} of {kind} {tuple(one.code.shape)}"


def workers_of(
    compression: GradientCompression,
    workers: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Workers:
    return Workers(compression, [part.to(dtype) for part in gradients(1)[0]], workers)


def require_close(
    found: Sequence[Any], expected: Sequence[Any], rounding: float, otherwise: str
) -> None:
    for a, b in zip(found, expected, strict=True):
        if b.numel():
            difference = (a - b).abs().max().item()
            allowed = rounding * (1.0 + b.abs().max().item())
            require(difference <= allowed, f"{otherwise}, by up to {difference:.2g}")


def require_states(workers: Workers) -> None:
    kind = workers.compression.state
    first, *others = workers.states
    # Some compressors only have state for matrices.
    kept = [state for state in first if state]
    require(bool(kept) == (kind != "none"), f"declares state {kind!r}, but has {kept}")
    for state in kept:
        _require_plain(state)
    for other in others:
        if kind == "common":
            require(_equal(first, other), "common state differs between workers")
        require(
            _equal(_common(first), _common(other)),
            "state under the key 'common' differs between workers",
        )


def _common(value: Any) -> Any:
    """The common part of a state, as strings and tensors."""
    if isinstance(value, list):
        return [_common(one) for one in value]
    return {
        key: one if key == COMMON else _common(one)
        for key, one in value.items()
        if isinstance(one, dict)
    }


def _require_plain(value: object) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _require_plain(inner)
        return
    require(
        isinstance(value, (torch.Tensor, int, float, str)),
        f"a state holds a {type(value).__name__}: expected tensors, numbers, strings, and "
        "dicts of them",
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


DRAWS = 400
"""Number of results whose mean must be the sum, if a compressor is unbiased."""

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def rounds_and_linearity_are_as_declared(compression: GradientCompression) -> None:
    """The number of successive collectives is as declared, with tensors of all sizes together. A linear
    compressor uses only sums."""
    mean = workers_of(compression.steady_state()).mean(gradients())
    require(
        len(mean.codes) == compression.code.rounds,
        f"declares {compression.code.rounds} rounds, but needs {len(mean.codes)}",
    )
    require(
        not compression.code.linear or all(isinstance(one, Sum) for one in mean.codes),
        "declares linear = True, but yields other requests than Sum",
    )


def traffic_is_as_declared(compression: GradientCompression) -> None:
    """The bytes sent are as declared, including indices and scales: simulated tensors are priced by them."""
    steady = compression.steady_state()
    for workers in (1, 2, 3):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int32):
            _require_traffic(steady, workers, dtype)


def _require_traffic(
    steady: GradientCompression, workers: int, dtype: torch.dtype
) -> None:
    group, steps = workers_of(steady, workers, dtype), 4
    sent: Counter[str] = Counter()
    for step in range(steps):
        given = [[(9 * p).to(dtype) for p in own] for own in gradients(workers, step)]
        for leg in group.mean(given).legs:
            sent[leg.kind] += round(leg.size)
    declared: Counter[str] = Counter()
    for leg in steady.code.wire_bytes(SHAPES, dtype, workers):
        declared[leg.kind] += round(steps * leg.size)
    require(
        declared == sent,
        f"declares {dict(declared)} bytes in {steps} means of {dtype} tensors over {workers} "
        f"workers, but sends {dict(sent)}",
    )


def decodes_per_worker_exactly(compression: GradientCompression) -> None:
    """One worker's compressed gradient is decompressed without the others', and the results add up to the
    mean. Truncated or overlong data is refused."""
    workers, same = workers_of(compression), workers_of(compression)
    for step in range(3):
        given = gradients(seed=step)
        total = [torch.zeros_like(part) for part in given[0]]
        for own, states in zip(given, same.states, strict=True):
            before = [part.clone() for part in own]
            code = compression.encode(own, states)
            require(
                all(torch.equal(a, b) for a, b in zip(before, own, strict=True)),
                "encode changes its input tensors",
            )
            compression.decode(code, total, add=True)
        mean = workers.mean(given)
        otherwise = "decompressed gradients do not add up to the mean"
        if not mean.is_compressed_twice:
            require_close(mean.results[0], total, mean.rounding, otherwise)
            continue
        for result, part in zip(mean.results[0], total, strict=True):
            require(bool((result - part).norm() <= part.norm() / 2), otherwise)
    for wrong in (code[:-1], torch.cat([code, code[:1]]), code[:0]):
        try:
            compression.decode(wrong, total)
        except UsageError:
            continue
        require(
            False,
            f"decode accepts {wrong.numel()} bytes: expected UsageError, since a compressed "
            f"gradient has {code.numel()}",
        )


def zeros_stay_zeros(compression: GradientCompression) -> None:
    """If all workers' gradients are zero, so is the result."""
    workers = workers_of(compression)
    for _ in range(2):
        for results in workers.mean(gradients(scale=0.0)).results:
            require(
                all(not part.any() for part in results),
                "gradients are zero on all workers, but the result is not",
            )


def nothing_is_sent_of_nothing(compression: GradientCompression) -> None:
    """A bucket without elements uses no collective."""
    for shapes in ((), ((0,), (0, 3))):
        given = gradients(shapes=shapes)
        mean = Workers(compression, given[0], 3).mean(given)
        require(not mean.codes, "yields a request although there are no elements")


def a_worker_without_data_changes_nothing(compression: GradientCompression) -> None:
    """A worker whose tensors are zero does not change the others' result."""
    three, two = workers_of(compression, 3), workers_of(compression, 2)
    for step in range(3):
        given = [*gradients(2, seed=step), gradients(1, scale=0.0)[0]]
        with_it, without = three.mean(given), two.mean(given[:2])
        allowed = with_it.rounding
        if step and with_it.is_compressed_twice and compression.error_feedback:
            # Ownership differs, so another residual has the second rounding.
            allowed = 2**-3
        require_close(
            with_it.results[0],
            without.results[0],
            allowed,
            "a worker whose tensors are zero changes the others' result",
        )


def sums_of_codes_are_codes_of_sums(compression: GradientCompression) -> None:
    """The sum of compressed gradients is a compressed gradient, so an aggregator may forward it."""
    given = [[part.mul(4).round() for part in own] for own in gradients()]
    total = [torch.stack(parts).sum(0) for parts in zip(*given, strict=True)]
    nothing = gradients(2, scale=0.0)
    apart = workers_of(compression).mean(given).results[0]
    together = workers_of(compression).mean([total, *nothing]).results[0]
    require_close(  # Whole buckets are compared, since tensors may share a scale and so its rounding.
        [torch.cat([part.reshape(-1) for part in apart])],
        [torch.cat([part.reshape(-1) for part in together])],
        1e-4,
        "the sum of three workers' compressed gradients is not their compressed sum",
    )


def results_are_sums_of_what_was_sent(compression: GradientCompression) -> None:
    """Each worker knows its contribution to the result, which its residual needs."""
    workers = workers_of(compression)
    for step in range(3):
        mean = workers.mean(gradients(seed=step))
        total = [torch.stack(parts).sum(0) for parts in zip(*mean.sent, strict=True)]
        require_close(
            mean.results[0],
            total,
            mean.rounding,
            "the result is not the sum of the contributions (sent) of all workers",
        )


def codes_are_unbiased(compression: GradientCompression) -> None:
    """The mean of many results is the sum, within 5 standard errors."""
    workers, given = workers_of(compression, 2), gradients(2)
    draws = [workers.mean(given).results[0] for _ in range(DRAWS)]
    for number, drawn in enumerate(zip(*draws, strict=True)):
        every = torch.stack(drawn).double()
        if not every.numel():
            continue
        error = (every.mean(0) - sum(own[number].double() for own in given)).abs()
        allowed = 5 * every.std(0) / DRAWS**0.5 + 1e-6
        require(
            bool((error <= allowed).all()),
            f"declares unbiased = True, but the mean of {DRAWS} results of one sum has an error "
            f"of {error.max():.3g}, more than chance allows",
        )


def less_is_left_than_was_given(compression: GradientCompression) -> None:
    """The compression error is smaller than the gradient, so residuals do not grow without bound. This also
    holds after a step with zero gradients on all workers."""
    workers, given = workers_of(compression), gradients()
    workers.mean(gradients(scale=0.0))
    mean = workers.mean(given)
    for own, sent in zip(given, mean.sent, strict=True):
        pairs = list(zip(own, sent, strict=True))
        left = sum(float((part - code).norm() ** 2) for part, code in pairs) ** 0.5
        whole = sum(float(part.norm() ** 2) for part in own) ** 0.5
        require(
            left < whole,
            f"the compression error of a gradient of norm {whole:.3g} has norm {left:.3g}: "
            "expected less",
        )


def all_workers_end_with_the_same_bits(compression: GradientCompression) -> None:
    """Results are bit-equal on all workers, so models stay equal without being compared."""
    workers = workers_of(compression)
    for step in range(3):
        first, *others = workers.mean(gradients(seed=step)).results
        for other in others:
            require(
                all(torch.equal(a, b) for a, b in zip(first, other, strict=True)),
                "workers end with different results",
            )


def states_are_as_declared(compression: GradientCompression) -> None:
    """A compressor that declares no state has none. Common state is equal on all workers. All state is plain
    data."""
    workers = workers_of(compression)
    for step in range(3):
        workers.mean(gradients(seed=step))
    require_states(workers)


def nothing_is_kept_elsewhere(compression: GradientCompression) -> None:
    """All state is in the states: a new compressor continues from copies of another one's states exactly as
    that one does, at any step."""
    for saved_at in (1, 2, 3):
        again, straight = (
            workers_of(one) for one in (copy.deepcopy(compression), compression)
        )
        for step in range(saved_at):
            straight.mean(gradients(seed=step))
        again.states = copy.deepcopy(straight.states)
        for step in range(saved_at, saved_at + 3):
            given = gradients(seed=step)
            results = (one.mean(given).results[0] for one in (straight, again))
            require(
                all(torch.equal(a, b) for a, b in zip(*results, strict=True)),
                "copied states do not lead to the same results: some state is kept elsewhere",
            )


def the_number_of_workers_may_change(compression: GradientCompression) -> None:
    """Two workers continue from the states of three, and four from theirs. Common state is kept."""
    former = workers_of(compression)
    for step, count in enumerate((3, 2, 4)):
        workers = workers_of(compression, count)
        if step:
            workers.inherit(former)
            require(
                _equal(_common(workers.states[0]), _common(former.states[0])),
                "state under the key 'common' is lost when the number of workers changes",
            )
        for _ in range(2):
            results = workers.mean(gradients(count, seed=step)).results
            require(
                all(bool(part.isfinite().all()) for part in results[0]),
                f"after a change to {count} workers, results are not finite",
            )
        require_states(workers)
        former = workers


def types_and_shapes_stay(compression: GradientCompression) -> None:
    """Results keep the tensors' type and shape, and sums of integers are exact."""
    for dtype in (*FLOATING, torch.complex64, torch.int64):
        given = [[(9 * p).to(dtype) for p in own] for own in gradients()]
        results = Workers(compression, given[0], 3).mean(given).results
        for own, parts in zip(given, results, strict=True):
            for part, result in zip(own, parts, strict=True):
                require(
                    result.dtype == dtype and result.shape == part.shape,
                    f"a {dtype} tensor of shape {tuple(part.shape)} is now "
                    f"{result.dtype}, {tuple(result.shape)}",
                )
                require(
                    bool(result.isfinite().all()),
                    f"results of ordinary {dtype} numbers are not finite",
                )
        total = [torch.stack(parts).sum(0) for parts in zip(*given, strict=True)]
        exact = zip(total, results[0], strict=True)
        require(
            dtype.is_floating_point
            or dtype.is_complex
            or all(torch.equal(a, b) for a, b in exact),
            f"a sum of {dtype} numbers is not exact",
        )


def what_is_not_finite_shows(compression: GradientCompression) -> None:
    """All workers see an overflow of one worker in this step, and not in the next."""
    for bad in (torch.inf, -torch.inf, torch.nan):
        workers, given = workers_of(compression), gradients()
        given[1][1][100] = bad
        for results in workers.mean(given).results:
            require(
                not results[1].isfinite().all(),
                f"one worker's gradient has an element {bad}, but the result is finite",
            )
        later = workers.mean(gradients(seed=1)).results[0]
        require(
            all(bool(part.isfinite().all()) for part in later),
            f"one worker's gradient had an element {bad}, and the next step's result is not finite",
        )


def strides_change_nothing(compression: GradientCompression) -> None:
    """Results do not depend on strides, as in ``channels_last``: each element is found by its indices."""
    rows = workers_of(compression)
    others = Workers(compression, [_transposed(part) for part in gradients(1)[0]], 3)
    for step in range(3):
        given = gradients(seed=step)
        mean = rows.mean(given)
        other = others.mean([[_transposed(part) for part in own] for own in given])
        require_close(
            other.results[0],
            mean.results[0],
            mean.rounding,  # Matrix products may add up in another order.
            "tensors with other strides have different results",
        )


def _transposed(part: torch.Tensor) -> torch.Tensor:
    """The same tensor with its elements in another order in memory."""
    if part.dim() < 2:
        return part.clone()
    return part.transpose(0, -1).contiguous().transpose(0, -1)


def chance_is_its_own(compression: GradientCompression) -> None:
    """Global random generators do not change, since the script uses them, for example for dropout."""
    before = torch.get_rng_state()
    workers_of(compression).mean(gradients())
    require(
        torch.equal(before, torch.get_rng_state()),
        "draws from torch's global random generator",
    )


def nothing_is_lost(compression: GradientCompression) -> None:
    """At every step all results plus all residuals equal all gradients. This also holds if a worker has no
    gradient of a tensor, and if the number of workers changes."""
    workers, owed = workers_of(compression, 3, torch.float64), _zeros(torch.float64)
    allowed = 0.0
    for step in range(16):
        if step in (7, 10):
            former, count = workers, 2 if step == 7 else 4
            workers = workers_of(compression, count, torch.float64)
            workers.inherit(former)
        given = _doubles(len(workers.states), step)
        given[step % len(given)][step % len(SHAPES)].zero_()
        mean = workers.mean(given)
        allowed += mean.rounding
        for number, due in enumerate(owed):
            due += sum(own[number] for own in given) - mean.results[0][number]
        left = [
            sum(own[number]["residual"] for own in workers.states)
            for number in range(len(SHAPES))
        ]
        require_close(
            left, owed, allowed, "results and residuals do not add up to all gradients"
        )


def an_unused_tensor_keeps_its_residual(compression: GradientCompression) -> None:
    """A worker without a gradient of a tensor sends nothing of it: the tensor was unused, or the worker is out
    of data."""
    workers = workers_of(compression)
    for step in range(3):
        workers.mean(gradients(seed=step))
    before = _residuals(workers, 0)
    given = gradients(seed=3)
    given[0][3].zero_()
    mean = workers.mean(given)
    if mean.is_compressed_twice:
        return  # The residual also has the rounding of the part that this worker owns.
    require(
        torch.equal(_residuals(workers, 0)[3], before[3]) and not mean.sent[0][3].any(),
        "a tensor without a gradient is sent, or its residual changes",
    )


def a_skipped_step_changes_no_residual(compression: GradientCompression) -> None:
    """If a result is not finite, all workers' residuals stay: a GradScaler skips that step."""
    workers = workers_of(compression)
    for step in range(3):
        workers.mean(gradients(seed=step))
    before = [_residuals(workers, rank) for rank in range(3)]
    given = gradients(seed=3)
    given[1][1][100] = torch.inf
    workers.mean(given)
    for rank, kept in enumerate(before):
        pairs = zip(kept, _residuals(workers, rank), strict=True)
        require(
            all(torch.equal(one, other) for one, other in pairs),
            "a step whose result is not finite changes residuals",
        )


def _zeros(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


def _doubles(workers: int, seed: int) -> list[list[torch.Tensor]]:
    return [[part.double() for part in own] for own in gradients(workers, seed)]


def _residuals(workers: Workers, rank: int) -> list[torch.Tensor]:
    return [state["residual"].clone() for state in workers.states[rank]]


# ---- which law applies to which compressor ----


def _always(compression: GradientCompression) -> bool:
    return True


@dataclass(frozen=True)
class CompressorCheck:
    """A *law*, and the compressors that it applies to."""

    law: Callable[[GradientCompression], None]
    applies: Callable[[GradientCompression], bool] = _always

    @property
    def name(self) -> str:
        return self.law.__name__

    def __call__(self, compression: GradientCompression) -> None:
        self.law(compression)


COMPRESSOR_CHECKS: dict[str, CompressorCheck] = {
    check.name: check
    for check in (
        CompressorCheck(rounds_and_linearity_are_as_declared),
        CompressorCheck(zeros_stay_zeros),
        CompressorCheck(nothing_is_sent_of_nothing),
        CompressorCheck(a_worker_without_data_changes_nothing),
        CompressorCheck(sums_of_codes_are_codes_of_sums, lambda c: c.code.linear),
        CompressorCheck(results_are_sums_of_what_was_sent),
        CompressorCheck(codes_are_unbiased, lambda c: c.unbiased),
        CompressorCheck(less_is_left_than_was_given, lambda c: not c.unbiased),
        CompressorCheck(all_workers_end_with_the_same_bits),
        CompressorCheck(states_are_as_declared),
        CompressorCheck(nothing_is_kept_elsewhere),
        CompressorCheck(the_number_of_workers_may_change),
        CompressorCheck(types_and_shapes_stay),
        CompressorCheck(traffic_is_as_declared),
        CompressorCheck(strides_change_nothing),
        CompressorCheck(decodes_per_worker_exactly, lambda c: c.decodes_per_worker),
        CompressorCheck(what_is_not_finite_shows),
        CompressorCheck(chance_is_its_own),
        CompressorCheck(nothing_is_lost, lambda c: c.error_feedback),
        CompressorCheck(
            an_unused_tensor_keeps_its_residual,
            lambda c: c.error_feedback and c.code.state != "own",
        ),
        CompressorCheck(a_skipped_step_changes_no_residual, lambda c: c.error_feedback),
    )
}


def check_compressor(compressor: Compressor | GradientCompression) -> None:
    """Check all laws that apply to a compressor, without error feedback or with it.

    Args:
        compressor: The compressor. A `GradientCompression` may add error feedback.

    Raises:
        CheckFailedError: A law does not hold; the first one. A note of the error names it.

    Example:
        ::

            check_compressor(TopK(density=0.1))
            check_compressor(GradientCompression(TopK(density=0.1), error_feedback=True))
    """
    compression = _as_compression(compressor)
    for check in COMPRESSOR_CHECKS.values():
        if check.applies(compression):
            try:
                check(compression)
            except PacelineError as error:
                error.add_note(f"conformance: {check.name}")
                raise


def _as_compression(
    compressor: Compressor | GradientCompression,
) -> GradientCompression:
    if isinstance(compressor, Compressor):
        return GradientCompression(compressor)
    return compressor
