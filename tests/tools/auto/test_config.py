"""What a user may wish, and what is refused in words."""

from types import SimpleNamespace

import pytest

from paceline.errors import ClusterError, UsageError
from paceline.tools.auto.config import Auto, check_wish, wish_of


def test_the_words():
    assert wish_of(None) is None
    assert wish_of("bsp:buckets=ddp") is None
    assert wish_of("auto") == Auto()
    wish = wish_of("auto:consistency=lossy,cluster=c.toml,file=d.json")
    assert wish == Auto(consistency="lossy", cluster="c.toml", file="d.json")


def test_a_class_allows_all_stronger_ones_and_never_asynchronous():
    assert Auto().allowed == ("exact",)
    assert Auto(consistency="lossy").allowed == ("exact", "delayed", "lossy")
    assert Auto(consistency="local").allowed == ("exact", "delayed", "lossy", "local")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("auto:consistency=asynchronous", "name the method"),
        ("auto:consistency=fast", "fast"),
        ("auto:consistncy=delayed", "Did you mean 'consistency'"),
        ("auto:compression=int8", "what it chooses"),
        ("auto:budget=5", "budget"),
    ],
)
def test_bad_wishes(spec, words):
    with pytest.raises(UsageError, match=words):
        wish_of(spec)


def test_a_cluster_of_other_workers(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[[rack]]\nworkers = 4\nlink = "1gbit"\nlatency = "50us"\n')
    wish = Auto(cluster=str(file))
    assert wish.load_cluster(4).workers == 4
    with pytest.raises(UsageError, match=r"4 workers, and this job 3"):
        wish.load_cluster(3)
    with pytest.raises(ClusterError):
        Auto(cluster=str(tmp_path / "missing.toml")).load_cluster(4)


@pytest.mark.parametrize(
    ("alone", "beside", "others", "words"),
    [
        (True, {}, False, "--survive"),
        (False, {"compression": "int8"}, False, "compression"),
        (False, {}, True, "another model"),
    ],
)
def test_where_nothing_can_be_chosen(alone, beside, others, words):
    runtime = SimpleNamespace(server_only=alone)
    with pytest.raises(UsageError, match=words):
        check_wish(runtime, chosen_beside=beside, others=others)
    check_wish(SimpleNamespace(server_only=False), chosen_beside={}, others=False)
