"""The laws of any parameter server, whatever comes when and whoever dies, loads or comes back:
relatives of ssp, and gssp's discipline where there is one group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.methods.dssp import DSSP
from paceline.methods.gssp import GSSP
from paceline.methods.push_pull import PushPull
from tests.parameter_server.state_machine import test_server_laws as laws
from tests.support.profiles import examples

SOME = settings(laws.QUICK, max_examples=examples(60))
CASES = [DSSP(staleness=1, extra=2)]
CASES += [GSSP(number_of_groups=1, staleness=bound) for bound in (0, 1)]  # type: ignore[list-item]


@pytest.mark.slow
@pytest.mark.parametrize("method", CASES, ids=["dssp", "gssp 0", "gssp 1"])
def test_laws_of_training(method: PushPull, monkeypatch: pytest.MonkeyPatch) -> None:
    is_gssp = isinstance(method, GSSP)
    if not is_gssp or method.staleness:
        # What an answer has in it is for rounds only.
        monkeypatch.setattr(laws.Training, "check_answers", lambda *_: None)

    def with_method(case: laws.Case) -> laws.Case:
        if is_gssp:  # whose servers have all of the model
            layout = [[0] for _ in case.layout]
            case = replace(case, shards=1, layout=layout)
        return replace(case, method=method)

    cases = laws.cases("asp").map(with_method)
    SOME(given(cases, st.binary(min_size=400, max_size=3000))(laws.check_laws))()
