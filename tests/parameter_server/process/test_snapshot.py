"""Snapshots of a server: when they are taken, and what goes on from one."""

import contextlib
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from paceline.errors import UsageError
from paceline.interfaces.server_messages import Leave, Load, Rejected
from paceline.parameter_server.process import snapshot
from paceline.parameter_server.process.services import make_parameter_server
from paceline.parameter_server.process.snapshot import Snapshotter
from paceline.parameter_server.process.surviving import SurvivingJob
from paceline.transport.connection import ServerConnection
from paceline.transport.listener import ServerListener
from tests.support.hanging import SECONDS
from tests.support.server_talk import HOW, METHODS, WORKERS, Talk, Watched, ring


def through_a_file(path, saved):
    snapshot.write(path, saved)
    return snapshot.read(path)


@pytest.mark.parametrize("optimizer", HOW)
@pytest.mark.parametrize("method", METHODS)
def test_a_restored_server_goes_on_with_the_same_bits(tmp_path, method, optimizer):
    talk = Talk(make_parameter_server(WORKERS, "server"), method, optimizer)
    assert talk.begin() == [0, 0, 0]
    for step in range(3):
        talk.step(step)
    saved = talk.server.snapshot()
    again = Talk(make_parameter_server(WORKERS, "server"), method, optimizer)
    for step in range(3, 6):  # what is done now is not in the snapshot
        talk.step(step)
    assert again.server.restore(through_a_file(tmp_path / "file", saved)) == 3
    assert again.begin(life=1) == [3, 3, 3]
    for step in range(3, 6):
        again.step(step, life=1)
    assert again.parameters(life=1) == talk.parameters()
    assert again.server.counts == talk.server.counts


@pytest.mark.parametrize("method", METHODS)
def test_a_restored_server_does_not_wait_for_who_is_done(method):
    talk = Talk(make_parameter_server(WORKERS, "server"), method)
    talk.begin()
    talk.step(0)
    again = Talk(make_parameter_server(WORKERS, "server"), method)
    again.server.restore(talk.server.snapshot())
    again.server.on_worker_lost(2, 0, 0.0)
    for worker in (0, 1):
        again.ask(worker, again.join)
    for bucket in range(2):
        again.push(0, 1, bucket)
        answers = again.push(1, 1, bucket)
        # with two of three to wait for, the last one's step is not over before it is in
    assert {a.to.worker for a in answers} >= {1}


OTHERS = {
    "optimizer": ({"optimizer": "Adam"}, "options is 'asp with SGD' there"),
    "method": ({"method": "ssp"}, "options is 'asp with SGD' there"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_snapshot_of_another_training_is_refused(what):
    others, sentence = OTHERS[what]
    talk = Talk(make_parameter_server(WORKERS, "server"))
    talk.begin()
    again = Talk(make_parameter_server(WORKERS, "server"), **others)
    again.server.restore(talk.server.snapshot())
    [answer] = again.ask(0, again.join)
    assert isinstance(answer.message, Rejected)
    assert "the snapshot is of another training: " + sentence in answer.message.reason


def test_a_snapshot_of_other_workers_is_refused():
    talk = Talk(make_parameter_server(WORKERS, "server"))
    talk.begin()
    with pytest.raises(UsageError, match=r"3 workers.*2"):
        make_parameter_server(2, "server").restore(talk.server.snapshot())


def test_there_is_nothing_to_save_before_parameters_are_there():
    talk = Talk(make_parameter_server(WORKERS, "server"))
    assert talk.server.snapshot() == {}
    talk.ask(0, talk.join)
    assert talk.server.snapshot() == {}


DAMAGES = {
    "cut": (lambda data: data[:-1], "cannot be read"),
    "changed": (
        lambda data: data.replace(b"\0\0\x80?" * 9, b"\0\1\x80?" * 9),
        "is damaged",
    ),
    "foreign": (lambda _: b"something else", "cannot be read"),
    "empty": (lambda _: b"", "cannot be read"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused(tmp_path, how):
    damage, sentence = DAMAGES[how]
    path = tmp_path / "file"
    snapshot.write(path, {"step": 1, "tensor": torch.ones(200)})
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    with pytest.raises(UsageError, match=sentence):
        snapshot.read(path)


def test_no_changed_byte_changes_what_is_read(tmp_path):
    """Of each third byte: each part of the file has some."""
    path = tmp_path / "file"
    saved = {"step": 1, "tensor": torch.arange(8.0)}
    snapshot.write(path, saved)
    data = path.read_bytes()
    for place in range(0, len(data), 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        # Alignment and attributes of a zip file are no part of what it holds.
        with contextlib.suppress(UsageError):
            assert_close(snapshot.read(path), saved, rtol=0, atol=0)


@pytest.mark.parametrize("value", [{"step": 1}, {"format": "another"}, torch.ones(1)])
def test_what_torch_saved_for_others_is_no_snapshot(tmp_path, value):
    path = tmp_path / "file"
    torch.save(value, path)
    with pytest.raises(UsageError, match="no snapshot of this"):
        snapshot.read(path)


def test_a_failed_write_leaves_the_snapshot_before(tmp_path):
    path = tmp_path / "file"
    snapshot.write(path, {"step": 1})
    with pytest.raises(Exception, match="pickle"):
        snapshot.write(path, {"step": lambda: 2})
    assert list(tmp_path.iterdir()) == [path]
    assert snapshot.read(path) == {"step": 1}
    with pytest.raises(OSError, match="no-folder"):
        snapshot.write(tmp_path / "no-folder" / "file", {"step": 1})


class Disk:
    """Stands for `snapshot.write`: keeps what is written, each only once it *may_write*."""

    def __init__(self):
        self.written, self.may_write = [], threading.Event()
        self.begun = threading.Semaphore(0)
        self.fault = None

    def keep(self, path, saved):
        self.begun.release()
        assert self.may_write.wait(SECONDS)
        if self.fault is not None:
            raise self.fault
        self.written.append(saved)


def kept_talk(method="asp", **how):
    """Workers that talk to a server that keeps a snapshot every 10 s; the snapshotter is its
    *snapshotter*."""
    machine = make_parameter_server(WORKERS, "server")
    snapshotter = Snapshotter(machine, Path("file"), 10.0, **how)
    talk = Talk(Watched(machine, [snapshotter]), method)
    talk.snapshotter = snapshotter
    talk.begin()
    return talk


def writing(method="backup", clock=lambda: 0.0):
    """A server that takes a snapshot every 10 s, at the disk with its first one, of step 2; the
    disk, and the server's own state machine."""
    disk = Disk()
    talk = kept_talk(method, keep=disk.keep, clock=clock)
    talk.step(0)
    talk.now = 11.0
    talk.step(1)
    ring(talk)
    assert disk.begun.acquire(timeout=SECONDS)
    return talk, disk, talk.server.service


def test_training_goes_on_while_a_snapshot_is_written_and_it_is_of_one_moment():
    talk, disk, machine = writing()
    expected = machine.snapshot()
    assert expected["step"] == 2
    for step in range(2, 6):
        talk.step(step)
    assert not disk.written
    disk.may_write.set()
    talk.snapshotter.finish()
    [saved] = disk.written
    assert_close(saved["store"], expected["store"], rtol=0, atol=0)
    assert (saved["step"], saved["counts"]) == (2, expected["counts"])
    with pytest.raises(AssertionError):
        assert_close(saved["store"], machine.snapshot()["store"])


def test_a_snapshot_waits_for_the_one_before_it():
    talk, disk, _ = writing()
    for step, now in enumerate((22.0, 33.0, 44.0), start=2):
        talk.now = now
        talk.step(step)
        ring(talk)
    assert not disk.begun.acquire(blocking=False), "two at a time"
    disk.may_write.set()
    talk.snapshotter.finish()
    talk.step(5)
    ring(talk)  # it is due since long
    talk.snapshotter.finish()
    assert [saved["step"] for saved in disk.written] == [2, 6]


def test_what_goes_wrong_in_the_writer_is_raised_in_the_server():
    talk, disk, _ = writing()
    disk.fault = RuntimeError("my fault")
    disk.may_write.set()
    talk.snapshotter.wait()
    with pytest.raises(RuntimeError, match="my fault"):
        talk.step(2)
    talk.step(3)  # once


def test_what_went_wrong_at_last_is_raised_at_the_end():
    talk, disk, _ = writing()
    disk.fault = RuntimeError("my fault")
    disk.may_write.set()
    with pytest.raises(RuntimeError, match="my fault"):
        talk.snapshotter.finish()


def test_the_last_snapshot_follows_the_one_that_is_being_written():
    talk, disk, _ = writing()
    talk.step(2)
    threading.Timer(0.1, disk.may_write.set).start()
    talk.snapshotter.take_last()
    assert [saved["step"] for saved in disk.written] == [2, 3]


def test_copying_takes_at_most_a_hundredth_of_the_time():
    times = iter([0.0, 0.3])
    talk, disk, _ = writing(clock=lambda: next(times))
    assert talk.server.next_deadline() == pytest.approx(11.0 + 30.0 + 10.0)
    disk.may_write.set()
    talk.snapshotter.finish()


def test_a_snapshot_that_is_written_at_the_end_of_a_job_is_removed(
    tmp_path, monkeypatch
):
    """Else the next job would take it for its own."""
    path, disk = tmp_path / "snapshot", Disk()
    write = snapshot.write

    def keep(path, saved):
        disk.keep(path, saved)
        write(path, saved)

    monkeypatch.setattr(Snapshotter.__init__, "__defaults__", (keep, time.monotonic))
    token = "t" * 32
    listener = ServerListener(workers=1, token=token, numbers=True)
    job = SurvivingJob(listener, snapshot=path, snapshot_seconds=0.001)
    thread = threading.Thread(target=lambda: list(job.run()))
    thread.start()
    end = ServerConnection(
        "server", "127.0.0.1", listener.port, worker=0, incarnation=None, token=token
    )
    end.request(Talk(None).join).wait()
    for bucket, size in enumerate((2, 3)):
        end.request(Load(bucket=bucket), torch.zeros(size)).wait()
    assert disk.begun.acquire(timeout=SECONDS)
    end.request(Leave()).wait()
    end.close()
    disk.may_write.set()
    thread.join(SECONDS)
    job.host.close()
    assert not list(tmp_path.iterdir())


def keeping(method):
    """A server with snapshots every 10 s, and the steps of those that it has taken."""
    taken = []
    talk = kept_talk(
        method,
        keep=lambda _, saved: taken.append(saved["step"]),
        clock=lambda: 0.0,
    )
    assert talk.server.next_deadline() == 20.0
    return talk, taken


@pytest.mark.parametrize("method", METHODS)
def test_a_snapshot_is_taken_at_the_end_of_a_step(method):
    talk, taken = keeping(method)
    talk.step(0)
    assert taken == []  # it is too early
    talk.now = 11.0
    talk.step(1)
    assert taken == []  # the answers leave first
    ring(talk)
    talk.snapshotter.finish()
    assert taken == [2]
    assert talk.server.next_deadline() == 31.0


def test_without_a_quiet_moment_it_is_taken_as_things_are():
    talk, taken = keeping("asp")
    for worker in range(WORKERS):
        talk.push(worker, 0, 0)
    talk.now = 11.0
    for step in range(5):  # whoever is through with a step, another is in one
        for worker in range(WORKERS):
            talk.push(worker, step, 1)
            talk.push(worker, step + 1, 0)
    assert taken == []
    talk.server.on_timer(20.0)
    talk.snapshotter.finish()
    assert taken == [5]
    assert talk.server.next_deadline() == 40.0
    talk.server.on_timer(40.0)
    talk.snapshotter.finish()
    assert taken == [5]  # nothing has happened since
    assert talk.server.next_deadline() == 60.0


@pytest.mark.parametrize("method", ["ssp:staleness=0", "backup"])
def test_no_snapshot_is_taken_in_the_middle_of_a_step(method):
    """Bucket 0 is a step ahead of bucket 1: nobody could go on from that."""
    talk, taken = keeping(method)
    talk.step(0)
    for worker in range(WORKERS):
        talk.push(worker, 1, 0)
    talk.server.on_timer(20.0)
    assert taken == []
    assert talk.server.next_deadline() == 30.0
    talk.now = 21.0
    for worker in range(WORKERS):
        talk.push(worker, 1, 1)
    ring(talk)
    talk.snapshotter.finish()
    assert taken == [2]


def test_a_disk_that_is_full_does_not_end_the_training(caplog):
    def keep(path, saved):
        raise OSError("no space left")

    talk = kept_talk(keep=keep)
    talk.now = 11.0
    talk.step(0)
    ring(talk)
    talk.snapshotter.finish()
    assert "no snapshot of step 1: no space left" in caplog.text
    talk.now = 40.0
    ring(talk)
    talk.snapshotter.finish()
    assert len(caplog.records) == 1  # nothing has changed
    talk.now = 80.0
    talk.step(1)
    ring(talk)
    talk.snapshotter.finish()
    assert "no snapshot of step 2" in caplog.text


def test_two_servers_do_not_keep_one_snapshot(tmp_path):
    path = tmp_path / "snapshot"
    for _ in range(2):
        with snapshot.snapshot_lock(path):
            with (
                pytest.raises(UsageError, match="another server"),
                snapshot.snapshot_lock(path),
            ):
                raise AssertionError("it is taken")
            with (
                snapshot.snapshot_lock(tmp_path / "another"),
                snapshot.snapshot_lock(None),
            ):
                pass


def test_a_file_beside_a_snapshot_is_left_alone(tmp_path):
    other = tmp_path / "poetry.lock"
    other.write_text("of somebody else")
    with snapshot.snapshot_lock(tmp_path / "poetry"):
        pass
    assert other.read_text() == "of somebody else"


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / ".snapshot.paceline-lock").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(UsageError, match="no file"),
        snapshot.snapshot_lock(tmp_path / "snapshot"),
    ):
        raise AssertionError("it would make a file there")
    assert not (tmp_path / "elsewhere").exists()
