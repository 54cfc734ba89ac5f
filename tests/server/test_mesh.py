"""Laws of group servers: each gradient is in once at each of them, whatever happens."""

import os
import random

import pytest

from tests.server.mesh_net import Case, MeshNet

SEEDS = int(os.environ.get("SEEDS", "20"))


def run(case, seed):
    net = MeshNet(case, random.Random(seed))
    net.run()
    net.check_end()
    return net


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("agree", [True, False])
def test_each_gradient_is_in_once_at_each_server(seed, agree):
    case = Case((0, 0, 1, 1, 2), 3, (4, 5, 6, 3, 4), agree=agree)
    net = run(case, seed)
    assert not net.refusals


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("agree", [True, False])
def test_with_cuts(seed, agree):
    case = Case((0, 0, 1, 1, 2), 3, (4, 5, 6, 3, 4), agree=agree, cuts=6)
    net = run(case, seed)
    assert not net.refusals


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("agree", [True, False])
def test_with_meets_and_moves(seed, agree):
    case = Case(
        (0, 0, 1, 1, 2),
        3,
        (4, 5, 6, 4, 4),
        agree=agree,
        cuts=3,
        meets=frozenset({2}),
        moves={(4, 2): 1, (1, 3): 2},
    )
    net = run(case, seed)
    assert not net.refusals


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("agree", [True, False])
def test_with_deaths(seed, agree):
    case = Case(
        (0, 0, 1, 1, 2),
        3,
        (4, 5, 6, 4, 4),
        agree=agree,
        cuts=3,
        deaths=3,
        meets=frozenset({2}),
        moves={(4, 2): 1, (1, 3): 2},
    )
    net = run(case, seed)
    assert not net.refusals


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("agree", [True, False])
def test_with_kills(seed, agree):
    case = Case(
        (0, 0, 1, 1, 2), 3, (4, 5, 6, 4, 4), agree=agree, cuts=3, deaths=1, kills=2
    )
    net = run(case, seed)
    assert not net.refusals
