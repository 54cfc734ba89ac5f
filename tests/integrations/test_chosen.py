"""What integrations check before anything starts; no trainer is needed for these."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.errors import UsageError
from paceline.integrations.chosen import check_chosen, owner_of, shows_mean
from paceline.integrations.dealing import dealt
from paceline.integrations.versions import require


def test_unknown_settings_are_refused_with_the_nearest() -> None:
    assert check_chosen({"compression": "int8"}) == {"compression": "int8"}
    with pytest.raises(UsageError, match="Did you mean 'compression'"):
        check_chosen({"compresion": "int8"})
    with pytest.raises(UsageError, match="unknown option 'model'"):
        check_chosen({"model": None})


def test_a_version_that_was_not_tried_is_refused() -> None:
    require("numpy", "1.0", "1000", "any")
    with pytest.raises(UsageError, match=r"'numpy>=1000,<1001'"):
        require("numpy", "1000", "1001", "any")
    with pytest.raises(UsageError, match=r"pip install 'paceline\[any\]'"):
        require("no-such-package", "1", "2", "any")


def test_who_owns_what_an_optimizer_trains() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    both = torch.nn.ModuleList([first, second])
    assert owner_of(torch.optim.SGD(first.parameters()), both) is first
    assert owner_of(torch.optim.SGD(both.parameters()), both) is both
    with pytest.raises(UsageError, match="a submodule of its own"):
        owner_of(torch.optim.SGD([first.weight]), both)
    first.bias.requires_grad_(False)
    assert owner_of(torch.optim.SGD([first.weight]), both) is first


@pytest.mark.parametrize(
    ("method", "shown"),
    [(None, True), ("bsp", True), ("osp", False), ("ssp", False), ("auto", False)],
)
def test_where_the_trainer_clips(method: str | None, shown: bool) -> None:
    assert shows_mean(method) == shown


def test_samples_are_dealt_out_as_distributed_samplers_do() -> None:
    numbers = TensorDataset(torch.arange(10))
    for shuffle in (False, True):
        shares = []
        for rank in range(3):
            loader = dealt(DataLoader(numbers, 2, shuffle=shuffle), 3, rank)
            assert isinstance(loader, DataLoader)
            sampler = DistributedSampler(numbers, 3, rank, shuffle=shuffle)
            assert list(loader.sampler) == list(sampler)
            shares += list(loader.sampler)
        assert set(shares) == set(range(10))
        assert len(shares) == 12


def test_loaders_with_a_rule_of_their_own_stay_as_they_are() -> None:
    numbers = TensorDataset(torch.arange(10))
    own = DataLoader(numbers, 2, sampler=WeightedRandomSampler([1.0] * 10, 10))
    batches = DataLoader(numbers, batch_size=None)
    for loader in (own, batches, "no loader"):
        assert dealt(loader, 3, 0) is loader
