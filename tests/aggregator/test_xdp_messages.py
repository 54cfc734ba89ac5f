"""What is said where the kernel's path cannot be had."""

import contextlib
import shutil

import pytest

from paceline.aggregator.xdp import build, libbpf
from paceline.aggregator.xdp.aggregator import XdpAggregator
from paceline.aggregator.xdp.kernel import MOST_ELEMENTS, Kernel
from paceline.errors import UsageError
from paceline.server.security import TRUSTED
from tests.aggregator import rack as racks
from tests.aggregator.places import TOKEN, InARack


def test_without_clang_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        UsageError, match=r"apt install clang libbpf-dev.*--path sockets"
    ):
        build.compiled(16)


def test_without_libbpf_it_says_what_to_install(monkeypatch, bpf):
    monkeypatch.setattr(libbpf, "NAME", "libbpf-that-is-not-there.so.1")
    with pytest.raises(UsageError, match=r"needs libbpf 1.0.*apt install"):
        Kernel(1, 16)


def test_what_does_not_compile_is_shown(monkeypatch, bpf, tmp_path):
    (tmp_path / build.MAIN).write_text("#include <no/such/header.h>\n")
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    with pytest.raises(UsageError, match=r"(?s)could not compile.*no/such/header.h"):
        build.compiled(16)


def test_it_is_compiled_once_for_each_size(monkeypatch, bpf):
    first = build.compiled(16)
    made = first.stat().st_mtime_ns
    assert build.compiled(16) == first
    assert first.stat().st_mtime_ns == made
    assert build.compiled(17) != first


def test_datagrams_that_fill_more_than_a_page_are_refused():
    with pytest.raises(UsageError, match="--mtu 3498"):
        Kernel(1, MOST_ELEMENTS + 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_an_address_that_is_no_interfaces_is_refused(address, monkeypatch):
    monkeypatch.setenv(TRUSTED, "1")
    with pytest.raises(UsageError, match="IPv4 address"):
        XdpAggregator(address, 0, interface="lo", token=TOKEN)


def test_an_interface_that_is_not_there_or_is_taken_is_said(rack, bpf):
    options = {"token": TOKEN, "interface": "eth0"}
    with racks.inside(rack.aggregator):
        with pytest.raises(
            UsageError, match=r"--interface eth7: expected one of .*eth0"
        ):
            XdpAggregator(racks.AGGREGATOR, 0, **options | {"interface": "eth7"})
        first = XdpAggregator(racks.AGGREGATOR, 0, **options)
        with pytest.raises(UsageError, match="another XDP program"):
            XdpAggregator(racks.AGGREGATOR, 0, **options)
        first.close()
        XdpAggregator(racks.AGGREGATOR, 0, **options).close()


def test_a_worker_on_the_aggregators_own_host_is_refused(rack, bpf):
    place = InARack(rack, "xdp")
    with place.running() as aggregator, racks.inside(rack.aggregator):
        place.at = lambda worker: contextlib.nullcontext()
        with pytest.raises(UsageError, match="own host"):
            place.joining(aggregator, 0)
