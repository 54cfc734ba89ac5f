"""Which tests may be skipped, and for what reason: any other skip fails.

A broken installation hides behind a skip. So each reason stands here, by what is missing.
`PACELINE_TESTS_NEED` names what may not be missing in this run: CI needs namespaces, and
`make test-integrations` needs the trainers that it has installed.
"""

from __future__ import annotations

import os
import re

MISSING = {
    "cuda": ["needs a CUDA device"],
    "browser": ["selenium is not installed", "no chromium, chromedriver"],
    "reports": [r"(wandb|mlflow) is not installed"],
    "ray": ["ray is not installed"],
    "trainers": [
        r"(lightning|transformers|accelerate) is not installed",
        "could not import '(yaml|kubernetes_validate|prometheus_client)",
    ],
    "site": ["make site installs mkdocs"],
    "namespaces": [
        "no ip",
        "namespaces need root",
        "needs root and ip",
        "no namespaces",
        "needs Linux",
        "needs the right to mount",
        "only root (becomes|can become) somebody",
        # What the kernel answers where it refuses namespaces or traffic control.
        "was refused|not permitted|unshare:",
    ],
    "proc": ["needs /proc"],
    # Where only root may start this Python, a root has no other user to become.
    "user": [
        "no interpreter with torch that user nobody may start",
        "an ordinary user may not read this checkout or its interpreter",
        "refused to unprivileged users here",
        "the other tests run as an unprivileged user already",
    ],
}


def is_allowed(reason: str, needed: str | None = None) -> bool:
    """Whether a test may be skipped for *reason* in a run that needs *needed*, words."""
    if needed is None:
        needed = os.environ.get("PACELINE_TESTS_NEED", "")
    may_miss = MISSING.keys() - needed.split()
    return any(
        re.search(pattern, reason) for name in may_miss for pattern in MISSING[name]
    )
