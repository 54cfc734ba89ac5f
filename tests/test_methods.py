"""The registry of methods."""

import pytest

from paceline.errors import UsageError
from paceline.methods import METHODS, check_survives

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
