"""Log lines of paceline's own processes.

Modules log to ``logging.getLogger(__name__)``. A script that uses paceline as a library sees
warnings as Python shows those of any library, and configures them as it likes. Processes that are
paceline's own, such as ``paceline serve``, call `log_to_stderr`.
"""

from __future__ import annotations

import logging
import sys

_PREFIX = "paceline: "


class _StderrHandler(logging.Handler):
    """Write each record to what `sys.stderr` is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def log_to_stderr() -> None:
    """Write what paceline logs in this process to standard error, each line after ``paceline:``.

    Calling it again changes nothing.
    """
    logger = logging.getLogger("paceline")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(f"{_PREFIX}%(message)s"))
        logger.addHandler(handler)
