"""A machine that does not know its own name as others do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.emulation import SECONDS

SCRIPT = str(Path(__file__).parent / "scripts" / "averages_and_serves.py")
WITH_HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'


def with_hosts(file, *command):
    """A command that sees *file* as /etc/hosts, as nobody else does."""
    return ["unshare", "--mount", "sh", "-c", WITH_HOSTS, str(file), *command]


@pytest.fixture
def own_hosts_files(tmp_path):
    """Skip where /etc/hosts cannot be covered for one process alone."""
    (tmp_path / "hosts").write_text("")
    command = with_hosts(tmp_path / "hosts", "true")
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")


@pytest.mark.slow
def test_a_name_that_means_loopback_on_its_own_machine(
    network, own_hosts_files, tmp_path
):
    addresses = [host.address for host in network.hosts]
    processes = []
    for rank, own in enumerate(("127.0.1.1", addresses[0])):
        hosts = tmp_path / f"hosts-{rank}"
        hosts.write_text(f"127.0.0.1 localhost\n{own} node0\n")
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "PACELINE_TRUSTED_NETWORK": "1",
        }
        processes.append(
            network.popen(
                rank,
                with_hosts(hosts, sys.executable, SCRIPT),
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    outputs = []
    for process in processes:
        with process.stdout:
            outputs.append(process.stdout.read().decode())
        assert process.wait(SECONDS) == 0, outputs
    assert outputs == ["trained 0 of 2\n", "trained 1 of 2\n"]
