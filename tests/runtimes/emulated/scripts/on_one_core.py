"""``on_one_core.py paceline WORDS``: as `tests.support.forking` does it, and all on one core."""

import os

from tests.support import forking

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
forking.main()
