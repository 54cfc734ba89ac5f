"""Every seam of paceline: what a method sees, and what a runtime brings.

Files are split by who implements a seam and who uses it. Low to high:

- `partial_optimizer`: parameters and updates. `Updater` is the optimizer, applied piece by piece.
- `timing`: what charges or measures compute time, and what times work.
- `schedule`: a collective as data: who sends which part of a buffer to whom.
- `communication`: `Comm` has asynchronous collectives; each returns a `Pending`, and work can
  follow it. A `Collective` says how averages are formed. An `Endpoint` is a worker's end of
  a server.
- `discipline`: what a server does with gradients, in a method's words.
- `groups`: servers that hold the whole model each, for a group of workers.
- `gradient_sum`: one gradient in place of several, of which each has its own learning rate.
- `server`: a server, or another service, as a state machine, and what it sends.
- `server_messages`, `group_messages`: messages of workers and servers, and between group servers.
- `remote_model`: a model's parameters on their servers, as one worker's method sees them.
- `compression`: a `Compressor` says what is sent of a mean's tensors.
- `consistency`: what becomes of a gradient, from exact to asynchronous.
- `rounds`: in which steps workers communicate.
- `message`: in which messages gradients travel that the next forward pass waits for.
- `run`: one worker's training as its method sees it, and sees nothing else: parameters,
  buckets, means, who takes part.
- `method`: `Method` says when, and with whom, workers agree.
- `worker_state`: `OwnState` is what a worker has of its own, and a checkpoint keeps per worker.
- `trainings`: the trainings of one worker's script, and its options.
- `runtime`: where a worker lives: its rank, its clock, its way to spend compute time.
- `current_runtime`: the caller's runtime.

No seam here has a time-out of its own: when a peer is gone, the runtime's transport raises
(gloo and NCCL by connection loss, the simulated runtime at once), and every call here lets
that error through. After an error from a collective the contents of its buffer are
undefined and the communicator must not be used again.
"""

from paceline.interfaces.communication import (
    Awaited,
    Collective,
    CollectiveSummary,
    Comm,
    Endpoint,
    Pending,
    Reception,
    ReduceOperation,
    Runner,
    Scattered,
    Signal,
)
from paceline.interfaces.compression import (
    COMMON,
    Asked,
    Coding,
    Compressor,
    CompressorSummary,
    Exchange,
    Gather,
    Leg,
    PerWorkerCompressor,
    Place,
    Shape,
    State,
    StateKind,
    Sum,
)
from paceline.interfaces.consistency import CONSISTENCIES, Consistency, weaker
from paceline.interfaces.discipline import (
    Coordinated,
    Discipline,
    HeldPush,
    Informed,
    InParts,
    Led,
    Shard,
    Sparing,
    Timed,
)
from paceline.interfaces.gradient_sum import GradientSum
from paceline.interfaces.groups import (
    Groups,
    Meshed,
    Parcel,
    SpeedClass,
    members_text,
    read_members,
)
from paceline.interfaces.message import Half, Message
from paceline.interfaces.method import (
    HOOKS,
    Clips,
    GradientSeen,
    Method,
    MethodSummary,
    UpdatesOn,
    UpdatesOnServer,
)
from paceline.interfaces.partial_optimizer import Hyperparameters, Piece, Updater
from paceline.interfaces.remote_model import Arrived, Remote, Told, UnitPlace
from paceline.interfaces.rounds import AGREE_EVERY, EVERY_STEP, ON_SERVERS, Rounds
from paceline.interfaces.run import Run, ServerRun, UpdatingRun
from paceline.interfaces.runtime import Runtime, ServerJob, Service, ServiceJob
from paceline.interfaces.schedule import (
    Priced,
    Schedule,
    Transfer,
    servers_of,
    switches_of,
)
from paceline.interfaces.server import (
    Answer,
    AnyServer,
    Ask,
    AskingServer,
    ReturningServer,
    Sender,
    Server,
    Work,
)
from paceline.interfaces.timing import CodingStage, Compute, Stopwatch
from paceline.interfaces.worker_state import OwnState, refused

__all__ = [
    "AGREE_EVERY",
    "COMMON",
    "CONSISTENCIES",
    "EVERY_STEP",
    "HOOKS",
    "ON_SERVERS",
    "Answer",
    "AnyServer",
    "Arrived",
    "Ask",
    "Asked",
    "AskingServer",
    "Awaited",
    "Clips",
    "Coding",
    "CodingStage",
    "Collective",
    "CollectiveSummary",
    "Comm",
    "Compressor",
    "CompressorSummary",
    "Compute",
    "Consistency",
    "Coordinated",
    "Discipline",
    "Endpoint",
    "Exchange",
    "Gather",
    "GradientSeen",
    "GradientSum",
    "Groups",
    "Half",
    "HeldPush",
    "Hyperparameters",
    "InParts",
    "Informed",
    "Led",
    "Leg",
    "Meshed",
    "Message",
    "Method",
    "MethodSummary",
    "OwnState",
    "Parcel",
    "Pending",
    "PerWorkerCompressor",
    "Piece",
    "Place",
    "Priced",
    "Reception",
    "ReduceOperation",
    "Remote",
    "ReturningServer",
    "Rounds",
    "Run",
    "Runner",
    "Runtime",
    "Scattered",
    "Schedule",
    "Sender",
    "Server",
    "ServerJob",
    "ServerRun",
    "Service",
    "ServiceJob",
    "Shape",
    "Shard",
    "Signal",
    "Sparing",
    "SpeedClass",
    "State",
    "StateKind",
    "Stopwatch",
    "Sum",
    "Timed",
    "Told",
    "Transfer",
    "UnitPlace",
    "Updater",
    "UpdatesOn",
    "UpdatesOnServer",
    "UpdatingRun",
    "Work",
    "members_text",
    "read_members",
    "refused",
    "servers_of",
    "switches_of",
    "weaker",
]
