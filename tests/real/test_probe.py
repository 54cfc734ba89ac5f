"""``paceline probe`` on real processes of one machine: loopback is their network."""

import json

from paceline.network import load_cluster
from tests import forked


def probe(folder, *words):
    return forked.run(["-m", "paceline", "probe", *words], folder=folder, seconds=120)


def test_two_processes_of_one_machine(tmp_path):
    done = probe(tmp_path, "--workers", "2", "--seconds", "0.02", "--json")
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert findings["hosts"] == [0, 1]
    assert findings["goodput"][0][1] > 1e6
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert (cluster.workers, len(cluster.racks)) == (2, 1)
    assert cluster.processor.cores >= 1


def test_a_wrong_option_is_named(tmp_path):
    done = probe(tmp_path, "--wrld", "real")
    assert done.returncode == 1
    assert "unknown option '--wrld'" in done.stderr


def test_one_worker_has_no_network(tmp_path):
    done = probe(tmp_path, "--world", "virtual", "--workers", "1")
    assert done.returncode == 1
    assert "one worker has no network to measure" in done.stderr
