"""The header, what is dropped because of it, and what a datagram's size may be."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.in_network.packets import (
    FEWEST_ELEMENTS,
    HEADER,
    HEADER_BYTES,
    Kind,
    Seal,
    blank,
    elements_for,
    mtu_for,
    packet_type,
    sizes,
    well_formed,
)
from paceline.errors import UsageError
from tests.support.profiles import examples

ELEMENTS = 6
KEY = b"a key of the job"


def sealed(count=3):
    packets = blank(count, ELEMENTS)
    packets["header"]["kind"] = Kind.CONTRIBUTION
    packets["header"]["slot"] = np.arange(count)
    packets["header"]["elements"] = np.arange(count) + 1
    packets["values"] = np.arange(ELEMENTS) - 2
    Seal(KEY).sign(packets)
    return packets


def test_the_header_has_the_layout_that_is_written_down():
    offsets = {name: HEADER.fields[name][1] for name in HEADER.names}
    assert offsets == {
        "tag": 0,
        "magic": 8,
        "kind": 12,
        "flags": 13,
        "elements": 14,
        "job": 16,
        "slot": 20,
        "round": 24,
        "exponent": 28,
        "worker": 30,
        "bitmap": 32,
    }
    assert HEADER_BYTES == 40
    assert packet_type(ELEMENTS).fields["values"][1] == 40


def test_what_was_signed_is_genuine_and_no_other_key_makes_it():
    packets = sealed()
    assert Seal(KEY).genuine(packets).all()
    assert not Seal(KEY[::-1]).genuine(packets).any()


def test_each_bit_of_a_datagram_is_under_the_tag_and_no_byte_beyond_it():
    packets = sealed(1)
    size = int(sizes(packets)[0])
    data = packets.view(np.uint8)
    for place in range(len(data)):
        if place in (14, 15):  # the length, which is checked before
            continue
        data[place] ^= 4
        assert Seal(KEY).genuine(packets)[0] == (place >= size)
        data[place] ^= 4


def test_a_tag_is_what_its_formula_says_whatever_else_is_in_the_batch():
    """By plain numbers, one datagram at a time; sizes differ within the batch."""
    packets, seal = sealed(6), Seal(KEY)
    header = packets["header"]
    header["elements"] = [ELEMENTS, 0, 1, ELEMENTS, 3, 0]
    seal.sign(packets)
    for row, size in enumerate(sizes(packets).tolist()):
        data = packets[row].tobytes()[8:size]
        words = np.frombuffer(data, "<u4").tolist()
        by = seal.multipliers(len(words)).tolist()
        sums = [
            sum(word * pair[k] for word, pair in zip(words, by, strict=True)) % 2**64
            for k in (0, 1)
        ]
        text = seal.last_key + b"".join(number.to_bytes(8, "little") for number in sums)
        tag = hashlib.blake2s(text, digest_size=8).digest()
        assert int.from_bytes(tag, "little") == header["tag"][row]
    assert (seal.multipliers(3) == Seal(KEY).multipliers(50)[:3]).all()
    assert len(np.unique(seal.multipliers(50))) == 100


@settings(max_examples=examples(200))
@given(
    data=st.binary(max_size=HEADER_BYTES + 4 * ELEMENTS + 8),
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
    made_of_ours=st.booleans(),
    cut=st.integers(0, HEADER_BYTES + 4 * ELEMENTS),
)
def test_fuzzed_datagrams_are_counted_and_none_is_genuine(
    data, changes, made_of_ours, cut
):
    if made_of_ours:
        ours = sealed(1)
        original = ours.tobytes()[: int(sizes(ours)[0])]
        mutable = bytearray(original[:cut])
        for place, value in changes:
            if place < len(mutable):
                mutable[place] = value
        data = bytes(mutable)
        if data == original:
            return
    row = packet_type(ELEMENTS).itemsize
    packets = np.zeros(1, packet_type(ELEMENTS))
    packets.view(np.uint8)[: min(len(data), row)] = np.frombuffer(data[:row], np.uint8)
    lengths = np.array([len(data) if len(data) <= row else -1])
    dropped = Counter()
    good = well_formed(packets, lengths, dropped)
    if good.any():
        assert not dropped
        assert not Seal(KEY).genuine(packets).any()
    else:
        assert sum(dropped.values()) == 1


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("magic", 1, "foreign"),
        ("kind", 0, "of an unknown kind"),
        ("kind", 99, "of an unknown kind"),
        ("elements", 5, "truncated"),
        ("elements", 65535, "truncated"),
    ],
)
def test_a_header_that_lies_is_dropped(field, value, word):
    packets = sealed(2)
    lengths = sizes(packets)
    packets["header"][field][1] = value
    dropped = Counter()
    assert well_formed(packets, lengths, dropped).tolist() == [True, False]
    assert dropped == {word: 1}


def test_elements_fill_a_packet_and_no_more():
    assert elements_for(1500) == 358
    assert mtu_for(358) == 1500
    assert elements_for(1500, ip_bytes=40) == 352
    assert mtu_for(elements_for(9000)) <= 9000
    assert mtu_for(elements_for(65536)) <= 65535 + 28


def test_an_mtu_that_holds_next_to_nothing_is_refused():
    least = mtu_for(FEWEST_ELEMENTS)
    assert elements_for(least) == FEWEST_ELEMENTS
    with pytest.raises(UsageError, match=f"expected {least} bytes or more"):
        elements_for(least - 1)


@pytest.mark.parametrize("length", [15, 65])
def test_a_key_has_a_length(length):
    with pytest.raises(ValueError, match="16 to 64 bytes"):
        Seal(bytes(length))
