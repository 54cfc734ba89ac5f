"""Rules that need no measuring, and groups of tensors that may not be mixed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import bucketing
from paceline.errors import UsageError
from tests.support.profiles import examples

MIB = 1024 * 1024

# In elements of 4 bytes: tiny ones, some near 1 MiB and 25 MiB, and beyond.
_elements = st.one_of(
    st.integers(0, 1000),
    st.sampled_from([MIB // 4 - 1, MIB // 4, MIB // 4 + 1]),
    st.sampled_from([25 * MIB // 4 - 1, 25 * MIB // 4, 25 * MIB // 4 + 1]),
    st.integers(0, 8 * MIB),
)


def torch_buckets(tensors: list[torch.Tensor]) -> list[list[int]]:
    """What DDP itself decides, in the order of the buckets' first tensors."""
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    return buckets


def meta(elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, device="meta")


def test_wfbp_is_a_bucket_per_tensor_and_single_is_one() -> None:
    assert bucketing.wfbp([5, 0, 7]) == [1, 1, 1]
    assert bucketing.single([5, 0, 7]) == [3]


def test_ddp_closes_a_bucket_with_the_tensor_that_reaches_its_limit() -> None:
    # 0.6 + 0.6 MiB pass 1 MiB; then 20 + 4 stay under 25 MiB and 1 more reaches it.
    sizes = [6 * MIB // 10, 6 * MIB // 10, 20 * MIB, 4 * MIB, MIB, 10]
    assert bucketing.ddp(sizes) == [2, 3, 1]


@settings(max_examples=examples(300))
@given(st.lists(_elements, min_size=1, max_size=30))
def test_ddp_is_torchs_own_rule(elements: list[int]) -> None:
    tensors = [meta(count, torch.float32) for count in elements]
    lengths = bucketing.ddp([4 * count for count in elements])
    assert lengths == [len(bucket) for bucket in torch_buckets(tensors)]


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(_elements, st.sampled_from([torch.float32, torch.float16])),
        min_size=1,
        max_size=30,
    )
)
def test_ddp_with_two_kinds_is_torchs_own_rule(
    members: list[tuple[int, torch.dtype]],
) -> None:
    tensors = [meta(*member) for member in members]
    groups = bucketing.group(
        "ddp",
        [t.numel() * t.element_size() for t in tensors],
        [t.dtype for t in tensors],
    )
    # torch orders buckets by their first tensor, we by the one that completes them.
    assert sorted(groups) == sorted(torch_buckets(tensors))


@given(
    st.sampled_from(sorted(bucketing.FIXED)),
    st.lists(st.tuples(st.integers(0, 2 * MIB), st.sampled_from("abc")), max_size=30),
)
def test_groups_partition_the_tensors_in_ready_order(
    rule: str, members: list[tuple[int, str]]
) -> None:
    sizes = [size for size, _ in members]
    kinds = [kind for _, kind in members]
    groups = bucketing.group(rule, sizes, kinds)
    assert sorted(p for group in groups for p in group) == list(range(len(members)))
    assert all(group == sorted(group) for group in groups)
    assert all(len({kinds[p] for p in group}) == 1 for group in groups)
    ends = [group[-1] for group in groups]
    assert ends == sorted(ends)


def test_kinds_never_share_a_bucket() -> None:
    kinds = ["half", "full", "half", "full", "half"]
    assert bucketing.group("single", [1] * 5, kinds) == [[1, 3], [0, 2, 4]]
    assert bucketing.group("wfbp", [1] * 5, kinds) == [[0], [1], [2], [3], [4]]
    # Each kind counts its own bytes: "half" reaches 1 MiB with its second tensor.
    sizes = [MIB // 2, 10, MIB // 2, 10, 10]
    assert bucketing.group("ddp", sizes, kinds) == [[0, 2], [1, 3], [4]]


def test_unknown_rule_names_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"'dpd'.*Did you mean 'ddp'.*single, wfbp"):
        bucketing.group("dpd", [1], ["a"])
    with pytest.raises(UsageError, match="unknown bucket rule"):
        bucketing.check_rule("")
    for rule in bucketing.RULES:
        assert bucketing.check_rule(rule) == rule


def test_rules_are_the_fixed_and_the_measured_ones() -> None:
    assert bucketing.RULES == ("ddp", "single", "wfbp", "mg-wfbp", "optimal")
    assert set(bucketing.FIXED) | set(bucketing.MEASURED) == set(bucketing.RULES)


@pytest.mark.parametrize("rule", bucketing.FIXED)
def test_plan_of_a_fixed_rule_needs_no_times(rule: str) -> None:
    sizes = [MIB, 3, 30 * MIB, 5]
    assert bucketing.plan(rule, sizes) == bucketing.FIXED[rule](sizes)


def test_plan_of_a_fixed_rule_is_cut_where_the_kind_changes() -> None:
    kinds = ["half", "half", "full", "full", "half"]
    assert bucketing.plan("single", [1] * 5, kinds=kinds) == [2, 2, 1]
    assert bucketing.plan("ddp", [1, MIB, 1, 1, 1], kinds=kinds) == [2, 2, 1]
    assert bucketing.plan("wfbp", [1] * 5, kinds=kinds) == [1] * 5


def test_given_lengths_are_a_plan() -> None:
    assert bucketing.plan("3+5+2", [1] * 10) == [3, 5, 2]
    assert bucketing.plan("4", [1] * 4) == [4]
    assert bucketing.group("1+2", [1] * 3, ["a"] * 3) == [[0], [1, 2]]
    assert bucketing.plan("2+1", [1] * 3, kinds=["a", "a", "b"]) == [2, 1]


@pytest.mark.parametrize(
    "word", ["3+", "+3", "3+0", "3+-1", "3 + 5", "3,5", "1.0", "٣"]
)
def test_what_are_no_lengths_is_an_unknown_rule(word: str) -> None:
    with pytest.raises(UsageError, match=r"unknown bucket rule.*such as '3\+5\+2'"):
        bucketing.check_rule(word)


def test_given_lengths_must_sum_to_the_tensors() -> None:
    with pytest.raises(
        UsageError, match=r"'3\+5\+2': .* sum to the 9 gradients .* got 10"
    ):
        bucketing.plan("3+5+2", [1] * 9)
    with pytest.raises(UsageError, match="sum to the 0 gradients"):
        bucketing.plan("1", [])


def test_given_lengths_may_not_mix_kinds() -> None:
    kinds = ["a", "a", "b", "b"]
    with pytest.raises(UsageError, match=r"'1\+2\+1': .* tensors 1 to 2 mixes"):
        bucketing.plan("1+2+1", [1] * 4, kinds=kinds)
    with pytest.raises(UsageError, match="tensors 1 to 2 mixes dtypes or devices"):
        bucketing.group("1+2+1", [1] * 4, kinds)


def test_no_tensors_make_no_buckets() -> None:
    assert bucketing.group("ddp", [], []) == []
    assert bucketing.wfbp([]) == bucketing.ddp([]) == []
