"""``python -m tests.ds_sync.ends``: what each row ends with, on the ranks of a real job; rank 0
prints it as JSON."""

import json

import paceline
from paceline.testing import Case
from paceline.testing.checks import final_parameters

METHODS = (
    "ds-sync:shuffle=pairs",
    "ds-sync:shuffle=pairs,overlap=step",
    "ds-sync:shuffle=digits,size=3,overlap=forward,state=average",
    "ds-sync:shuffle=random,seed=1,overlap=forward",
    "ds-sync:shuffle=digits,swa_from=4,swa_every=2",
)
RULE = "wfbp"


def ends():
    """By method: the parameters after ten steps with momentum."""
    return {m: final_parameters(Case(method=m, state=True), RULE) for m in METHODS}


if __name__ == "__main__":
    paceline.init()
    found = ends()
    if paceline.rank() == 0:
        print(json.dumps(found), flush=True)
