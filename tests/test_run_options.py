"""Worker processes have the options that their launcher was given."""

import pytest

from paceline.errors import UsageError
from paceline.run_options import RunOptions

ALL = RunOptions(
    method="asp:clip=1",
    steps=7,
    seed=0,
    json=True,
    records="records",
    result="result.json",
    profile="profile.json",
    gradients="gradients",
    gradient_steps=3,
    pace="workload.json",
    cluster="cluster.toml",
    report_to="tensorboard:folder",
)


def test_the_environment_carries_each_option():
    variables = ALL.to_environment()
    assert RunOptions.from_environment(variables) == ALL
    for name in variables:
        # Without its variable an option has its default, and so with an empty one.
        others = {key: value for key, value in variables.items() if key != name}
        without = RunOptions.from_environment(others)
        assert without != ALL, name
        assert without == RunOptions.from_environment({**others, name: ""}), name


def test_no_variable_is_no_option():
    assert RunOptions().to_environment() == {}
    assert RunOptions.from_environment({}) == RunOptions()


@pytest.mark.parametrize("name", ["STEPS", "SEED", "GRADIENT_STEPS", "JSON"])
def test_an_environment_that_says_something_else_is_refused(name):
    with pytest.raises(UsageError, match=f"PACELINE_{name}.*'often'"):
        RunOptions.from_environment({f"PACELINE_{name}": "often"})
