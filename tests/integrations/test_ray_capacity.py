"""Room on a Ray cluster, and what is refused before there is one: no Ray is needed."""

import sys

import pytest

from paceline.errors import UsageError
from paceline.integrations import common
from tests.integrations.stand_ins import replace_ray, without_ray

_RAY = without_ray("ray")
check_capacity, described = _RAY.check_capacity, _RAY.described
nodes_of, without_room = _RAY.nodes_of, _RAY.without_room

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}
SMALL = {"CPU": 1.0, "node:10.0.0.1": 1.0, "memory": 1e9}
LARGE = {"CPU": 4.0, "GPU": 1.0, "object_store_memory": 1e9}


@pytest.mark.parametrize(
    ("requests", "nodes", "missing"),
    [
        ({"a": CPU}, [SMALL], []),
        ({"a": CPU}, [], ["a"]),
        ({"a": CPU, "b": CPU}, [SMALL], ["b"]),
        ({"a": {}, "b": CPU}, [SMALL], []),
        ({"a": CPU, "b": GPU}, [LARGE, SMALL], []),
        ({"a": GPU, "b": GPU}, [LARGE, LARGE], []),
        ({"a": {"CPU": 2.0}}, [SMALL, SMALL], ["a"]),  # one node is to have all of it
        ({"a": {"slots": 1.0}}, [SMALL], ["a"]),
    ],
)
def test_each_needs_all_on_one_node(requests, nodes, missing):
    assert without_room(requests, nodes) == missing


def test_the_words_say_what_is_missing():
    requests = {"the server": CPU, "worker 0": GPU, "worker 1": GPU}
    with pytest.raises(UsageError) as caught:
        check_capacity(requests, [SMALL, LARGE])
    words = str(caught.value)
    assert "3 CPU, and its nodes have 5" in words
    assert "2 GPU, and its nodes have 1" in words
    assert "(2 nodes: 1 CPU | 4 CPU, 1 GPU)" in words
    assert "No node has room for worker 1 (1 CPU, 1 GPU each, on one node)" in words


def test_the_dead_have_no_room():
    told = [
        {"NodeID": "a", "Alive": True, "Resources": SMALL},
        {"NodeID": "b", "Alive": False, "Resources": LARGE},
    ]
    assert nodes_of(told) == {"a": SMALL}
    assert described([]) == "0 nodes: none"


@pytest.mark.parametrize("version", ["1.13.0", "2.9.3", "3.0.0"])
def test_a_version_that_was_not_tried(monkeypatch, version):
    monkeypatch.setattr(common, "version", lambda package: version)
    monkeypatch.delitem(sys.modules, "paceline.integrations.ray", raising=False)
    with pytest.raises(UsageError, match=f"ray {version}: .* install one of these"):
        import paceline.integrations.ray  # noqa: F401


def test_who_calls_over_a_client_is_refused_before_anything_starts(monkeypatch):
    stand_in = replace_ray(monkeypatch)
    from paceline.integrations.ray import run

    stand_in.nodes = list
    with pytest.raises(UsageError, match="cluster is too small"):
        run(print, workers=1, method="asp")
    stand_in.client.is_connected = lambda: True
    with pytest.raises(UsageError, match=r"over ray://.*ray job submit"):
        run(print, workers=1, method="asp")
