"""Other tools that average gradients or spread parameters, beside distribute."""

from pathlib import Path

from tests.support import forked

ROOT = Path(__file__).parent.parent.parent


def test_other_tools_on_the_same_model_are_refused_in_words():
    """In a process of its own: torch's tools need a process group."""
    [done] = forked.run_together(1, ["-m", "tests.core.wrapped_cases"], folder=ROOT)
    assert done.stdout.splitlines()[-1] == "all tried"
