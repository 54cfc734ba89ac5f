"""Workloads that are counted: FLOPs worked by hand, torch's own order, and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.cluster.workload import Workload
from paceline.errors import UsageError
from tests.support.profiles import examples


def count(module: nn.Module, example: Any, **options: Any) -> Workload:
    """At one FLOP a second, so that seconds are FLOPs."""
    return Workload.from_module(module, example, 1.0, **options)


def refusal(module: Any, example: Any, rate: Any = 1.0) -> str:
    with pytest.raises(UsageError) as caught:
        Workload.from_module(module, example, rate)
    return str(caught.value)


def true_order(module: nn.Module, *arguments: Any, **keywords: Any) -> list[str]:
    """Names of tensors as torch accumulates their gradients, with values, on a CPU."""
    order: list[str] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: order.append(name)
            )
    module(*arguments, **keywords).sum().backward()
    return order


def order_of(workload: Workload) -> list[str]:
    return [workload.names[i] for i in workload.order]


# ---- FLOPs by hand ----


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_an_mlp_by_hand() -> None:
    workload = Workload.from_module(
        mlp(), torch.zeros(3, 4), 1e3, update=0.25, source="by hand"
    )
    # Products of (3 x 4)(4 x 8) and (3 x 8)(8 x 2), two FLOPs for each term.
    first, second = 2 * 3 * 4 * 8, 2 * 3 * 8 * 2
    assert workload.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert workload.sizes == (128, 32, 64, 8)
    assert workload.forward == pytest.approx(
        [
            first * 128 / 160 / 1e3,
            first * 32 / 160 / 1e3,
            second * 64 / 72 / 1e3,
            second * 8 / 72 / 1e3,
        ]
    )
    # The second layer's gradients are of its input and its weight; the first layer's input
    # needs none. A bias is accumulated before its weight, and has the sum.
    assert workload.backward == (0.0, first / 1e3, 0.0, 2 * second / 1e3)
    assert order_of(workload) == ["2.bias", "2.weight", "0.bias", "0.weight"]
    assert workload.ready_seconds == pytest.approx(
        [
            (first + second + 2 * second) / 1e3,
            (first + second + 2 * second) / 1e3,
            (first + second + 2 * second + first) / 1e3,
            (first + second + 2 * second + first) / 1e3,
        ]
    )
    assert (workload.update, workload.batch) == (0.25, 3.0)
    assert workload.source == "by hand"


def test_a_cnn_by_hand() -> None:
    cnn = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),  # to 4 x 6 x 6
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),  # to 8 x 3 x 3
        nn.Flatten(),
        nn.Linear(72, 5),
    )
    workload = count(cnn, torch.zeros(2, 3, 6, 6))
    first = 2 * 2 * (6 * 6) * (3 * 3) * 3 * 4
    second = 2 * 2 * (3 * 3) * (3 * 3) * 4 * 8
    linear = 2 * 2 * 72 * 5
    assert workload.forward_seconds == pytest.approx(first + second + linear)
    assert workload.forward[0] == first
    assert workload.forward[1:3] == (0.0, 0.0)  # BatchNorm's
    backward = dict(zip(workload.names, workload.backward, strict=True))
    assert backward["5.bias"] + backward["5.weight"] == 2 * linear
    assert backward["3.bias"] + backward["3.weight"] == 2 * second
    assert backward["1.weight"] + backward["1.bias"] == 0
    assert backward["0.weight"] == first
    assert order_of(workload) == true_order(cnn, torch.randn(2, 3, 6, 6))


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.floats(1.0, 1e15),
)
@settings(max_examples=examples(25))
def test_any_mlp(batch: int, widths: list[int], rate: float) -> None:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    workload = Workload.from_module(
        nn.Sequential(*layers), torch.zeros(batch, widths[0]), rate
    )
    forward = [2 * batch * layer.in_features * layer.out_features for layer in layers]
    assert workload.forward_seconds == pytest.approx(sum(forward) / rate)
    assert workload.backward_seconds == pytest.approx(
        (2 * sum(forward) - forward[0]) / rate
    )
    assert workload.order == tuple(range(2 * len(layers)))[::-1]
    assert workload.batch == batch


@given(
    groups=st.sampled_from([1, 2, 8]),
    stride=st.integers(1, 2),
    transposed=st.booleans(),
)
@settings(max_examples=examples(12))
def test_each_gradient_of_a_convolution_costs_its_forward(
    groups: int, stride: int, transposed: bool
) -> None:
    # Torch's own formula counts the weight's gradient as if there were no groups.
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    convolution = kind(8, 16, 3, stride=stride, padding=1, groups=groups, bias=False)
    before = nn.Conv2d(2, 8, 1, bias=False)
    workload = count(nn.Sequential(before, convolution), torch.zeros(2, 2, 7, 7))
    side = 7 if transposed or stride == 1 else 4
    forward = 2 * 2 * side * side * 9 * (8 * 16 // groups)
    assert workload.forward[1] == forward
    assert workload.backward[1] == 2 * forward


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(self.norm(x)).chunk(3, -1)
        split = [p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts]
        mixed = F.scaled_dot_product_attention(*split)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def test_attention_by_hand() -> None:
    sequences, tokens, width = 2, 5, 8
    model = nn.Sequential(nn.Embedding(11, width), Attention(width, heads=2))
    example = torch.zeros(sequences, tokens, dtype=torch.long)
    workload = count(model, example)
    project = 2 * sequences * tokens * width * 3 * width
    attend = 2 * (2 * sequences * tokens * tokens * width)
    out = 2 * sequences * tokens * width * width
    forward = dict(zip(workload.names, workload.forward, strict=True))
    # Attention has no tensors of its own: it belongs to the layer called before it.
    assert forward["1.query_key_value.weight"] + forward[
        "1.query_key_value.bias"
    ] == pytest.approx(project + attend)
    assert forward["1.out.weight"] + forward["1.out.bias"] == pytest.approx(out)
    assert workload.backward_seconds == 2 * (project + attend + out)
    assert order_of(workload) == true_order(model, example)


# ---- torch's own order ----


class Branches(nn.Module):
    """Registered in another order than used, with one branch that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.last(self.left(x) * self.scale + torch.tanh(self.right(x)))


def test_the_order_of_a_transformer_is_torchs_own() -> None:
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    workload = count(module, torch.zeros(2, 5, 16))
    assert order_of(workload) == true_order(module, torch.randn(2, 5, 16))


def test_tensors_without_a_gradient_come_last_and_cost_nothing() -> None:
    module = Branches()
    workload = count(module, torch.zeros(3, 4))
    order = order_of(workload)
    assert order[:-2] == true_order(module, torch.randn(3, 4))
    assert order[-2:] == ["unused.weight", "unused.bias"]
    assert workload.backward[:2] == (0.0, 0.0)
    assert workload.ready_seconds[-1] == workload.ready_seconds[-3]
    assert workload.forward_seconds == pytest.approx(2 * 3 * (3 * 16 + 8))
    assert sum(workload.forward[1:3]) > 0  # computed all the same


def test_a_recurrent_layer() -> None:
    workload = count(nn.LSTM(4, 8, num_layers=2), torch.zeros(5, 2, 4))
    gates = 4 * 8
    once = 2 * 2 * gates * ((4 + 8) + (8 + 8))
    assert workload.forward_seconds == pytest.approx(5 * once)
    assert len(workload.names) == 8


# ---- which tensors ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.middle(self.words(tokens)))
        return logits


def test_a_shared_tensor_is_counted_once_and_ready_when_complete() -> None:
    model, tokens = Tied(), torch.zeros(6, dtype=torch.long)
    workload = count(model, tokens)
    assert workload.names == ("words.weight", "middle.weight", "head.bias")
    head, middle = 2 * 6 * 4 * 10, 2 * 6 * 4 * 4
    assert workload.forward == pytest.approx(
        [head * 160 / 200, middle, head * 40 / 200]
    )
    # Complete only after the embedding's own gradient, which comes last of all.
    assert order_of(workload) == ["head.bias", "middle.weight", "words.weight"]
    assert order_of(workload) == true_order(model, tokens)
    assert workload.backward_seconds == 2 * (head + middle)


def test_frozen_and_empty_tensors_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[1].requires_grad_(False)
    model.empty = nn.Parameter(torch.zeros(0))
    workload = count(model, torch.zeros(3, 4))
    assert workload.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    first, frozen, last = 2 * 3 * 4 * 8, 2 * 3 * 8 * 8, 2 * 3 * 8 * 2
    # A frozen layer still costs: its own forward, and its input's gradient.
    assert workload.forward_seconds == pytest.approx(first + frozen + last)
    assert workload.backward == (0.0, frozen + first, 0.0, 2 * last)
    assert workload.order == (3, 2, 1, 0)


def test_sizes_are_bytes() -> None:
    workload = count(mlp().half(), torch.zeros(3, 4, dtype=torch.half))
    assert workload.sizes == (64, 16, 32, 4)


class List(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[0] @ self.weights[1]


def test_without_a_layer_the_forward_pass_is_spread_over_all() -> None:
    workload = count(List(), torch.zeros(3, 4))
    forward = 2 * 3 * 4 * (4 + 12)
    assert workload.forward == (forward / 4, forward * 3 / 4)


# ---- how it runs ----


class Checkpointed(nn.Module):
    """Each block's two products are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_in_the_backward_pass(reentrant: bool) -> None:
    workload = count(Checkpointed(reentrant), torch.zeros(3, 4))
    product = 2 * 3 * 4 * 4
    assert workload.forward_seconds == pytest.approx(3 * product)
    # A checkpoint that is not reentrant stops once it has what the backward pass needs,
    # which is before its last product.
    again = 2 if reentrant else 1
    assert workload.backward_seconds == (5 + again) * product
    assert (
        workload.backward[5] == (2 + again) * product
    )  # block.2.bias, the first ready


class Point(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: list[dict[str, torch.Tensor]]


class Then(nn.Linear):
    """A layer whose output is given to a function."""

    def __init__(self, end: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(4, 2)
        self.end = end

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        return self.end(super().forward(x) * scale)


@pytest.mark.parametrize(
    "structure",
    [
        lambda y: (None, (y.argmax(-1), y)),
        lambda y: Point(y, "y"),
        lambda y: {"whole": y.argmax(-1), "y": [y]},
        lambda y: (y.double(), y.half()),
        lambda y: Output(y.mean(), [{"y": y}]),
    ],
    ids=["tuple", "named tuple", "dict", "double and half", "dataclass"],
)
def test_any_structure_of_outputs(structure: Any) -> None:
    workload = count(Then(structure), torch.zeros(3, 4))
    assert workload.backward == (0.0, 2 * 3 * 4 * 2)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x), self.second(x)


def test_the_backward_pass_is_that_of_all_outputs() -> None:
    workload = count(Heads(), torch.zeros(3, 4))
    assert workload.backward_seconds == 2 * (2 * 3 * 4 * 2)


@pytest.mark.parametrize(
    "example",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4, device="meta"),
        torch.zeros(3, 4, requires_grad=True),
        (torch.zeros(3, 4),),
        {"x": torch.zeros(3, 4), "scale": 2.0},
    ],
    ids=["tensor", "meta", "with gradient", "tuple", "dict"],
)
def test_any_kind_of_example(example: Any) -> None:
    workload = count(Then(torch.tanh), example)
    assert workload.backward == (0.0, 2 * 3 * 4 * 2)
    assert workload.batch == 3.0


def test_batch_is_the_callers_where_given() -> None:
    assert count(mlp(), torch.zeros(3, 4), batch=12).batch == 12
    example = {"scale": 1.0, "x": torch.zeros(4)}
    assert count(Then(torch.tanh), example).batch == 4.0


def test_a_scalar_example_has_no_batch() -> None:
    assert count(nn.PReLU(), torch.tensor(1.0)).batch is None


def test_a_module_on_meta_gives_the_same() -> None:
    with torch.device("meta"):
        on_meta = mlp()
    assert count(on_meta, torch.zeros(3, 4)) == count(mlp(), torch.zeros(3, 4))


class Drawing(nn.Module):
    """Makes tensors of its own, keeps one as a plain attribute, draws on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = torch.ones(4, 4).tril()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3, device="cpu")
        noise = F.dropout(torch.arange(4) + self.mask[0])
        output: torch.Tensor = self.linear(x) + noise
        return output


def test_the_caller_notices_nothing() -> None:
    module = Drawing()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with torch.inference_mode():
        count(module, torch.zeros(3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert not module._forward_pre_hooks
    assert not module.linear._forward_hooks
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.mask.device.type == "cpu"
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_source_says_that_it_was_counted() -> None:
    source = Workload.from_module(mlp(), torch.zeros(3, 4), 2e13).source
    assert source == (
        "FLOPs of Sequential counted by torch, not measured, at 2e+13 FLOP/s"
    )


# ---- refusals ----


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf, "fast", None])
def test_a_rate_is_above_zero(rate: Any) -> None:
    message = refusal(mlp(), torch.zeros(3, 4), rate)
    assert "flops_per_second: expected" in message
    assert repr(rate) in message


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        raise ZeroDivisionError("no gradient here")


def locked() -> nn.Module:
    module = mlp()
    module.lock = threading.Lock()
    return module


# To make a whole one takes a process group.
WRAPPED = nn.parallel.DistributedDataParallel.__new__(
    nn.parallel.DistributedDataParallel
)
FITS = torch.zeros(3, 4)
NO_PARAMETER = "no parameter that requires a gradient"
NO_PATH = "depends on no trainable parameter"
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no parameters": (nn.ReLU(), FITS, NO_PARAMETER),
    "frozen": (mlp().requires_grad_(False), FITS, NO_PARAMETER),
    "reads values": (
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(Reads())),
        FITS,
        "forward of submodule '1.0' (Reads) raised RuntimeError ... "
        "item() cannot be called on meta ... paceline profile",
    ),
    "another shape": (
        mlp(),
        torch.zeros(3, 5),
        "forward of submodule '0' (Linear) raised RuntimeError",
    ),
    "too many arguments": (
        mlp(),
        (FITS, 1),
        "forward of the module itself (Sequential) raised TypeError",
    ),
    "a list": (mlp(), [FITS], "example: expected a tensor, a tuple ... got list"),
    "a backward pass that fails": (
        Then(Breaks.apply),
        FITS,
        "the backward pass raised ZeroDivisionError: no gradient here",
    ),
    "detached": (Then(lambda y: y.detach()), FITS, NO_PATH),
    "whole numbers": (Then(lambda y: {"best": y.argmax(-1)}), FITS, NO_PATH),
    "no output": (Then(lambda y: None), FITS, NO_PATH),
    "of something else": (
        Then(lambda y: torch.zeros(3, requires_grad=True)),
        FITS,
        NO_PATH,
    ),
    "no copy": (locked(), FITS, "cannot be copied to the meta device ... lock"),
    "lazy": (nn.Sequential(nn.LazyLinear(3)), FITS, "'0.weight' has no shape yet"),
    "no module": (mlp, FITS, "expected a torch.nn.Module, got function"),
    "wrapped": (WRAPPED, FITS, "model.module"),
}


@pytest.mark.parametrize(
    ("module", "example", "message"), REFUSED.values(), ids=REFUSED
)
def test_what_cannot_be_counted_is_refused_with_the_reason(
    module: Any, example: Any, message: str
) -> None:
    refused = refusal(module, example)
    for words in message.split(" ... "):
        assert words in refused
