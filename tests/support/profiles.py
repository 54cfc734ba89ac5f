"""How many examples Hypothesis draws, and from which seeds.

`HYPOTHESIS_PROFILE` chooses: `fast` (make test: few examples, the same in every run), `ci`
(.ci/run and make test-all: as many as a test asks for, the same in every run), `deep` (ten times
as many, others in every run), `mutants` (as `fast`, and a failing example is not made smaller). None has a deadline or a health check: machines are shared, and
the time of an example says nothing about the code.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")
_MOST = {"fast": 25, "ci": 100, "deep": 1000, "mutants": 25}


def examples(wanted: int) -> int:
    """How many examples a test draws in this run, of which it wants *wanted* in CI."""
    if PROFILE in ("fast", "mutants"):
        return min(wanted, _MOST[PROFILE])
    return 10 * wanted if PROFILE == "deep" else wanted


def load() -> None:
    """Make the profile that the environment names the default of every property test."""
    if PROFILE not in _MOST:
        raise ValueError(
            f"HYPOTHESIS_PROFILE={PROFILE}: expected one of {', '.join(_MOST)}"
        )
    settings.register_profile(
        PROFILE,
        max_examples=_MOST[PROFILE],
        derandomize=PROFILE != "deep",
        deadline=None,
        phases=[one for one in Phase if one != Phase.shrink or PROFILE != "mutants"],
        suppress_health_check=list(HealthCheck),
        print_blob=PROFILE == "deep",
    )
    settings.load_profile(PROFILE)
