"""Runs a training job on an emulated cluster: its workers, its rules, its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from paceline.cluster.cluster import Rule
from paceline.cluster.cluster_file import cluster_toml
from paceline.collectives.in_network.aggregator_addresses import AGGREGATORS_VARIABLE
from paceline.errors import PacelineError, UsageError
from paceline.run_options import ScriptJob
from paceline.runtimes import progress
from paceline.runtimes.emulated.control_messages import INTERFACE
from paceline.runtimes.emulated.keeper_client import HostProcess
from paceline.runtimes.emulated.network import EmulatedNetwork
from paceline.runtimes.emulated.network_plan import Host
from paceline.runtimes.emulated.runtime import RUNTIME_VARIABLE, EmulatedRuntime
from paceline.runtimes.processes import (
    ERROR_FILE_VARIABLE,
    ProcessSupervisor,
    Shown,
    WorkerExit,
    WorkerOutput,
    end_all,
    failure_summary,
)
from paceline.runtimes.real.peer_monitor import exit_grace
from paceline.runtimes.real.server_process import ADDRESSES_VARIABLE
from paceline.runtimes.temporary_folder import LauncherInterrupted, scratch_folder
from paceline.timeouts import timeouts
from paceline.transport.security import TOKEN, TRUSTED

AGGREGATOR_PORT = 29700
PACKET_BYTES = 1500


class Aggregators:
    """The aggregators of a job: one for each rack of *network*'s cluster that aggregates."""

    def __init__(self, network: EmulatedNetwork) -> None:
        self._network = network
        self.processes: list[HostProcess] = []
        self._watched = True

    def start(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Start them, and wait until they listen.

        Returns the variables by which workers find them. Raises `UsageError`.
        """
        # Only this job's own processes are on this network.
        own = {**environment, TRUSTED: "1"}
        for host in self._network.aggregators:
            command = [
                *(sys.executable, "-m", "paceline", "aggregate"),
                *("--listen", f"{host.address}:{AGGREGATOR_PORT}"),
                *self._memory(host),
            ]
            process = self._network.popen(
                host.number, command, env=own, stdin=subprocess.DEVNULL
            )
            self.processes.append(process)
        for host, process in zip(
            self._network.aggregators, self.processes, strict=True
        ):
            self._wait_for(host, process)
            threading.Thread(
                target=self._watch, args=(host, process), daemon=True
            ).start()
        if not self.processes:
            return {}
        named = (
            f"{one.rack}={one.address}:{AGGREGATOR_PORT}"
            for one in self._network.aggregators
        )
        return {AGGREGATORS_VARIABLE: ",".join(named)}

    def forget(self) -> None:
        """Stop reporting their ends, because the job is over."""
        self._watched = False

    def _memory(self, host: Host) -> list[str]:
        """Return the option for memory: a slot holds a packet's sum, and one that waits to be sent."""
        slots = self._network.cluster.racks[host.rack].slots
        return [] if slots is None else ["--memory", f"{2 * PACKET_BYTES * slots} B"]

    def _wait_for(self, host: Host, process: HostProcess) -> None:
        over = time.monotonic() + timeouts.aggregator_start
        while process.poll() is None and time.monotonic() < over:
            with self._network.socket(host.number) as tried:
                if tried.connect_ex((host.address, AGGREGATOR_PORT)) == 0:
                    return
            time.sleep(0.02)
        raise UsageError(f"{host.name} did not start; see above for what it said")

    def _watch(self, host: Host, process: HostProcess) -> None:
        status = process.wait()
        if self._watched:
            print(
                f"paceline: {host.name} has ended with status {status}",
                file=sys.stderr,
                flush=True,
            )


PORT = 29500
"""Port of worker 0's store: each host is new, so no port is in use."""

SERVER_PORT = 29600


class EmulatedJob:
    """Runs a job's script once per worker of *network*'s cluster.

    *output*: the workers whose prints are shown, see `WorkerOutput`.
    """

    def __init__(
        self, job: ScriptJob, network: EmulatedNetwork, output: Shown | None = None
    ) -> None:
        self._output = WorkerOutput(output)
        self._network = network
        self._command = [sys.executable, job.script, *job.arguments]
        self._options = job.options
        self._processes: list[HostProcess] = []
        self._workers = ProcessSupervisor()
        self._servers: list[HostProcess] = []
        self._killed_by_rule: set[int] = set()
        self._timers: list[threading.Timer] = []
        self._aggregators = Aggregators(network)

    def run(self) -> int:
        """Run until all workers have ended; return the exit status.

        A signal to end (SIGINT, SIGTERM, SIGHUP) ends all workers first. No worker is left in any
        case.
        """
        with (
            scratch_folder() as scratch,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as reached,
        ):
            path = str(Path(scratch) / "progress")
            reached.bind(path)
            reached.listen(1)
            listener = threading.Thread(
                target=self._receive_progress, args=(reached,), daemon=True
            )
            listener.start()
            try:
                self._start(scratch, path)
                return self._supervise()
            except LauncherInterrupted as interruption:
                return interruption.report()
            finally:
                self._aggregators.forget()
                end_all(
                    [*self._processes, *self._servers, *self._aggregators.processes]
                )
                self._output.finish()
                for timer in self._timers:
                    timer.cancel()
                with contextlib.suppress(OSError):
                    # This ends the listener thread.
                    reached.shutdown(socket.SHUT_RDWR)
                listener.join()

    # ---- workers ----

    def _start(self, scratch: str, path: str) -> None:
        cluster = self._network.cluster
        per_host = [cluster.host_of(w) for w in range(cluster.workers)]
        shared = {
            "WORLD_SIZE": str(cluster.workers),
            "MASTER_ADDR": self._network.hosts[0].address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TORCHELASTIC_RUN_ID": "emulated",
            RUNTIME_VARIABLE: EmulatedRuntime.name,
        }
        # Hosts have no names: torch would warn at each connection.
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        base = quiet | os.environ | shared
        file = Path(scratch) / "cluster.toml"
        file.write_text(cluster_toml(cluster, exact=True))
        base |= replace(self._options, cluster=str(file)).to_environment()
        # Hosts share this machine, and only this job's processes are on their network.
        base.setdefault(TOKEN, secrets.token_hex(16))
        # Worker 0 writes its progress to this file.
        live = base.pop(progress.FILE_VARIABLE, None)
        base |= self._start_servers(base)
        base |= self._aggregators.start(base)
        for worker, host in enumerate(per_host):
            error_file = Path(scratch) / f"error-{worker}.json"
            own = {
                "RANK": str(worker),
                "LOCAL_RANK": str(per_host[:worker].count(host)),
                "LOCAL_WORLD_SIZE": str(per_host.count(host)),
                "GROUP_RANK": str(host),
                ERROR_FILE_VARIABLE: str(error_file),
            }
            if worker == 0:
                own[progress.SOCKET_VARIABLE] = path
                if live is not None:
                    own[progress.FILE_VARIABLE] = live
            stdout, stderr = self._output.streams(worker)
            process = self._network.popen(
                host,
                self._command,
                env={**base, **own, **self._output.environment()},
                stdout=stdout,
                stderr=stderr,
            )
            self._processes.append(process)
            self._workers.add(worker, process, error_file)
            self._output.show(worker, process.stdout, process.stderr)

    def _start_servers(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Start one parameter server on each host of a server.

        Returns the variables by which workers find them.
        """
        cluster = self._network.cluster
        # Only this job's own processes are on this network.
        trusted = {TRUSTED: "1"}
        addresses = []
        for number in range(len(cluster.servers)):
            host = cluster.host_of_server(number)
            address = self._network.hosts[host].address
            addresses.append(f"{address}:{SERVER_PORT}")
            command = [
                *(sys.executable, "-m", "paceline", "serve", "--bind", address),
                *("--port", str(SERVER_PORT), "--workers", str(cluster.workers)),
            ]
            self._servers.append(
                self._network.popen(
                    host,
                    command,
                    env={**environment, **trusted},
                    stdin=subprocess.DEVNULL,
                )
            )
        return trusted | (
            {ADDRESSES_VARIABLE: "+".join(addresses)} if addresses else {}
        )

    def _supervise(self) -> int:
        """Wait for all workers.

        When one fails, give the others time to report errors, then end them.
        """
        failures: list[WorkerExit] = []
        while self._workers.is_running and not failures:
            failures += self._failed(self._workers.wait())
        if failures:
            grace = timeouts.job_grace + exit_grace()
            failures += self._failed(self._workers.stop(grace))
            print(f"paceline: {failure_summary(failures)}", file=sys.stderr)
        return 1 if failures else 0

    def _failed(self, exits: Iterable[WorkerExit]) -> list[WorkerExit]:
        """Return the failed workers, with the causes that this job knows."""
        return [
            replace(one, message=self._cause(one)) for one in exits if one.status != 0
        ]

    def _cause(self, failure: WorkerExit) -> str:
        if failure.rank in self._killed_by_rule:
            return "by a rule of the cluster"
        return failure.message or self._processes[failure.rank].keeper_fault

    # ---- rules ----

    def _receive_progress(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # The job is over.
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                self._reached(int(line))

    def _reached(self, step: int) -> None:
        for rule in self._network.cluster.rules:
            if rule.at is not None and step == 0:
                timer = threading.Timer(rule.at, self._apply, [rule])
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
            elif rule.step == step and step:
                self._apply(rule)

    def _apply(self, rule: Rule) -> None:
        print(f"paceline: rule: {rule.describe()}", file=sys.stderr)
        try:
            if isinstance(rule.target, int):
                self._killed_by_rule.add(rule.target)
                self._processes[rule.target].kill()
                return
            cluster = self._network.cluster
            for link in cluster.links_named(rule.target):
                if rule.action == "cut":
                    self._network.cut(link)
                    continue
                rate = rule.rate if rule.rate is not None else cluster.capacities[link]
                self._network.set_rate(link, rate)
                self._network.repair(link)
        except PacelineError as error:
            print(f"paceline: rule failed: {error}", file=sys.stderr)
