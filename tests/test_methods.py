"""The registry of methods."""

import pytest

from paceline.errors import UsageError
from paceline.methods import METHODS, check_survives, make
from paceline.spec import field_types, parse

ON_SERVERS = [name for name in METHODS if METHODS[name]().updates_on == "server"]


@pytest.mark.parametrize("name", ON_SERVERS)
def test_a_job_survives_a_death_where_servers_update(name):
    assert check_survives(METHODS[name]()) is None


@pytest.mark.parametrize("name", sorted(METHODS.keys() - set(ON_SERVERS)))
def test_elsewhere_methods_that_do_are_named(name):
    with pytest.raises(UsageError, match="meet in collectives") as error:
        check_survives(METHODS[name]())
    listed = str(error.value).rpartition(": ")[2].split(", ")
    assert listed == sorted(ON_SERVERS)


TYPED = [
    (name, key)
    for name, cls in METHODS.items()
    for key, kind in field_types(cls).items()
    if kind is not str
]


@pytest.mark.parametrize(("name", "key"), TYPED)
def test_a_value_that_a_key_cannot_have_is_refused_with_the_methods_name(name, key):
    with pytest.raises(UsageError, match=f"^method '{name}': .*{key}.* 'neither'"):
        make(parse(f"{name}:{key}=neither"), set())
