"""Log lines of paceline's own processes.

Modules log to ``logging.getLogger(__name__)``. A script that uses paceline as a library sees
warnings as Python shows those of any library, and configures them itself. Paceline's own processes,
such as ``paceline serve``, call `log_to_stderr`.
"""

from __future__ import annotations

import logging
import sys

_PREFIX = "paceline: "


class _StderrHandler(logging.Handler):
    """Writes each record to the present `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def log_to_stderr() -> None:
    """Write paceline's log in this process to standard error, each line after ``paceline:``.

    A second call changes nothing.
    """
    logger = logging.getLogger("paceline")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(f"{_PREFIX}%(message)s"))
        logger.addHandler(handler)
