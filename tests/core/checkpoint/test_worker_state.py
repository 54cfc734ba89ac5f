"""What each worker has of its own, compressors' residuals among it: saved per worker, and what becomes
of it elsewhere.
"""

import os
import pickle

import pytest
import torch

import paceline
from paceline.compression import GradientCompression
from paceline.compression.casts import BF16
from paceline.compression.quantization import Int8
from paceline.core.checkpoint import files, worker_state
from paceline.core.checkpoint import folder as folders
from paceline.core.checkpoint.worker_state import ResidualState
from paceline.core.random_state import random_states, set_random_states
from paceline.errors import UsageError
from paceline.interfaces import redistribute_nothing
from tests.core.checkpoint.test_save_load import begin
from tests.support.one_worker import OneWorker, compressed_average
from tests.support.training import simulate


class ErrorFeedback:
    """Shares of a sum, and a number that all have."""

    name = "compression.toy"

    def __init__(self, value=None):
        self.state = {}
        if value is not None:
            self.state = {"error": {"weight": torch.full((3,), value)}, "round": 7}

    def save(self):
        return self.state

    def load(self, saved):
        self.state = saved

    def redistribute(self, parts, workers):
        parts = list(parts)
        whole = sum(part["error"]["weight"] for part in parts)
        return parts[0] | {"error": {"weight": whole / workers}}


class Only(ErrorFeedback):
    """Means nothing to others."""

    name = "method.toy"

    def redistribute(self, parts, workers):
        return redistribute_nothing(self.name, parts, workers)


def on_toys(workers, body, make):
    """Run *body* on workers whose training has the states that *make* gives for a rank."""
    made = [make(rank) for rank in range(workers)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            worker_state,
            "worker_states",
            lambda training: made[training.context.comm.rank],
        )
        return simulate(workers, body)


def save(workers, folder, make, steps=0, place=lambda folder, rank: folder):
    def body(rank):
        model, optimizer = begin()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + rank)).sum().backward()
            optimizer.step()
        paceline.save(place(folder, rank))
        optimizer.finish()
        return model.weight.tolist()

    return on_toys(workers, body, make)


def load(workers, folder, make, place=lambda folder, rank: folder):
    made = {}

    def body(rank):
        model, optimizer = begin()
        before = model.weight.tolist()
        try:
            paceline.load(place(folder, rank))
        except UsageError as error:
            return str(error), model.weight.tolist() == before
        finally:
            optimizer.finish()
        return [owner.state for owner in made[rank]]

    return on_toys(workers, body, lambda rank: made.setdefault(rank, make(rank)))


def values(states):
    return [state["error"]["weight"].tolist() for (state,) in states]


# ---- as many workers ----


def test_each_worker_has_its_own_back_bit_for_bit(tmp_path):
    def state(rank):
        bits = torch.tensor([0x7FC00001 + rank, 0x80000000 - 2**32, 1])
        return {
            "bits": bits.to(torch.int32).view(torch.float32),
            "half": torch.tensor([0.1 * rank]).to(torch.bfloat16),
            "rank": rank,
            "where": ("a", [rank, None], {0: torch.tensor([rank])}),
        }

    def owner(rank):
        made = Only()
        made.state = state(rank)
        return [made]

    save(3, tmp_path / "x", owner)
    for rank, (found,) in enumerate(load(3, tmp_path / "x", lambda rank: [Only()])):
        expected = state(rank)
        for key in ("bits", "half"):
            assert found[key].dtype == expected[key].dtype
            as_bytes = [x[key].view(torch.uint8).tolist() for x in (found, expected)]
            assert as_bytes[0] == as_bytes[1]
        assert found["rank"] == rank
        assert repr(found["where"]) == repr(expected["where"])


def test_each_worker_writes_its_own_and_rank_0_what_all_share(tmp_path):
    save(2, tmp_path / "x", lambda rank: [ErrorFeedback(float(rank))])
    names = {file.name: set(files.read(file)) for file in (tmp_path / "x").iterdir()}
    own = {"worker", "training0.compression.toy"}
    assert names == {
        "index.pt": {"index"},
        "shared.pt": {"model0", "optimizer0"},
        "worker-0.pt": own,
        "worker-1.pt": own,
    }


def test_a_gpus_state_counts_where_one_is_in_use(monkeypatch):
    """A GPU's checkpoint is loaded without one, and one without a GPU's state on a GPU."""
    given, states = [], random_states()
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    for used, more, expected in (
        (False, {"cuda": "state"}, []),
        (True, {}, []),
        (True, {"cuda": "state"}, ["state"]),
    ):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda used=used: used)
        set_random_states(states | more)
        assert given == expected


# ---- more of them, or fewer ----


@pytest.mark.parametrize(("workers", "share"), [(1, 12.0), (2, 6.0), (4, 3.0)])
def test_shares_of_a_sum_stay_its_shares(workers, share, tmp_path):
    save(3, tmp_path / "x", lambda rank: [ErrorFeedback(3.0 + rank)])
    found = load(workers, tmp_path / "x", lambda rank: [ErrorFeedback()])
    assert values(found) == [[share] * 3] * workers
    assert [state["round"] for (state,) in found] == [7] * workers


@pytest.mark.parametrize("workers", [1, 3])
def test_what_means_nothing_to_others_is_refused_and_nothing_is_changed(
    workers, tmp_path
):
    def both(rank, value=None):
        return [ErrorFeedback(value), Only(value)]

    save(2, tmp_path / "x", lambda rank: both(rank, 1.0), steps=2)
    for words, unchanged in load(workers, tmp_path / "x", both):
        assert words.startswith(
            f"the checkpoint holds method.toy of 2 workers, which a job of {workers} cannot "
            "take over. Load it with as many workers as"
        )
        assert unchanged
    assert (
        values(load(2, tmp_path / "x", lambda rank: [ErrorFeedback()]))
        == [[1.0] * 3] * 2
    )


def test_what_is_empty_is_never_refused(tmp_path):
    save(2, tmp_path / "x", lambda rank: [Only()])
    assert load(3, tmp_path / "x", lambda rank: [Only()]) == [[{}]] * 3


def say(folder, **what):
    """The checkpoint in *folder* says something else of itself."""
    index = folders.index(folder)
    about = files.read(index)["index"]
    files.write({"index": about | what}, index)


def test_who_has_died_before_a_save_has_no_part_and_all_know(tmp_path):
    """The checkpoint of three workers, of which two were left."""
    save(3, tmp_path / "x", lambda rank: [ErrorFeedback(3.0 + rank)])
    say(tmp_path / "x", parts=[1, 2])
    found = load(3, tmp_path / "x", lambda rank: [ErrorFeedback()])
    assert values(found) == [[3.0] * 3] * 3
    found = load(2, tmp_path / "x", lambda rank: [ErrorFeedback()])
    assert values(found) == [[4.5] * 3] * 2


# ---- others than were saved ----


def test_what_nobody_takes_and_what_begins_anew_is_said_once(tmp_path, capfd):
    save(2, tmp_path / "x", lambda rank: [ErrorFeedback(1.0)])
    assert load(2, tmp_path / "x", lambda rank: [Only()]) == [[{}]] * 2
    assert capfd.readouterr().err.splitlines() == [
        f"paceline: {tmp_path / 'x'} holds no training0.method.toy: it starts from its "
        "initial state",
        f"paceline: {tmp_path / 'x'} holds training0.compression.toy, which this job does "
        "not use",
    ]


def test_after_finish_nothing_is_left_of_it(tmp_path):
    def body(rank):
        _, optimizer = begin()
        optimizer.finish()
        paceline.save(tmp_path / "x")

    on_toys(2, body, lambda rank: [Only(1.0)])
    assert load(3, tmp_path / "x", lambda rank: []) == [[]] * 3


# ---- each machine its own disk ----


def on_its_own_disk(folder, rank):
    return folder / str(rank)


def test_parts_on_other_disks_are_asked_for_by_name(tmp_path, capfd):
    """What rank 0's machine has is a checkpoint; the others' parts stay on theirs, and one
    folder with all of them is a whole one."""
    make = lambda rank: [ErrorFeedback(3.0 + rank)]  # noqa: E731
    for _ in range(2):  # the second time over what the first one left
        save(2, tmp_path, make, place=on_its_own_disk)
    left = tmp_path / "1.partial" / "worker-1.pt"
    assert left.is_file()
    assert not (tmp_path / "0" / "worker-1.pt").exists()
    for words, unchanged in load(2, tmp_path, make, place=on_its_own_disk):
        assert "there is no checkpoint in" in words
        assert unchanged
    for words, unchanged in load(2, tmp_path / "0", make):
        assert "0/worker-1.pt does not exist: it is worker 1's part" in words
        assert "on that worker's machine, as worker-1.pt in 0.partial" in words
        assert unchanged
    capfd.readouterr()
    assert load(2, tmp_path / "0", lambda rank: []) == [[], []]
    assert (
        "worker-1.pt does not exist: worker 1 keeps its random"
        in capfd.readouterr().err
    )
    left.rename(tmp_path / "0" / "worker-1.pt")
    found = load(2, tmp_path / "0", lambda rank: [ErrorFeedback()])
    assert values(found) == [[3.0] * 3, [4.0] * 3]


# ---- versions ----


def test_a_later_version_is_refused_by_its_number(tmp_path):
    save(1, tmp_path / "x", lambda rank: [])
    say(tmp_path / "x", version=4)
    ((words, unchanged),) = load(1, tmp_path / "x", lambda rank: [])
    assert f"{tmp_path / 'x'} has version 4, and this paceline reads version 3" in words
    assert unchanged


@pytest.mark.parametrize("place", ["x", "x.partial", "x.old"])
def test_an_older_format_is_refused_and_not_read(place, tmp_path):
    (tmp_path / place).mkdir()
    (tmp_path / place / ".metadata").write_bytes(b"not looked at")
    ((words, unchanged),) = load(1, tmp_path / "x", lambda rank: [])
    assert f"{tmp_path / place} has format 1 or 2" in words
    assert "expected format 3" in words
    assert unchanged


# ---- forged ----


class Forged:
    """When it is unpickled a folder is made."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ["torch.save", "pickle"])
@pytest.mark.parametrize("name", ["index.pt", "shared.pt", "worker-0.pt"])
def test_a_forged_file_runs_nothing_and_is_refused(name, how, workers, tmp_path):
    save(workers, tmp_path / "x", lambda rank: [ErrorFeedback(1.0)])
    forged = {"model0": Forged(tmp_path / "pwned"), "index": Forged(tmp_path / "pwned")}
    if how == "pickle":
        (tmp_path / "x" / name).write_bytes(pickle.dumps(forged))
    else:
        torch.save(forged, tmp_path / "x" / name)
    for words, unchanged in load(
        workers, tmp_path / "x", lambda rank: [ErrorFeedback()]
    ):
        assert name in words
        assert "Nothing in it was run" in words
        assert how == "pickle" or "holds code" in words
        assert unchanged
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["index.pt", "shared.pt", "worker-0.pt"])
def test_a_damaged_file_is_refused(name, tmp_path):
    save(1, tmp_path / "x", lambda rank: [ErrorFeedback(1.0)])
    file = tmp_path / "x" / name
    file.write_bytes(file.read_bytes()[:-100])
    ((words, unchanged),) = load(1, tmp_path / "x", lambda rank: [ErrorFeedback()])
    assert name in words
    assert unchanged


@pytest.mark.parametrize(
    ("what", "words"),
    [({"workers": "two"}, "workers"), ({"parts": None}, "parts"), ({}, "no index")],
)
def test_an_index_of_another_form_is_refused(what, words, tmp_path):
    save(1, tmp_path / "x", lambda rank: [])
    if what:
        say(tmp_path / "x", **what)
    else:
        files.write({"other": 1}, folders.index(tmp_path / "x"))
    ((found, unchanged),) = load(1, tmp_path / "x", lambda rank: [])
    assert words in found
    assert unchanged


PARAMETERS = [
    ("weight", torch.nn.Parameter(torch.zeros(2, 2))),
    ("bias", torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))),
]


def owner(compressor, rank=0, steps=0):
    """After some steps of a worker alone, whose gradients are of no round numbers."""
    codes = compressed_average(compressor, rank)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        for name, parameter in PARAMETERS:
            part = torch.randn(parameter.shape, generator=generator)
            send(codes, part.to(parameter.dtype), name)
    return ResidualState(codes, rank, PARAMETERS), codes


def send(codes, part, name):
    """One tensor to itself, through a code; returns what arrives."""
    codes.sum(OneWorker(), part, [part], [name])
    return part


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_sum_of_residuals_is_kept(workers):
    parts = [
        owner(GradientCompression(Int8(), error_feedback=True), rank, steps=2)[0].save()
        for rank in (0, 1)
    ]
    whole = sum(part["weight"]["residual"] for part in parts)
    assert whole.abs().max() > 0
    total = torch.zeros(2, 2)
    for rank in range(workers):
        loader, codes = owner(GradientCompression(Int8(), error_feedback=True), rank)
        loader.load(loader.redistribute(iter(parts), workers))
        assert codes.states.keys() == {"weight", "bias"}
        total += codes.states["weight"]["residual"]
    assert torch.allclose(total, whole, atol=1e-7)


def test_a_tensor_that_is_no_parameter_has_no_share():
    _, codes = owner(GradientCompression(BF16(), error_feedback=True))
    send(codes, torch.full((3,), 0.3), "momentum")
    saved = ResidualState(codes, 0, PARAMETERS).save()
    loader, _ = owner(GradientCompression(BF16(), error_feedback=True))
    with pytest.raises(UsageError, match="'momentum'"):
        loader.redistribute([saved], 2)


def test_parts_of_a_parameter_have_their_shares():
    """OSP sends pieces, which are named by the elements that they hold."""
    parts = []
    for rank in (0, 1):
        saver, codes = owner(GradientCompression(BF16(), error_feedback=True), rank)
        send(codes, torch.full((1, 3), 0.3), "weight[1:4]")
        parts.append(saver.save())
    loader, _ = owner(GradientCompression(BF16(), error_feedback=True))
    given = loader.redistribute(iter(parts), 1)["weight[1:4]"]["residual"]
    kept = [part["weight[1:4]"]["residual"] for part in parts]
    assert given.shape == (1, 3)
    assert given.any()
    assert torch.equal(given, kept[0] + kept[1])
