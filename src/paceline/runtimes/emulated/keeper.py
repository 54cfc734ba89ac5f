"""The process that holds an emulated cluster: when it ends, the kernel removes it all.

Theory of operation
-------------------
Two processes, both started with the cluster and unknown to anybody else::

    launcher ......... guard --- keeper (process 1 of a namespace of process numbers)
                                   |--- processes in hosts, their children, ...

- The *keeper* makes the network, starts processes in hosts and answers questions. When
  process 1 of a namespace ends, the kernel kills every other process in it, however deep
  and however detached, with SIGKILL, and the keeper is gone only when they are.
- The *guard* waits for two things, the end of the launcher and the end of the keeper, and
  then ends too; the kernel kills the keeper when the guard ends, for whatever reason.

So nothing survives the launcher, the guard or the keeper, though each may be killed with
SIGKILL. The guard watches a descriptor of the launcher (pidfd) and does not rely on the
end of a connection, because a forked child of the launcher may hold a copy of that. It
does not rely on a parent-death signal of its own either: that one comes when the *thread*
ends that started it.

Both stand in a session of their own, where Ctrl-C does not reach them.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import traceback
from pathlib import Path

from paceline.runtimes.emulated import namespaces
from paceline.runtimes.emulated.control_messages import (
    Answer,
    AskStatus,
    Build,
    Built,
    Cut,
    Done,
    Failed,
    Line,
    Mode,
    OpenSocket,
    Probe,
    Probed,
    Ready,
    Repair,
    Request,
    SetRate,
    Spawn,
    Status,
)
from paceline.runtimes.emulated.errors import KernelLacksError
from paceline.runtimes.emulated.kernel_features import FEATURES
from paceline.runtimes.emulated.spawning import Processes
from paceline.runtimes.emulated.switchboard import Switchboard


def main(connection: int, launcher: int) -> int:
    """The guard: *connection* is the keeper's end to the launcher, *launcher* a
    descriptor of that process."""
    line = Line(socket.socket(fileno=connection))
    # Whatever the launcher had done about signals is none of the hosts' business.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        mode = namespaces.isolate()
    except OSError as error:
        line.send(Failed(kind="permission", text=str(error)))
        return 1
    guard = os.pidfd_open(os.getpid())
    keeper = os.fork()
    if keeper == 0:
        status = 1
        try:
            namespaces.die_with(guard)
            Keeper(line).serve(mode)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    watch = select.poll()
    watch.register(launcher, select.POLLIN)
    watch.register(os.pidfd_open(keeper), select.POLLIN)
    watch.poll()
    os.kill(keeper, signal.SIGKILL)
    # Comes back when every process of the namespace is gone.
    os.waitpid(keeper, 0)
    return 0


class Keeper:
    """Answers questions until the connection ends."""

    def __init__(self, line: Line) -> None:
        self._line = line
        # Opened before another /proc covers it.
        machine = os.open("/proc", os.O_DIRECTORY | os.O_PATH | os.O_CLOEXEC)
        self._own_proc = namespaces.mount_own_proc()
        self._processes = Processes(Path(f"/proc/self/fd/{machine}"))
        self._switchboard = Switchboard()

    def serve(self, mode: Mode) -> None:
        """Speak first, then answer; collect children as they end."""
        ended, wake = socket.socketpair()
        ended.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._line.send(Ready(mode=mode, own_proc=self._own_proc))
        selector = selectors.DefaultSelector()
        selector.register(ended, selectors.EVENT_READ)
        selector.register(self._line, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is ended:
                    ended.recv(4096)
                    self._processes.collect()
                elif not self._answer_one():
                    return

    def _answer_one(self) -> bool:
        """Answer one question; false when nobody is left to ask."""
        try:
            request, descriptors = self._line.receive_request()
        except (EOFError, OSError):
            return False
        sent: list[int] = []
        try:
            answer = self._answer(request, descriptors, sent)
        except KernelLacksError as error:
            answer = Failed(kind="kernel", text=str(error))
        except Exception as error:
            answer = Failed(kind="other", text=f"{type(error).__name__}: {error}")
        finally:
            _close(descriptors)
        try:
            self._line.send(answer, sent)
        except OSError:
            return False
        finally:
            _close(sent)
        return True

    def _answer(
        self, request: Request, descriptors: list[int], sent: list[int]
    ) -> Answer:
        """Do what is asked; descriptors to send along are added to *sent*."""
        match request:
            case Build():
                return Built(delayed=self._switchboard.build(request))
            case SetRate():
                self._switchboard.set_rate(request.link, request.rate)
            case Cut():
                self._switchboard.cut(request.link)
            case Repair():
                self._switchboard.repair(request.link)
            case OpenSocket():
                sent.append(self._switchboard.open_socket(request.host).detach())
            case Spawn():
                return self._spawn(request, descriptors, sent)
            case AskStatus():
                return Status(code=self._processes.code(request.process))
            case Probe():
                return Probed(missing=self._switchboard.probe(list(FEATURES)))
        return Done()

    def _spawn(self, request: Spawn, streams: list[int], sent: list[int]) -> Answer:
        namespace = self._switchboard.namespace(request.host)
        try:
            spawned, descriptor = self._processes.spawn(request, namespace, streams)
        except OSError as error:
            filename = error.filename
            if isinstance(filename, bytes):
                filename = os.fsdecode(filename)
            return Failed(
                kind="spawn",
                text=error.strerror or str(error),
                number=error.errno or 0,
                filename=filename,
            )
        sent.append(descriptor)
        return spawned


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
