"""Batches over real sockets, by both ways of moving them."""

import contextlib
import socket

import numpy as np
import pytest

from paceline.collectives.in_network.datagrams import (
    BATCH,
    Addresses,
    Single,
    check_way,
    held_datagrams,
    open_socket,
)
from paceline.collectives.in_network.packets import blank, sizes
from paceline.collectives.in_network.udp_socket import Batched, datagrams
from paceline.errors import UsageError

ELEMENTS = 6


def apart(end, elements):
    """In batches, but each datagram a packet of its own from end to end."""
    return Batched(end, elements, segments=False)


WAYS = [Single, apart, Batched]


@contextlib.contextmanager
def ends(count, host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(open_socket(family)) for _ in range(count)]
        for end in sockets:
            end.bind((host, 0))
        yield sockets


def numbered(count):
    """Runs of datagrams of all sizes."""
    packets = blank(count, ELEMENTS)
    packets["header"]["slot"] = np.arange(count)
    packets["header"]["elements"] = np.arange(count) // 9 % (ELEMENTS + 1)
    packets["values"] = np.arange(count)[:, None]
    return packets


@pytest.mark.parametrize("receiving", WAYS)
@pytest.mark.parametrize("sending", WAYS)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_rows_go_to_their_addresses_whole_and_in_order(sending, receiving, host):
    count = BATCH + 44
    with ends(3, host) as (source, *targets):
        table = Addresses()
        for target in targets:
            table.add(target.getsockname())
        packets = numbered(count)
        rows = np.concatenate((np.arange(count), np.arange(0, count, 3)))
        to = np.concatenate((np.zeros(count, np.int64), np.ones(count // 3, np.int64)))
        sender = sending(source, ELEMENTS)
        sender.send(packets, rows, table, to)
        for place, target in enumerate(targets):
            expected = rows[to == place]
            came = receiving(target, ELEMENTS)
            batches, lengths = [], []
            while len((batch := came.receive())[0]):
                batches.append(batch[0].copy())
                lengths += batch[1].tolist()
            got = np.concatenate(batches)
            assert lengths == sizes(packets)[expected].tolist()
            assert got["header"]["slot"].tolist() == expected.tolist()
            for row in got:
                elements = row["header"]["elements"]
                assert (row["values"][:elements] == row["header"]["slot"]).all()
        assert not sender.counts


@pytest.mark.parametrize("elements", [0, 1, ELEMENTS - 1])
@pytest.mark.parametrize("way", WAYS)
def test_one_run_of_short_datagrams_comes_whole(way, elements):
    with ends(2) as (source, target):
        source.connect(target.getsockname())
        packets = numbered(44)
        packets["header"]["elements"] = elements
        sender, taker = Batched(source, ELEMENTS), way(target, ELEMENTS)
        sender.send(packets, np.arange(44), None, np.zeros(44, np.int64))
        got, lengths = taker.receive()
        assert lengths.tolist() == sizes(packets).tolist()
        assert got["header"]["slot"].tolist() == list(range(44))
        values = got["values"][:, :elements]
        assert (values == packets["values"][:, :elements]).all()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_longer_than_a_row_is_known(way):
    with ends(2) as (source, target):
        row = blank(1, ELEMENTS).dtype.itemsize
        for length in (row, row + 1, 0, 5000):
            source.sendto(bytes(length), target.getsockname())
        _, lengths = way(target, ELEMENTS).receive()
        assert lengths.tolist() == [row, -1, 0, -1]


@pytest.mark.parametrize("way", WAYS)
def test_nobody_there_is_counted_and_does_not_stop_the_others(way):
    with ends(1) as (source,):
        with ends(1) as (gone,):
            source.connect(gone.getsockname())
        sender = way(source, ELEMENTS)
        for _ in range(3):
            sender.send(numbered(2), np.arange(2), None, np.zeros(2, np.int64))
        sender.receive()
    with ends(2) as (source, target):
        table = Addresses()
        table.add(("127.0.0.1", target.getsockname()[1]))
        table.add(("127.0.0.1", 0))  # nobody's
        sender = way(source, ELEMENTS)
        sender.send(numbered(3), np.arange(3), table, np.array([0, 1, 0]))
        assert sum(sender.counts.values()) == 1
        assert way(target, ELEMENTS).receive()[0]["header"]["slot"].tolist() == [0, 2]


def test_this_system_has_the_faster_way():
    with ends(1) as (end,):
        assert isinstance(datagrams(end, ELEMENTS), Batched)
        assert held_datagrams(end, 358) > 50


def test_a_way_that_is_too_narrow_is_refused():
    with ends(2) as (source, target):
        source.connect(target.getsockname())
        check_way(source, 1500)
        with pytest.raises(UsageError, match=r"has an MTU of 6553\d bytes"):
            check_way(source, 70000)
