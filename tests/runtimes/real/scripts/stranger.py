"""Another user of the machine: looks for what opens a job's server, wherever he may look.

stranger.py STORE_PORT SERVER_PORT: torch's store of the job, and where its server listens.
Prints as JSON what he has learnt.
"""

import contextlib
import datetime
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.transport.connection import ServerConnection

# Whatever is imported late: afterwards this interpreter's files may be out of reach.
with contextlib.suppress(PacelineError):
    ServerConnection(
        "server", "127.0.0.1", int(sys.argv[2]), worker=0, token="warm" * 8
    )

SOMEBODY = 65534
PREFIXES = (
    *("", "default_pg/", "default_pg/0//", "/worker/attempt_0/default_pg/0//"),
    *("/worker/attempt_0/default_pg/", "/worker/attempt_0/default_pg/0/"),
)
NAMES = ("paceline/servers/0/0", "paceline/liveness")

os.setgroups([])
os.setgid(SOMEBODY)
os.setuid(SOMEBODY)
store = dist.TCPStore(
    "127.0.0.1",
    int(sys.argv[1]),
    is_master=False,
    wait_for_workers=False,
    timeout=datetime.timedelta(seconds=10),
)
keys = set(store.list_keys())
keys |= {p + n for p in PREFIXES for n in NAMES if store.check([p + n])}
values = {key: store.get(key).decode(errors="replace") for key in keys}
posted = [json.loads(text) for key, text in values.items() if key.endswith(NAMES)]

opened = []
for path in (
    *(f"/proc/{p['process']}/fd/{p['descriptor']}" for p in posted),
    *(f"/proc/{p['process']}/environ" for p in posted),
    *(f"/proc/{p['process']}/mem" for p in posted),
):
    with contextlib.suppress(OSError):
        opened.append(os.open(path, os.O_RDONLY))

# Every word that anybody could take for a token.
words = {"dedicated", *values.values()}
for text in [*values.values(), *(str(one) for p in posted for one in p.values())]:
    words |= set(text.replace('"', " ").replace(",", " ").split())
with contextlib.suppress(OSError):
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="ignore")
            words |= set(line.replace("=", "\0").split("\0"))
tried, admitted = 0, []
for word in sorted(w for w in words if 4 <= len(w) <= 64 and w.isascii()):
    tried += 1
    with contextlib.suppress(PacelineError):
        server = ("server", "127.0.0.1", int(sys.argv[2]))
        ServerConnection(*server, worker=1, incarnation=1_000_000, token=word)
        admitted.append(word)
print(
    json.dumps(
        {
            "uid": os.getuid(),
            "values": len(values),
            "posted": len(posted),
            "opened": opened,
            "tried": tried,
            "admitted": admitted,
        }
    )
)
