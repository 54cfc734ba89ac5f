"""The same for an ordinary user, and for one who may not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.runtimes.emulated.machine_check import capabilities
from tests.support.emulation import SECONDS

NOBODY = 65534
REPOSITORY = Path(__file__).parents[3]

RUN = """
import os, sys
from paceline.cluster import uniform_cluster
from paceline.runtimes.emulated.machine_check import capabilities
from paceline.runtimes.emulated.link_check import check_links
from paceline.runtimes.emulated.network import EmulatedNetwork
with EmulatedNetwork(uniform_cluster(2, "100 Mbit/s", "0 s"), process_bytes=0) as network:
    network.cut(0)
    network.repair(0)
    assert not check_links(network).off(0.2)
    assert network.popen(0, ["sh", "-c", "exit $(id -u)"]).wait() == os.getuid() % 256
print(capabilities().mode)
"""

REFUSED = """
import os
from paceline.cluster import uniform_cluster
from paceline.runtimes.emulated.machine_check import capabilities
from paceline.runtimes.emulated.errors import EmulationPermissionError
from paceline.runtimes.emulated.network import EmulatedNetwork
open("/proc/sys/user/max_user_namespaces", "w").write("0")
import ctypes
for capability in range(41):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # drop it from the bounding set
found = capabilities()
assert found.mode is None and not found.enough
try:
    EmulatedNetwork(uniform_cluster(2, "100 Mbit/s", "0 s"), process_bytes=0).__enter__()
except EmulationPermissionError as error:
    print(error)
"""


def interpreter_for(user):
    """An interpreter with this one's packages that *user* can start."""
    paths = [str(REPOSITORY / "src"), *(p for p in sys.path if "site-packages" in p)]
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "HOME": "/"}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for program in (sys.executable, f"/usr/bin/{version}"):
        command = [program, "-P", "-c", "import paceline"]
        try:
            subprocess.run(
                command,
                env=environment,
                user=user,
                group=user,
                extra_groups=[],
                check=True,
                capture_output=True,
                timeout=SECONDS,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return program, environment
    return None


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_an_unprivileged_user_has_it_too():
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an unprivileged user already")
    found = interpreter_for(NOBODY)
    if found is None:
        pytest.skip("no interpreter with torch that user nobody may start")
    program, environment = found
    done = subprocess.run(
        [program, "-P", "-c", RUN],
        env=environment,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
    )
    if "EmulationPermissionError" in done.stderr:
        pytest.skip(f"refused to unprivileged users here: {done.stderr[-500:]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "user namespace\n"


@pytest.mark.usefixtures("namespaces")
def test_a_user_without_permission_is_told_what_to_do():
    """In a user namespace of its own, which allows no other one and has no rights."""
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", REFUSED],
        capture_output=True,
        text=True,
    )
    if done.stderr.startswith("unshare:"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert "was refused" in done.stdout
    assert "sudo sysctl -w user.max_user_namespaces=10000" in done.stdout


@pytest.mark.usefixtures("namespaces")
def test_capabilities_say_what_is_there_and_how_to_get_the_rest():
    found = capabilities()
    assert found.enough
    assert found.mode in ("root", "user namespace")
    assert found.hosts > 0
    for item in found.items:
        assert item.present == (not item.remedy)
    names = [item.name for item in found.items]
    assert names == ["namespaces", "veth", "bridge", "tbf", "netem", "own /proc"]
