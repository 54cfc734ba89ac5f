"""``python -m tests.methods.ds_sync.ends [few]``: some of the kit's laws among more workers than a group
has, on the ranks of a real job; and what each row ends with, which rank 0 prints as JSON."""

import json
import sys

import paceline
from paceline.testing import Case
from paceline.testing.method_checks import CHECKS, final_parameters

METHODS = (
    "ds-sync:groups=digits,overlap=step",
    "ds-sync:groups=digits,size=3,overlap=forward",
    "ds-sync:groups=digits",
    "ds-sync:groups=digits,swa_from=4,swa_every=2",
)
RULE = "wfbp"
LAWS = {
    "ds-sync:adjust_every=2,overlap=forward": (
        "uneven_data_ends",
        "leaving_after_backward_ends_with_one_model",
        "converges",
    ),
    "ds-sync:groups=digits,overlap=step": ("a_checkpoint_is_a_restart",),
}


FEW = slice(2)
"""Of the methods, for the fast tests; and of the laws of each."""


def ends(part=slice(None)):
    """By method: the parameters after ten steps with momentum."""
    return {
        m: final_parameters(Case(method=m, state=True), RULE) for m in METHODS[part]
    }


def main():
    paceline.init()
    part = FEW if sys.argv[1:] else slice(None)
    for method, laws in LAWS.items():
        for law in laws[part]:
            CHECKS[law](Case(method=method), RULE)
    found = ends(part)
    if paceline.rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
