"""Does STEPS steps, and is killed at one place of its end, in its first life.

Arguments: a folder for what is noted; where each rank is killed, as in ``left+exited``:

- ``stepped``: after the last step, before ``finish``;
- ``leaving``: the servers have heard that it leaves, and others still train;
- ``left``: all have left, and it has not taken the final model yet;
- ``finished``: after ``finish``, before what follows it in the script;
- ``exiting``: in an exit handler, before paceline says goodbye to the servers;
- ``exited``: in an exit handler, after that.

With ``starts over`` it counts its steps from 0 in each life, as if it knew nothing of lives.
"""

import atexit
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch

import paceline
from paceline.interfaces.server_messages import KeepAlive, Leave
from paceline.parameter_server.client.remote_model import RemoteModel
from paceline.parameter_server.client.synchronization import Synchronizer
from paceline.testing.problems import Quadratic, centers_of, flat_parameters

folder, places = Path(sys.argv[1]), sys.argv[2].split("+")
starts_over = "starts over" in sys.argv
STEPS = 6
rank = int(os.environ["RANK"])
life = int(os.environ.get("PACELINE_INCARNATION", "0"))
dies, place = life == 0, places[rank]
(folder / f"process-{rank}").write_text(f"{os.getpid()} {life}")


def die_at(here: str) -> None:
    if dies and place == here:
        (folder / f"died-{rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


leave, pull_final = RemoteModel.leave, Synchronizer.pull_final


def note_leave(self: RemoteModel) -> None:
    if dies and place == "leaving":
        for endpoint in self._endpoints:
            endpoint.request(Leave())
            endpoint.request(KeepAlive()).wait()  # which comes after it
        die_at("leaving")
    leave(self)


def note_final(self: Synchronizer) -> None:
    die_at("left")
    pull_final(self)


RemoteModel.leave, Synchronizer.pull_final = note_leave, note_final
atexit.register(die_at, "exited")
paceline.init()
atexit.register(die_at, "exiting")
torch.manual_seed(0)
task = Quadratic()
plain = torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9)
optimizer = paceline.distribute(task, plain, buckets="wfbp", method="asp")
for step in count(0 if starts_over else optimizer.first_step):
    # Others still train while one leaves.
    leavers = [other for other, at in enumerate(places) if at == "leaving"]
    trains_on = rank not in leavers and not all(
        (folder / f"died-{leaver}").exists() for leaver in leavers
    )
    if step >= STEPS and not trains_on:
        break
    time.sleep(float(os.environ.get("PAUSE", "0")))
    optimizer.zero_grad()
    task(centers_of(rank, step)).backward()
    optimizer.step()
    print(f"worker {rank} life {life} step {step}", flush=True)
die_at("stepped")
optimizer.finish()
die_at("finished")
torch.save(flat_parameters(task), folder / f"result-{rank}")
