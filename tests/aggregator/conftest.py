"""Where BPF and namespaces are, tests have them."""

import os

import pytest

from paceline.errors import UsageError
from paceline.server.security import TRUSTED
from tests.aggregator import rack as racks
from tests.aggregator.places import WORKERS, InARack, Loopback


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The kernel's programs are compiled once for all tests, and into no home."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["XDG_CACHE_HOME"]
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def bpf(cache):
    """Skips where there is no BPF, with the reason."""
    from paceline.aggregator.xdp.kernel import Kernel

    try:
        Kernel(1, 16).close()
    except UsageError as error:
        pytest.skip(f"no BPF: {error}")


@pytest.fixture(scope="module")
def rack():
    """Namespaces; skips where there are none, with the reason."""
    reason = racks.why_not()
    if reason:
        pytest.skip(reason)
    try:
        made = racks.Rack(WORKERS).__enter__()
    except OSError as error:
        pytest.skip(f"no namespaces: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRUSTED, "1")
        yield made
    made.__exit__()


@pytest.fixture(params=["sockets", "xdp"])
def place(request):
    """User space on loopback, and the kernel in a rack."""
    if request.param == "sockets":
        return Loopback()
    request.getfixturevalue("bpf")
    return InARack(request.getfixturevalue("rack"), "xdp")
