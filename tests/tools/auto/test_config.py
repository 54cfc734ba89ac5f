"""The spec auto, and where it is refused."""

from types import SimpleNamespace

import pytest

from paceline.errors import ClusterError, UsageError
from paceline.tools.auto.config import AutoConfig, check_auto_allowed, parse_auto


def test_the_spec():
    assert parse_auto(None) is None
    assert parse_auto("bsp:buckets=ddp") is None
    assert parse_auto("auto") == AutoConfig()
    config = parse_auto("auto:consistency=lossy,cluster=c.toml,file=d.json")
    assert config == AutoConfig(consistency="lossy", cluster="c.toml", file="d.json")


def test_a_class_allows_all_stronger_ones_and_never_asynchronous():
    assert AutoConfig().allowed == ("exact",)
    assert AutoConfig(consistency="lossy").allowed == ("exact", "delayed", "lossy")
    assert AutoConfig(consistency="local").allowed == (
        "exact",
        "delayed",
        "lossy",
        "local",
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("auto:consistency=asynchronous", "name the method"),
        ("auto:consistency=fast", "fast"),
        ("auto:consistncy=delayed", "Did you mean 'consistency'"),
        ("auto:compression=int8", "chooses"),
        ("auto:budget=5", "budget"),
    ],
)
def test_bad_specs(spec, words):
    with pytest.raises(UsageError, match=words):
        parse_auto(spec)


def test_a_cluster_of_other_workers(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[[rack]]\nworkers = 4\nlink = "1gbit"\nlatency = "50us"\n')
    config = AutoConfig(cluster=str(file))
    assert config.load_cluster(4).workers == 4
    with pytest.raises(UsageError, match=r"4 workers, and this job 3"):
        config.load_cluster(3)
    with pytest.raises(ClusterError):
        AutoConfig(cluster=str(tmp_path / "missing.toml")).load_cluster(4)


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
        check_auto_allowed(runtime, chosen_beside=beside, others=others)
    check_auto_allowed(
        SimpleNamespace(server_only=False), chosen_beside={}, others=False
    )
