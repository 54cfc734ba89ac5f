"""The kernel's programs, packet by packet: they do what user space does, and what they cannot
deal with they leave alone. No network is needed, only BPF."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.aggregator.packets import NOBODY, Flag, Kind, blank
from paceline.aggregator.protocol import Memory
from paceline.aggregator.xdp.kernel import Kernel
from tests.aggregator import net
from tests.aggregator import test_protocol_laws as laws
from tests.aggregator.test_protocol import packet
from tests.aggregator.twin import (
    HOST,
    PASSED_ON,
    PORT,
    REDIRECTED,
    XDP_DROP,
    XDP_PASS,
    TwinSlots,
    frame,
)
from tests.profiles import examples

ELEMENTS = 19
"""Two blocks, and some."""
SLOTS, WORKERS = 2, 3
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def kernels(bpf):
    made = {}
    for elements in (net.ELEMENTS, ELEMENTS):
        made[elements] = Kernel(8, elements)
        made[elements].serve((HOST, PORT))
    yield made
    for kernel in made.values():
        kernel.close()


def twins(kernel, elements=ELEMENTS, slots=SLOTS, workers=WORKERS):
    memory = Memory.of(slots, elements)
    return TwinSlots(memory, workers, kernel=kernel, numbers=NUMBERS)


PACKETS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([1, 1, 1, 1, 1, 1, 2, 3, 4, 4, 5, 6]),
        "flags": st.sampled_from([0, 0, 0, 2, 1, 1, 8, 9]),
        "elements": st.sampled_from([0, 1, 8, 16, 17, 19, 19]),
        "slot": st.integers(0, SLOTS),
        "round": st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 2**32 - 1]),
        "exponent": st.integers(-3, 3),
        "worker": st.sampled_from([0, 1, 2, 0, 1, 2, 3, 65, NOBODY]),
        "merged": st.integers(0, 9),
    }
)


def packet_of(fields, random):
    row = blank(1, ELEMENTS)
    row["values"] = random.integers(-(2**31), 2**31, (1, ELEMENTS))
    merged = fields.pop("merged")
    for name, value in fields.items():
        row["header"][name] = value
    worker = fields["worker"]
    row["header"]["bitmap"] = merged if worker == NOBODY else 1 << worker % 64
    return row


def contribution(worker, merged=0):
    """An empty one, as `PACKETS` makes them."""
    found = dict.fromkeys(("flags", "elements", "slot", "round", "exponent"), 0)
    return found | {"kind": 1, "worker": worker, "merged": merged}


# A sum is whole before any worker that has an address has sent something that counted.
@example(made=[contribution(65), contribution(NOBODY, merged=5)], seed=0)
@settings(max_examples=examples(30))
@given(made=st.lists(PACKETS, min_size=20, max_size=60), seed=st.integers(0, 99))
def test_any_packets_are_answered_as_user_space_answers_them(kernels, made, seed):
    slots = twins(kernels[ELEMENTS])
    random = np.random.default_rng(seed)
    for fields in made:
        slots.take(packet_of(dict(fields), random))
    slots.check_state()


@pytest.mark.slow
@pytest.mark.parametrize(
    "law",
    [
        laws.test_sums_are_exact_and_nobody_is_stuck,
        laws.test_what_one_spreads_is_everybodys_also_between_sums,
        partial(
            laws.test_sums_that_leave_reach_the_next_agent_before_their_slot_is_free,
            mode=Flag.FORWARD,
        ),
        partial(
            laws.test_sums_that_leave_reach_the_next_agent_before_their_slot_is_free,
            mode=Flag.ONWARD,
        ),
    ],
)
def test_laws_hold_where_the_kernel_does_the_same(kernels, law, monkeypatch):
    twin = partial(TwinSlots, kernel=kernels[net.ELEMENTS], numbers=NUMBERS)
    monkeypatch.setattr(net, "Slots", twin)
    law()


def test_a_twin_that_differs_is_noticed(kernels):
    slots = twins(kernels[ELEMENTS])
    slots.take(packet_of_worker(0))
    slots.take(packet_of_worker(1))
    slots._memory_of_both.values[:] += 1
    with pytest.raises(AssertionError):
        slots.take(packet_of_worker(2))


def packet_of_worker(worker, **fields):
    row = blank(1, ELEMENTS)
    header = row["header"]
    header["kind"], header["worker"], header["bitmap"] = (
        *(Kind.CONTRIBUTION, worker),
        1 << worker,
    )
    header["elements"] = ELEMENTS
    row["values"] = worker + 1
    for name, value in fields.items():
        header[name] = value
    return row


def test_a_job_finds_slots_as_new_that_another_has_used_and_a_late_one_spoils_nothing(
    kernels,
):
    kernel = kernels[ELEMENTS]
    before, after = twins(kernel, workers=1), twins(kernel, workers=1)
    before.take(packet_of_worker(0))
    assert len(after.take(packet_of_worker(0, round=0)).to) == 1
    assert not len(before.twin.take(packet_of_worker(0, round=1)).to)
    assert kernel.counts()["dropped: of a job that has ended"] == 1
    assert len(after.take(packet_of_worker(0, round=1)).to) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"type": 0x86DD},
        {"version": 0x46},
        {"protocol": 6},
        {"fragment": 0x2000},
        {"fragment": 0x0001},
        {"host": "10.77.0.99"},
        {"port": 29701},
    ],
)
def test_what_is_not_for_the_kernel_goes_on_as_it_came(kernels, changes):
    kernel = kernels[ELEMENTS]
    slots = twins(kernel).twin
    row = slots.sealed(packet_of_worker(0))
    sent = frame(row, 0, **changes)
    assert kernel.objects.run("receive", sent)[:2] == (XDP_PASS, sent)
    assert kernel.objects.run("answer", sent)[:2] == (PASSED_ON, sent)
    assert slots.state()[0]["round"].tolist() == slots.state()[0]["round"].tolist()


def test_strangers_datagrams_go_on_to_the_socket_and_forged_ones_are_dropped(kernels):
    kernel = kernels[ELEMENTS]
    slots = twins(kernel).twin
    number = slots.job.number
    for fields, udp_bytes, result, word in (
        ({"job": number + 10**6}, None, XDP_PASS, None),
        ({"magic": 1}, None, XDP_PASS, None),
        ({"kind": 0}, None, XDP_DROP, "dropped: of an unknown kind"),
        ({"kind": 99}, None, XDP_DROP, "dropped: of an unknown kind"),
        ({}, 20, XDP_DROP, "dropped: truncated"),
        ({}, 8 + 40 + 4 * ELEMENTS + 4, XDP_DROP, "dropped: truncated"),
        ({"elements": 3}, 8 + 40 + 4 * ELEMENTS, XDP_DROP, "dropped: truncated"),
        ({"slot": SLOTS}, None, XDP_DROP, "dropped: beyond the lease"),
    ):
        row = packet_of_worker(0, **({"job": number} | fields))
        slots.seal.sign(row)
        sent = frame(row, 0, **({"udp_bytes": udp_bytes} if udp_bytes else {}))
        before = kernel.counts()
        got, data, _ = kernel.objects.run("receive", sent)
        assert got == result, fields
        new = kernel.counts() - before
        assert new[word] == 1 if word else data == sent and not new

    row = packet_of_worker(0, job=number)
    slots.seal.sign(row)
    good = frame(row, 0)
    for place in range(42, len(good)):
        if place - 42 in range(8, 20):  # what it is, and whose: tried above
            continue
        forged = bytearray(good)
        forged[place] ^= 4
        before = kernel.counts()
        assert kernel.objects.run("receive", bytes(forged))[0] == XDP_DROP
        assert (kernel.counts() - before)["dropped: forged"] == 1


@settings(max_examples=examples(100))
@given(
    data=st.binary(min_size=40, max_size=200),
    changes=st.lists(st.tuples(st.integers(0, 160), st.integers(0, 255)), max_size=4),
    made_of_ours=st.booleans(),
    cut=st.integers(40, 42 + 40 + 4 * ELEMENTS),
)
def test_fuzzed_frames_change_no_slot(kernels, data, changes, made_of_ours, cut):
    kernel = kernels[ELEMENTS]
    slots = twins(kernel).twin
    if made_of_ours:
        row = slots.sealed(packet_of_worker(0))
        original = frame(row, 0)
        mutable = bytearray(original[:cut])
        for place, value in changes:
            if place < len(mutable):
                mutable[place] = value
        data = bytes(mutable)
        if data[42:] == original[42:]:
            return
    before = slots.state()
    kernel.objects.run("receive", data)
    kernel.objects.run("answer", data)
    for old, new in zip(before, slots.state(), strict=True):
        assert (old == new).all()


def test_a_probe_goes_back_as_it_came(kernels):
    kernel = kernels[ELEMENTS]
    slots = twins(kernel).twin
    row = slots.sealed(packet_of_worker(1, kind=Kind.PROBE, bitmap=0))
    sent = frame(row, 1)
    result, marked, _ = kernel.objects.run("receive", sent)
    assert result == XDP_PASS
    result, made, _ = kernel.objects.run("answer", marked)
    assert result == REDIRECTED
    assert made[42:] == sent[42:]
    assert made[30:34] == sent[26:30]  # to whom it came from


def test_an_answer_is_made_of_nothing_but_what_the_other_program_has_marked(kernels):
    """A stranger's datagram that looks like a marked one, but for the secret."""
    kernel = kernels[ELEMENTS]
    slots = twins(kernel).twin
    row = packet_of_worker(0, kind=1, job=slots.job.number, tag=kernel.cookie ^ 1)
    assert kernel.objects.run("answer", frame(row, 0))[0] == PASSED_ON


def test_packet_makes_what_the_kernel_takes(kernels):
    """The rows of the table, as the tests of user space have them."""
    slots = twins(kernels[net.ELEMENTS], net.ELEMENTS, workers=2)
    slots.take(packet(0, values=(1, 2)))
    assert slots.take(packet(1, values=(10, 20))).packets["values"][0, 0] == 11
