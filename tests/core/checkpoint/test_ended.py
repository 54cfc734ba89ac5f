"""Trainings that have ended: what a script drops is gone, and what it still holds is in its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import forked

SCRIPT = """
import copy, gc, pickle, sys, weakref
import torch, paceline
from paceline.errors import UsageError

folder = sys.argv[1]


def trained(ends=True):
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.BatchNorm1d(1))
    adam = torch.optim.Adam(model.parameters())
    optimizer = paceline.distribute(model, adam, method="bsp:buckets=ddp")
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if ends:
        optimizer.finish()
    return model, optimizer


def zeroed(model):
    with torch.no_grad():
        model[0].weight.zero_()


kept = trained()[:1]  # and so its optimizer
dropped = trained()
died = [weakref.ref(one) for one in (*dropped, dropped[0][0].weight)]
paceline.save(folder + "/before")  # the last one: whoever holds it
present = trained(ends=False)
paceline.save(folder + "/all")
del dropped
gc.disable()  # memory is collected at other moments on other workers
paceline.save(folder + "/some")
assert [one() for one in died] == [None] * 3
models = [kept[0], present[0]]
before = [model[0].weight.detach().clone() for model in models]
for name in ("all", "some"):  # what is gone is asked for by nobody
    for model in models:
        zeroed(model)
    paceline.load(f"{folder}/{name}")
    for model, weight in zip(models, before):
        assert torch.equal(model[0].weight, weight)
average = copy.deepcopy(kept[0])  # has no optimizer
assert pickle.loads(pickle.dumps(average))[0].weight.equal(before[0])
again = trained()
try:
    paceline.load(folder + "/some")
except UsageError as error:
    assert "holds model0, model2, optimizer0, optimizer2; this job wants" in str(error)
else:
    raise AssertionError("it holds no model3")
print("all tried")
"""


@pytest.mark.slow
def test_what_has_ended_is_the_script_s_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for end in forked.run_together(2, [script, tmp_path]):
        assert "all tried" in end.stdout
