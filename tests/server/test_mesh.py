"""Laws of group servers: each gradient is in once at each of them, whatever happens."""

import random

import pytest

from tests.server.mesh_net import Case, MeshNet


def run(case, seed):
    net = MeshNet(case, random.Random(seed))
    net.run()
    net.check_end()
    return net


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("agree", [True, False])
def test_each_gradient_is_in_once_at_each_server(seed, agree):
    case = Case((0, 0, 1, 1, 2), 3, (4, 5, 6, 3, 4), agree=agree)
    net = run(case, seed)
    assert not net.refusals
