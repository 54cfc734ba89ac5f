"""Where paceline's log lines go: in its own processes, and in those of scripts that use it."""

import os
import subprocess
import sys

import pytest

SAYS = """
import logging, paceline.parameter_server.process.logs
{configures}
log = logging.getLogger("paceline.transport.listener")
log.warning("a warning")
log.info("news")
"""


@pytest.mark.parametrize(
    ("configures", "expected"),
    [
        (
            "[paceline.parameter_server.process.logs.log_to_stderr() for _ in range(2)]",
            "paceline: a warning\npaceline: news\n",
        ),
        ("", "a warning\n"),
        (
            "logging.basicConfig(format='%(name)s %(message)s')",
            "paceline.transport.listener a warning\n",
        ),
    ],
    ids=["its own process", "a script's", "a script's that configures logging"],
)
def test_where_lines_go(configures, expected):
    script = SAYS.format(configures=configures)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ,
        check=True,
    )
    assert ended.stderr == expected
