"""What integrations check before anything starts; no trainer is needed for these."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.core.distribute import distribute
from paceline.errors import UsageError, WorkerFailedError
from paceline.integrations import common
from paceline.integrations.common import (
    check_chosen,
    check_meets_all,
    check_not_sharded,
    check_plain,
    copied,
    owner_of,
    require,
    shard_loader,
    shows_mean,
)
from tests.support.simulations import run

ROOT = Path(__file__).parent.parent.parent


def test_unknown_settings_are_refused_with_the_nearest() -> None:
    assert check_chosen({"compression": "int8"}) == {"compression": "int8"}
    with pytest.raises(UsageError, match="Did you mean 'compression'"):
        check_chosen({"compresion": "int8"})
    with pytest.raises(UsageError, match="unknown option 'model'"):
        check_chosen({"model": None})


def test_a_version_outside_the_range_is_refused() -> None:
    require("numpy", "1.0", "1000")
    with pytest.raises(UsageError, match=r"'numpy>=1000,<1001'"):
        require("numpy", "1000", "1001")
    with pytest.raises(UsageError, match=r"pip install 'no-such-package>=1,<2'"):
        require("no-such-package", "1", "2")


@pytest.mark.parametrize(
    ("module", "found"),
    [
        # Without the methods that `attach` works on: they came with 5.3.
        ("transformers", "5.2.0"),
        ("accelerate", "1.9.0"),
        ("lightning", "2.7.0"),
    ],
)
def test_a_trainer_is_refused_before_it_is_imported(
    module: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "version", lambda package: found)
    for name in (module, "fabric"):
        monkeypatch.delitem(sys.modules, f"paceline.integrations.{name}", False)
    with pytest.raises(UsageError, match=rf"{module} {found}: this integration"):
        importlib.import_module(f"paceline.integrations.{module}")


def test_extras_install_what_integrations_take() -> None:
    """Their numbers stand in two places."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    asked = [
        re.findall(r"^(?:common\.)?require\((.*)\)", path.read_text(), re.MULTILINE)
        for path in (ROOT / "src/paceline/integrations").glob("*.py")
    ]
    calls = [ast.literal_eval(f"({one})") for many in asked for one in many]
    assert len(calls) == 4
    everything = {
        re.sub(r"\[.*\]", "", one) for many in extras.values() for one in many
    }
    for package, first, before in calls:
        assert f"{package}>={first},<{before}" in everything


class Lookahead(torch.optim.Optimizer):
    """Made of another one, as users do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class Prepared(Lookahead):
    """As Accelerate and Fabric wrap optimizers."""

    __module__ = "accelerate.optimizer"


class FabricSGD(Prepared):
    """A class that was made of the wrapping one and the user's."""

    __module__ = "users"


def test_what_is_wrapped_already_is_refused_with_the_line_to_take_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    plain = torch.optim.SGD(model.parameters())
    check_plain(model, plain, "prepare(...)")
    check_plain(model, None, "prepare(...)")
    with pytest.raises(UsageError, match=r"prepare\(...\): .*Prepared\): take out the"):
        check_plain(model, Prepared(plain), "prepare(...)")
    with pytest.raises(UsageError, match=r"FabricSGD\): take out the"):
        check_plain(model, FabricSGD(plain), "prepare(...)")
    check_plain(model, Lookahead(plain), "prepare(...)")
    ddp = torch.nn.parallel.DistributedDataParallel
    wrapped = ddp.__new__(ddp)
    torch.nn.Module.__init__(wrapped)
    for name, inner in (("it is", wrapped), ("'0' is", torch.nn.Sequential(wrapped))):
        with pytest.raises(
            UsageError, match=rf"{name} under Distri.*Take out the line"
        ):
            check_plain(inner, plain, "prepare(...)")


def test_a_sharded_model_is_refused_in_words_of_its_own() -> None:
    plain = torch.nn.Linear(2, 2)
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(wrapped)
    words = (
        r"sharded: {}under FSDP, so each rank holds a part.*Take out .*FSDP\(model\)"
    )
    with pytest.raises(UsageError, match=words.format("it is ")):
        check_plain(wrapped, None, "attach(trainer)")
    model = torch.nn.Sequential(plain, wrapped)
    with pytest.raises(UsageError, match=words.format("its part '1' is ")):
        check_plain(model, None, "attach(trainer)")


def test_a_copy_of_a_state_shares_what_the_model_shares() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("empty too", torch.empty(0))
    original = model.state_dict()
    original["extra"] = "words"
    state = copied(original)
    assert state["extra"] == "words"
    assert type(state) is type(original)
    assert state._metadata == original._metadata
    assert state["0.weight"] is state["1.weight"]
    assert state["0.bias"] is not state["1.bias"]
    assert state["empty"] is not state["empty too"]
    before = state["0.weight"].clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert torch.equal(state["0.weight"], before)


def test_a_model_of_distributed_tensors_is_refused(single_process_group) -> None:
    mesh = dist.init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight, mesh))
    with pytest.raises(UsageError, match=r"'weight' is a DTensor.*fully_shard"):
        check_plain(model, None, "attach(trainer)")


@pytest.fixture
def single_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"])
def test_sharding_by_accelerate_is_refused_with_the_argument_to_leave_out(kind):
    check_not_sharded("MULTI_CPU")
    with pytest.raises(UsageError, match=rf"\({kind}\).*leave \w+= out of Acceler"):
        check_not_sharded(kind)


@pytest.mark.parametrize("spread", ["tp", "cp", "sp", "dp_shard"])
def test_parallelism_that_deals_out_no_samples_is_refused(spread: str) -> None:
    names = ("tp", "cp", "sp", "dp_shard", "dp_replicate")
    of = {f"{name}_enabled": name == "dp_replicate" for name in names}
    check_not_sharded("MULTI_CPU", SimpleNamespace(**of))
    with pytest.raises(
        UsageError, match=rf"\({spread}_size\).*leave {spread}_size out"
    ):
        check_not_sharded(
            "MULTI_CPU", SimpleNamespace(**of | {f"{spread}_enabled": True})
        )


def test_what_needs_a_process_group_is_refused_where_a_job_survives() -> None:
    check_meets_all("Accelerate", {})
    with pytest.raises(UsageError, match="leave --survive out"):
        check_meets_all("Accelerate", {"PACELINE_SURVIVE": "1"})


@pytest.mark.parametrize("method", ["ssp", "osp:servers=per-node"])
def test_an_optimizer_of_several_evaluations_is_refused_by_methods_that_split_steps(
    method,
) -> None:
    def body(rank):
        model = torch.nn.Linear(2, 2)
        distribute(model, torch.optim.LBFGS(model.parameters()), method=method)

    with pytest.raises(
        WorkerFailedError, match=r"LBFGS cannot be applied.*such as bsp"
    ):
        run(2, body)


def test_who_owns_what_an_optimizer_trains() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    both = torch.nn.ModuleList([first, second])
    assert owner_of(torch.optim.SGD(first.parameters()), both) is first
    assert owner_of(torch.optim.SGD(both.parameters()), both) is both
    with pytest.raises(UsageError, match="submodule"):
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
            loader = shard_loader(DataLoader(numbers, 2, shuffle=shuffle), 3, rank)
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
        assert shard_loader(loader, 3, 0) is loader
