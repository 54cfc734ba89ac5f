"""Where the aggregator of a test is."""

import pytest

from tests.collectives.in_network.places import Loopback


@pytest.fixture
def place():
    """Everybody is on this host."""
    return Loopback()
