"""A small ResNet trained with everything at once is DDP's: BatchNorm, accumulation,
clipping, a scheduler, autocast, uneven data."""

import pytest
import torch

from tests.runtimes.real.scripts.resnet_shaped import CASES, resnet
from tests.support import forked
from tests.support.processes import SCRIPTS

pytestmark = pytest.mark.slow

PARAMETERS = dict(resnet().named_parameters())


@pytest.fixture(scope="module", params=[2, 4])
def trained(request, tmp_path_factory):
    """What each rank held, by ``(engine, case, moment)``."""
    size = request.param
    folder = tmp_path_factory.mktemp(f"resnet-{size}")
    forked.run_together(size, [SCRIPTS / "resnet_shaped.py", folder, "paceline", "ddp"])
    return {
        (engine, case, moment): [
            torch.load(
                folder / f"{engine}-{case}-{moment}-{rank}.pt", weights_only=True
            )
            for rank in range(size)
        ]
        for engine in ("paceline", "ddp")
        for case in CASES
        for moment in ("even", "end")
    }


def assert_equal(ours, theirs, names):
    for name in names:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("moment", ["even", "end"])
@pytest.mark.parametrize("case", CASES)
def test_parameters_of_every_rank(trained, case, moment):
    """At the end too: whoever ran out of data took the model of a rank that trained on,
    under DDP and here."""
    pairs = (trained[engine, case, moment] for engine in ("paceline", "ddp"))
    for ours, theirs in zip(*pairs, strict=True):
        assert_equal(ours, theirs, PARAMETERS)


@pytest.mark.parametrize("case", CASES)
def test_running_statistics_of_rank_0(trained, case):
    """While data is even: there both go on from rank 0's. Under Join DDP takes those of
    the highest rank that still trains, and paceline the lowest's: they have seen other
    images, and their values cannot be compared."""
    ours, theirs = (trained[engine, case, "even"][0] for engine in ("paceline", "ddp"))
    assert len(theirs) == len(PARAMETERS) + 13 * 3
    assert_equal(ours, theirs, theirs.keys() - PARAMETERS.keys())


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_with_one_model(trained, case):
    first, *others = trained["paceline", case, "end"]
    for other in others:
        assert_equal(other, first, first.keys())


@pytest.mark.parametrize("case", CASES)
def test_every_batch_is_counted(trained, case):
    ours, theirs = (trained[engine, case, "end"][0] for engine in ("paceline", "ddp"))
    for name in theirs:
        if name.endswith("num_batches_tracked"):
            assert ours[name] == theirs[name], name


@pytest.mark.parametrize("case", CASES)
def test_training_moved_the_parameters(trained, case):
    """In both epochs: equal to DDP means something only then."""
    torch.manual_seed(0)
    start = resnet().state_dict()
    even, end = (trained["paceline", case, moment][0] for moment in ("even", "end"))
    for name in PARAMETERS:
        assert not torch.equal(even[name], start[name]), name
        assert not torch.equal(end[name], even[name]), name
