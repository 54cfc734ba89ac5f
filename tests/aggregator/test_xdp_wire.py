"""What only wires and cards would show: a device that completes checksums by itself, and one
whose driver has no XDP."""

import array
import contextlib
import fcntl
import socket
import struct

import numpy as np

from paceline.aggregator import ends
from tests.aggregator import rack as racks
from tests.aggregator.places import InARack, together
from tests.aggregator.test_udp import one_by_one

SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17


@contextlib.contextmanager
def checksums_completed(interface):
    """What leaves there does so with whole checksums, as onto a wire. Between namespaces they
    are left open, and nobody looks."""

    def complete(on):
        words = array.array("B", struct.pack("II", ETHTOOL_STXCSUM, not on))
        request = struct.pack("16sP", interface.encode(), words.buffer_info()[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            fcntl.ioctl(end, SIOCETHTOOL, request + bytes(16))

    complete(True)
    yield
    complete(False)


def test_answers_have_the_right_checksum_where_a_device_completes_it(rack, bpf):
    place = InARack(rack, "xdp")
    values = np.ones((2, 30_000), np.int32)
    with (
        place.running() as aggregator,
        racks.inside(rack.aggregator),
        checksums_completed("eth0"),
    ):

        def work(worker):
            client = place.joining(aggregator, worker, workers=2)
            client.sum_integers(values[worker])
            client.close()

        together(2, work)
    assert (values == 2).all()


def test_sums_are_exact_where_the_driver_has_no_xdp(rack, bpf, monkeypatch):
    """A bridge has none. Packets come one by one there, as from a wire."""
    monkeypatch.setattr(ends, "datagrams", one_by_one)
    place = InARack(rack, "xdp", interface="br0")
    values = np.ones((2, 30_000), np.int32)
    with rack.behind_a_bridge(), place.running() as aggregator:
        assert aggregator.how == "generic"

        def work(worker):
            client = place.joining(aggregator, worker, workers=2)
            client.sum_integers(values[worker])
            client.close()

        together(2, work)
    assert (values == 2).all()
