"""Hosts, processes in them, and what happens to their links."""

import os
import subprocess
import sys
import threading

import pytest
from pyroute2 import NetlinkError

from paceline.cluster import parse_cluster, uniform_cluster
from paceline.errors import UsageError
from paceline.runtimes.emulated import link_check
from paceline.runtimes.emulated.errors import EmulationError, KernelLacksError
from paceline.runtimes.emulated.keeper import needs
from paceline.runtimes.emulated.link_check import check_links
from paceline.runtimes.emulated.machine_check import capabilities
from paceline.runtimes.emulated.network import EmulatedNetwork
from tests.support.emulation import connect
from tests.support.hanging import SECONDS, eventually

TWO_RACKS = """
[[rack]]
workers = 1
link = "100 Mbit/s"
latency = "0 s"
uplink = "20 Mbit/s"
[[rack]]
workers = 2
link = "100 Mbit/s"
latency = "0 s"
"""


def output(network, host, *arguments, **options):
    process = network.popen(host, arguments, stdout=subprocess.PIPE, **options)
    with process.stdout:
        text = process.stdout.read().decode()
    assert process.wait(SECONDS) == 0
    return text


def transfer(sender, receiver, text):
    sender.sendall(text)
    return receiver.recv(len(text), 0)


TRIES = 10
"""Times three measurements of each link: see `paceline.runtimes.emulated.link_check`."""


def test_hosts_reach_each_other(network):
    for pair in ((0, 1), (1, 0)):
        sender, receiver = connect(network, *pair)
        with sender, receiver:
            assert transfer(sender, receiver, b"hello") == b"hello"
            assert receiver.getpeername()[0] == network.hosts[pair[0]].address


def test_racks_and_servers_reach_each_other(namespaces):
    with EmulatedNetwork(
        parse_cluster(TWO_RACKS), extra_hosts=1, process_bytes=0
    ) as network:
        assert [host.name for host in network.hosts] == [
            "worker 0",
            "worker 1",
            "worker 2",
            "server 0",
        ]
        for pair in ((0, 1), (1, 2), (2, 3), (3, 0)):
            sender, receiver = connect(network, *pair)
            with sender, receiver:
                assert transfer(sender, receiver, b"hello") == b"hello"


@pytest.mark.slow
def test_an_uplink_limits_what_crosses_it(namespaces):
    with EmulatedNetwork(parse_cluster(TWO_RACKS), process_bytes=0) as network:
        report = eventually(
            lambda: check_links(network), lambda report: report.worst < 0.1, TRIES
        )
        found = {link.name: link for link in report.links}
        assert found["rack 0 up"].error == pytest.approx(0, abs=0.1)
        assert found["rack 0 down"].asked == 2.5e6
        assert found["worker 0 out"].possible == 2.5e6
        assert report.idle == ("rack 1 up", "rack 1 down")


def test_as_many_streams_load_a_link_as_it_takes(monkeypatch):
    cluster = parse_cluster(
        """
        [[rack]]
        workers = 3
        link = "100 Mbit/s"
        latency = "0 s"
        uplink = "250 Mbit/s"
        [[rack]]
        workers = 2
        link = "200 Mbit/s"
        latency = "0 s"
        uplink = "800 Mbit/s"
        """
    )
    monkeypatch.setattr(link_check, "_run", lambda network, load: load.rate)
    report = check_links(EmulatedNetwork(cluster, process_bytes=0))
    found = {link.name: link.possible * 8e-6 for link in report.links}
    assert (found["worker 0 out"], found["worker 4 in"]) == (100, 200)
    # Two streams of 100 Mbit/s: the second rack has two hosts.
    assert (found["rack 0 up"], found["rack 1 down"]) == (200, 200)
    assert len(found) == 14
    assert report.idle == ()
    assert report.off() == ()


def test_links_give_the_goodput_that_was_asked_for(network):
    report = eventually(
        lambda: check_links(network), lambda report: report.worst < 0.1, TRIES
    )
    assert [link.name for link in report.links] == [
        "worker 0 out",
        "worker 0 in",
        "worker 1 out",
        "worker 1 in",
    ]
    assert report.idle == ("rack 0 up", "rack 0 down")
    assert report.off(0.1) == ()
    assert "4 links measured" in report.summary()
    assert "worker 0 out: asked for 100 Mbit/s, gives " in str(report.links[0])


@pytest.mark.slow
def test_a_link_is_throttled_during_a_run(network):
    network.set_rate(0, 2.5e6)
    try:
        throttled = eventually(
            lambda: check_links(network).links[0],
            lambda link: abs(link.error) < 0.1,
            TRIES,
        )
        assert throttled.asked == 2.5e6
        assert throttled.found == pytest.approx(2.5e6, rel=0.1)
    finally:
        network.set_rate(0, network.cluster.capacities[0])


@pytest.mark.parametrize("link", [0, 1, 2, 3])
def test_a_cut_link_loses_packets_until_it_is_repaired(network, link):
    sender, receiver = connect(network, 0, 1)
    with sender, receiver:
        assert transfer(sender, receiver, b"before") == b"before"
        network.cut(link)
        network.cut(link)  # cutting twice is cutting
        network.set_rate(link, 1e6)  # and a new rate does not mend it
        try:
            with pytest.raises(TimeoutError):
                connect(network, 0, 1, seconds=0.1)
            receiver.settimeout(0.1)
            if link in network.path(0, 1):  # else only the answers are lost
                with pytest.raises(TimeoutError):
                    transfer(sender, receiver, b"lost")
        finally:
            network.set_rate(link, network.cluster.capacities[link])
            network.repair(link)
        receiver.settimeout(SECONDS)
        if link in network.path(0, 1):
            assert receiver.recv(4) == b"lost"
        assert transfer(sender, receiver, b"after") == b"after"


def test_a_repaired_link_that_was_not_cut_stays_as_it_is(network):
    network.repair(0)
    sender, receiver = connect(network, 0, 1)
    with sender, receiver:
        assert transfer(sender, receiver, b"hello") == b"hello"


def test_measuring_a_cut_link_names_it(network, monkeypatch):
    monkeypatch.setattr(link_check, "_CONNECT_SECONDS", 0.1)
    network.cut(2)
    try:
        with pytest.raises(
            EmulationError, match="cut: worker 0 out, worker 1 in, worke"
        ):
            check_links(network)
    finally:
        network.repair(2)


def test_a_process_has_streams_environment_directory_and_status(network, tmp_path):
    script = "read line; echo $NAME $line $PWD; echo oh >&2; exit 3"
    process = network.popen(
        0,
        ["sh", "-c", script],
        env={"NAME": "zoë", "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process.stdin, process.stdout, process.stderr:
        process.stdin.write(b"line\n")
        process.stdin.flush()
        assert process.stdout.read().decode() == f"zoë line {tmp_path}\n"
        assert process.stderr.read() == b"oh\n"
    assert process.wait(SECONDS) == process.poll() == process.returncode == 3


def test_a_process_can_write_both_streams_into_a_file(network, tmp_path):
    with open(tmp_path / "log", "wb") as log:
        process = network.popen(
            0, ["sh", "-c", "echo a; echo b >&2"], stdout=log, stderr=subprocess.STDOUT
        )
        assert process.wait(SECONDS) == 0
    assert (tmp_path / "log").read_text() == "a\nb\n"


def test_a_process_can_be_waited_for_and_ended(network):
    process = network.popen(0, ["sleep", "1000"], stdin=subprocess.DEVNULL)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.kill(process.pid, 0)  # its number on the machine
    process.terminate()
    assert process.wait(SECONDS) == -15
    process.kill()  # nothing happens


def test_a_process_is_alone_in_its_host(network):
    assert "eth0" in output(network, 0, "cat", "/proc/net/dev")
    assert output(network, 0, "readlink", "/proc/self/ns/net") != output(
        network, 1, "readlink", "/proc/self/ns/net"
    )


def test_a_process_sees_itself_in_proc(network):
    script = "import os; print(os.readlink('/proc/self') == str(os.getpid()))"
    assert output(network, 0, sys.executable, "-c", script) == "True\n"


def test_a_program_that_is_not_there_is_named(network):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        network.popen(0, ["no-such-program"], stdout=subprocess.PIPE)


def test_several_threads_use_one_network(network):
    codes = []

    def run(host):
        codes.append(network.popen(host, ["sh", "-c", f"exit {host}"]).wait(SECONDS))

    threads = [threading.Thread(target=run, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [0] * 4 + [1] * 4


def test_what_does_not_exist_is_refused(network):
    expected = r"unknown link 6: expected 0 \(worker 0 out\) to 5 \(rack 0 down\)"
    for call in (network.cut, network.repair, lambda link: network.set_rate(link, 1e6)):
        with pytest.raises(UsageError, match=expected):
            call(6)
    with pytest.raises(UsageError, match="unknown host 2: expected 0 to 1"):
        network.popen(2, ["true"])
    with pytest.raises(UsageError, match="worker 0 out: expected"):
        network.set_rate(0, 0.0)


def test_a_network_that_was_not_entered_says_how():
    network = EmulatedNetwork(uniform_cluster(2, "100 Mbit/s", "0 s"), process_bytes=0)
    with pytest.raises(EmulationError, match="with EmulatedNetwork"):
        network.cut(0)


def test_what_is_not_emulated_is_said(namespaces):
    cluster = uniform_cluster(2, "100 Gbit/s", "50 us")
    with EmulatedNetwork(cluster, process_bytes=0) as network:
        texts = "\n".join(network.warnings)
        assert "worker 1 in: 100 Gbit/s is more than can be emulated" in texts
        delayed = "latency is not emulated (50 us asked for)" not in texts
    (netem,) = (item for item in capabilities().items if item.name == "netem")
    assert netem.present == delayed


def test_a_kernel_without_a_feature_is_named():
    expected = r"with tbf.*CONFIG_NET_SCH_TBF.*modprobe sch_tbf"
    with pytest.raises(KernelLacksError, match=expected), needs("tbf"):
        raise NetlinkError(2, "No such file or directory")
