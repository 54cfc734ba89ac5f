"""The registry of methods."""

import pytest

from paceline.errors import UsageError
from paceline.methods import METHODS, check_survives


@pytest.mark.parametrize("name", METHODS)
def test_whose_job_survives_a_death_is_the_methods_to_say(name):
    method = METHODS[name]()
    if method.updates_on == "server":
        check_survives(method)
        return
    with pytest.raises(UsageError, match="meet in collectives") as error:
        check_survives(method)
    listed = str(error.value).rpartition(": ")[2].split(", ")
    assert listed
    for other in METHODS:
        assert (other in listed) == (METHODS[other]().updates_on == "server")
