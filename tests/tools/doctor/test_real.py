"""Examinations of real processes, on loopback."""

import json
import socket
from pathlib import Path

import pytest

import paceline.tools.doctor
from paceline.cluster.probe.pairs import LinkMeasurement
from paceline.cluster.probe.tcp_counters import connections
from paceline.tools.doctor import host
from paceline.tools.doctor.evidence import Evidence
from tests.support import forked

EXAMINES = Path(paceline.tools.doctor.__file__).parent / "__main__.py"
SCRIPTS = Path(__file__).parent / "scripts"
TRAINS, SMALL_MESSAGES = SCRIPTS / "trains.py", SCRIPTS / "small_messages.py"


def examine(folder, *script, workers=2):
    file = folder / "evidence.json"
    words = [EXAMINES, f"--output={file}", "--seconds-per-pair=0.01", *script]
    forked.run_together(workers, words, folder=folder)
    return Evidence.read(file.read_bytes())


@pytest.mark.slow
def test_a_training_on_two_processes_that_makes_its_own_group(tmp_path):
    evidence = examine(tmp_path, TRAINS, "slow", "own")
    assert (evidence.runtime, evidence.spec) == ("real", "bsp:buckets=ddp")
    first, second = evidence.workers
    assert first.step.input.median < 0.05 <= second.step.input.median
    # The other one waits for it: what both take is the same.
    assert first.step.exposed.median > 0.04
    assert first.step.step.median == pytest.approx(second.step.step.median, rel=0.3)
    for worker in evidence.workers:
        parts = worker.step
        known = (parts.input, parts.forward, parts.backward, parts.update)
        total = sum(one.median for one in known) + parts.exposed.median
        assert total == pytest.approx(parts.step.median, rel=0.3)
        assert parts.messages == 1
        assert parts.bytes_sent == 4 * (64 * 64 + 64) * 4
        assert worker.interface.name == "lo"
        assert worker.interface.kind == "loopback"
        assert worker.threads == 1
        assert worker.cores >= 1
    assert evidence.workload.names[0] == "0.weight"
    for path in evidence.paths:
        assert len(path.rates) == 5
        assert min(path.rates) > 1e6
        assert path.retransmitted < 0.05


@pytest.mark.parametrize(
    "word", [pytest.param("lossy", marks=pytest.mark.slow), "whole"]
)
def test_packets_that_get_lost(word):
    first, _ = forked.run_together(2, [SMALL_MESSAGES, word])
    found = [LinkMeasurement(**one) for one in json.loads(first.stdout)]
    # Flows go from rank 0 to rank 1, and back, in turn.
    there = [(one.sent, one.lost) for one in found[::2]]
    there += [(one.sent_back, one.lost_back) for one in found[1::2]]
    back = [(one.sent, one.lost) for one in found[1::2]]
    back += [(one.sent_back, one.lost_back) for one in found[::2]]
    part = [
        sum(lost for _, lost in way) / sum(sent for sent, _ in way)
        for way in (there, back)
    ]
    if word == "lossy":
        assert part[0] > max(0.02, 2 * part[1])
    else:
        assert max(part) < 0.02


@pytest.mark.slow
def test_without_a_script(tmp_path):
    evidence = examine(tmp_path)
    assert [worker.step for worker in evidence.workers] == [None, None]
    assert len(evidence.paths) == 2
    assert len(evidence.concurrent) == 1


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_paceline(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import sys\nprint('here')\nsys.exit(0)\n")
    evidence = examine(tmp_path, script)
    assert len(evidence.paths) == 2
    assert evidence.workers[0].step is None


def test_the_kernel_counts_what_a_connection_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as ours, server.accept()[0] as theirs:
            before = {c for c in connections() if c.acknowledged > 300_000}
            ours.sendall(bytes(400_000))
            left = 400_000
            while left:
                left -= len(theirs.recv(left))
            (found,) = {c for c in connections() if c.acknowledged > 300_000} - before
    assert found.address == "127.0.0.1"
    assert found.segments >= 400_000 / 65536
    assert found.lost == 0


def test_a_machine_knows_its_own_interfaces():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as ours, server.accept()[0] as theirs:
            ours.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(theirs.recv(left))
            used, others = host.interfaces()
    assert (used.name, used.kind, used.network) == ("lo", "loopback", "127.0.0.0/8")
    assert "lo" not in [one.name for one in others]
    assert host.cores() >= 1
    assert 0 <= host.busy_cores(0.05) <= 1000


class Link(dict):
    """A link as netlink describes it."""

    def get_attr(self, name):
        return self.get(name)


@pytest.mark.parametrize(
    ("files", "driver", "kind"),
    [
        (["device/vendor"], None, "ethernet"),
        (["device/vendor", "wireless/status"], None, "wireless"),
        ([], "bridge", "virtual"),
        ([], "tun", "virtual"),
        ([], "veth", "container"),
        ([], "macvlan", "container"),
        ([], "vlan", "ethernet"),
        ([], "bond", "ethernet"),
        ([], None, "virtual"),
    ],
)
def test_kinds_of_interfaces(files, driver, kind, tmp_path, monkeypatch):
    folder = tmp_path / "net0"
    for name in ("ifindex", "speed", *files):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text({"ifindex": "7", "speed": "1000"}.get(name, "1"))
    monkeypatch.setattr(host, "_INTERFACES", tmp_path)
    link = Link(index=7, flags=1, IFLA_IFNAME="net0")
    if driver is not None:
        link["IFLA_LINKINFO"] = Link(IFLA_INFO_KIND=driver)
    assert host._kind(link) == kind
    assert host._rate(link) == 125e6
    # The files describe another network namespace than this process's.
    apart = Link(link, index=8)
    assert host._kind(apart) == (kind if driver else "container")
    assert host._rate(apart) is None
