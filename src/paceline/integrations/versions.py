"""Which versions of a framework an integration takes; docs/integrations.md says which were run."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from paceline.errors import UsageError


def require(package: str, first: str, before: str, extra: str) -> None:
    """Raise `UsageError` unless *package* is there, from version *first* on and below *before*."""
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UsageError(
            f"{package} is not installed: pip install 'paceline[{extra}]'"
        ) from None
    if not _numbers(first) <= _numbers(found) < _numbers(before):
        raise UsageError(
            f"{package} {found}: this integration reaches into what {package} {first} and its "
            f"successors below {before} do, and may be silently wrong with others; install "
            f"one of these ('{package}>={first},<{before}')"
        )


def _numbers(text: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", text)
    return () if release is None else tuple(map(int, release.group().split(".")))
