"""An emulated cluster needs namespaces; where they are refused, the tests say so."""

import functools
import sys

import pytest

from paceline.cluster import uniform_cluster
from paceline.runtimes.emulated.errors import EmulationError
from paceline.runtimes.emulated.keeper_client import Client
from paceline.runtimes.emulated.network import EmulatedNetwork


@functools.cache
def refusal():
    """Why namespaces cannot be made here, or nothing."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    try:
        with Client():
            return ""
    except EmulationError as error:
        return str(error)


@pytest.fixture(scope="session")
def namespaces():
    """Skip where namespaces are not permitted."""
    if refusal():
        pytest.skip(refusal())


@pytest.fixture(scope="module")
def network(namespaces):
    """Two hosts at 100 Mbit/s, shared by a file's tests, which undo what they do."""
    cluster = uniform_cluster(2, "100 Mbit/s", "0 s")
    with EmulatedNetwork(cluster, process_bytes=0) as network:
        yield network
