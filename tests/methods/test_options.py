"""Values that an option may not have, and options that exclude each other: each error names key and
value. (That every option refuses other types, and -999, the conformance kit holds.)"""

import pytest

from paceline.core.settings import parse_method
from paceline.errors import UsageError
from paceline.methods import METHODS

REFUSED = """
osp:most=2 osp:most=-0.1 osp:most=nan osp:ramp=0 osp:chunk=0 osp:budget=foo osp:order=foo
osp:correction=foo osp:correction=plain osp:importance=random osp:state=predict osp:defer=foo
osp:overlap=foo osp:collective=native,most=2 osp:collective=native,frobnicate=1
local-sgd:sync_every=0 local-sgd:sync_each_step_until=-1
local-sgd:outer_learning_rate=-0.1 local-sgd:outer_momentum=1 local-sgd:outer_momentum=-0.5
local-sgd:nesterov=true local-sgd:rescale=true
local-sgd:fragments=3 local-sgd:fragments=0 local-sgd:fragments=2,delay=4 local-sgd:delay=8
local-sgd:keep_local=1.5 local-sgd:keep_local=-0.1 local-sgd:delay=2,state=average
local-sgd:group=2,group_every=3 local-sgd:group_every=2 local-sgd:group=1 local-sgd:group=row
local-sgd:fragments=2,group=2 local-sgd:group=2,sync_each_step_until=3
daso:sync_every=0 daso:delay=0,sync_every=0 daso:delay=-1 daso:delay=5 daso:warmup_steps=-1 daso:group=1 daso:group=machine
sel-sync:delta=-0.1 sel-sync:delta=nan sel-sync:window=0 sel-sync:smoothing=1
sel-sync:smoothing=-0.1
ds-sync:size=1 ds-sync:swa_every=0 ds-sync:swa_from=-2 ds-sync:adjust_every=-1 ds-sync:groups=deck
ds-sync:swa_every=2 ds-sync:cross_rack_every=0 ds-sync:groups=digits,cross_rack_every=2
ds-sync:groups=digits,adjust_every=5
dssp:staleness=-1 dssp:extra=-1 sync-switch:bsp_steps=-1
r2sp:slack=0.99 r2sp:slack=0 r2sp:slack=nan r2sp:slack=inf r2sp:warmup_steps=1
"""

TAKEN = """
ds-sync:swa_from=0,swa_every=2 ds-sync:cross_rack_every=2
ds-sync:cross_rack_every=2,groups=topology local-sgd:group=2,group_every=4 daso:delay=4
r2sp:slack=1 osp:most=1 osp:most=0
"""


@pytest.mark.parametrize("spec", REFUSED.split())
def test_an_option_is_refused_by_key_and_value(spec):
    with pytest.raises(UsageError) as caught:
        parse_method(spec)
    key, value = spec.replace(":", ",").rpartition(",")[2].split("=")
    said = str(caught.value).lower()
    assert key in said
    assert value in said or key not in METHODS[spec.partition(":")[0]].__annotations__
    assert spec.partition(":")[0] in said


@pytest.mark.parametrize("spec", TAKEN.split())
def test_an_option_at_its_limit_is_taken(spec):
    parse_method(spec)
