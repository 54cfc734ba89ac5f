"""Headers and payloads: what is written is read, and nothing else is."""

import contextlib
import sys

import msgspec
import pytest
import torch
import zmq

from paceline.errors import UsageError
from paceline.interfaces.server_messages import (
    DTYPES,
    Done,
    Join,
    Load,
    Push,
    Rejected,
    Unit,
)
from paceline.transport import protocol
from paceline.transport.protocol import ProtocolError
from tests.support.hanging import SECONDS

SMALL = protocol.SMALL_BYTES
FRAME = 4 * SMALL


@pytest.fixture
def small_frames(monkeypatch):
    monkeypatch.setattr(protocol, "FRAME_BYTES", FRAME)


@contextlib.contextmanager
def pair():
    """Over TCP: what is received is memory of ZeroMQ's own."""
    context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = one.bind_to_random_port("tcp://127.0.0.1")
    other.connect(f"tcp://127.0.0.1:{port}")
    try:
        assert one.poll(1000 * SECONDS, zmq.POLLOUT)
        yield one, other
    finally:
        context.destroy(0)


def receive(socket):
    """The header and the frames of a message."""
    header, *frames = socket.recv_multipart(copy=False)
    return protocol.decode_from_worker(header.bytes), [one.buffer for one in frames]


UNITS = [[Unit(0, 0, 4, 0, (2, 2)), Unit(1, 0, 3, 0)], []]


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (protocol.decode_hello, protocol.Hello(1, "token", 2, 3, "channel")),
        (protocol.decode_from_worker, protocol.Bye()),
        (
            protocol.decode_from_worker,
            protocol.RequestHeader(7, Load(bucket=2), "float32", 9),
        ),
        (
            protocol.decode_from_worker,
            protocol.RequestHeader(
                0,
                Push(step=1, bucket=2, used=[True], hyperparameters=[{"lr": 0.1}]),
            ),
        ),
        (
            protocol.decode_from_worker,
            protocol.RequestHeader(
                0, Join(options="", units=UNITS, dtypes=["float32"] * 2)
            ),
        ),
        (protocol.decode_from_server, protocol.Welcome(1, "ticket")),
        (protocol.decode_from_server, protocol.ReplyHeader(1, Rejected(reason="no"))),
        (protocol.decode_from_server, protocol.ReplyHeader(1, Done(), "int64", 2)),
        (protocol.decode_from_server, protocol.Farewell()),
        (protocol.decode_from_server, protocol.Rejected("no")),
    ],
)
def test_what_is_written_is_read(decode, words):
    header = protocol.encode(words)
    assert decode(header) == words
    for wrong in (header[:-1], header + b"x", b"", b"\xc1", header[1:]):
        with pytest.raises(ProtocolError):
            decode(wrong)


def test_what_nobody_says_is_not_read():
    for wrong in (
        ["shout", 1],
        ["bye", 1],
        ["request", "one", {"type": "load", "bucket": 1}],
        ["request", 0, {"type": "load", "bucket": 1}, "float32", 1, 1],
        ["request", 0, {"type": "shout"}],
        ["request", 0, {"type": "load", "bucket": "one"}],
        {"type": "request", "number": 1},
        [["request"] * 3] * 3,
    ):
        with pytest.raises(ProtocolError):
            protocol.decode_from_worker(msgspec.msgpack.encode(wrong))
    with pytest.raises(ProtocolError):
        protocol.decode_from_worker(b"\x91" * 100_000)  # deeply nested
    with pytest.raises(ProtocolError, match="a header of"):
        protocol.decode_from_worker(bytes(protocol.LARGEST_HEADER_BYTES + 1))


def send(socket, sent):
    header = protocol.RequestHeader(0, Load(bucket=0), *protocol.describe(sent))
    protocol.send(socket, header, sent)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "size", [0, 16, SMALL, FRAME, FRAME + 16, 3 * FRAME - 16, 3 * FRAME]
)
def test_payloads_travel_whole(dtype, size, small_frames):
    sent = (torch.arange(size // dtype.itemsize) % 97).to(dtype)
    into = torch.zeros_like(sent)
    with pair() as (one, other):
        for _ in range(2):
            send(one, sent)
        header, frames = receive(other)
        got = protocol.payload_from(header.dtype, header.elements, frames, size)
        assert protocol.decode_from_worker(other.recv()) == header
        protocol.receive_into(other, into)
        assert not other.getsockopt(zmq.RCVMORE)
    assert [len(frame) for frame in frames] == protocol.frame_sizes(size)
    assert got.dtype == dtype
    assert torch.equal(got, sent)
    assert torch.equal(into, sent)
    assert got.data_ptr() % dtype.itemsize == 0


def test_a_payload_lies_in_the_memory_of_its_frame_and_can_be_written():
    sent = torch.ones(FRAME)
    with pair() as (one, other):
        send(one, sent)
        header, [frame] = receive(other)
        got = protocol.payload_from(header.dtype, header.elements, [frame], 4 * FRAME)
        assert got.data_ptr() == torch.frombuffer(frame, dtype=torch.uint8).data_ptr()
        alive = sys.getrefcount(frame)
        assert got.mul_(2.0).sum() == 2 * FRAME
        assert sent.sum() == FRAME
        del got
        assert sys.getrefcount(frame) < alive, "memory goes with the tensor"


def test_small_payloads_do_not_keep_what_came_with_them():
    with pair() as (one, other):
        send(one, torch.ones(4))
        header, [frame] = receive(other)
        got = protocol.payload_from(header.dtype, header.elements, [frame], 16)
        assert got.data_ptr() != torch.frombuffer(frame, dtype=torch.uint8).data_ptr()


def test_frames_are_views_of_the_tensors_own_memory(small_frames):
    tensor = torch.zeros(FRAME, requires_grad=True)
    first, second, *_ = protocol.frames_of(tensor)
    with torch.no_grad():
        tensor.fill_(1.0)
    assert bytes(first[:4]) == bytes(second[:4]) == torch.ones(1).numpy().tobytes()


@pytest.mark.parametrize("sizes", [[], [15], [17], [16, 0], [16, 1], [8, 8]])
def test_frames_that_are_not_what_the_header_says(sizes):
    frames = [zmq.Frame(bytes(size)) for size in sizes]
    with pytest.raises(ProtocolError) as caught:
        protocol.payload_from("float32", 4, frames, 100)
    assert caught.value.kind == "payload"
    with pair() as (one, other):
        one.send_multipart([b"header", *frames])
        other.recv()
        if sum(sizes) < 16 or sizes[0] != 16:
            with pytest.raises(ProtocolError):
                protocol.receive_into(other, torch.zeros(4))
        protocol.discard_message(other)


def test_a_message_without_payload_is_one_frame():
    with pair() as (one, other):
        send(one, None)
        header, frames = receive(other)
    assert not frames
    assert protocol.payload_from(header.dtype, header.elements, frames, 0) is None
    assert protocol.describe(None) == (None, 0)
    assert protocol.payload_bytes(None, 0, 0) == 0


@pytest.mark.parametrize(
    ("kind", "dtype", "elements"),
    [
        ("dtype", "object", 1),
        ("payload", "float32", -1),
        ("payload", None, 1),
        ("too large", "float32", 26),
        ("too large", "uint8", 2**64),
    ],
)
def test_payloads_that_cannot_be(kind, dtype, elements):
    assert protocol.payload_bytes("float32", 25, 100) == 100
    with pytest.raises(ProtocolError) as caught:
        protocol.payload_bytes(dtype, elements, 100)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 2), torch.ones(4)[::2], torch.ones(2, dtype=torch.bool)],
    ids=["not flat", "not contiguous", "bool"],
)
def test_tensors_that_cannot_travel(tensor):
    protocol.check_flat("payload", torch.ones(2))
    with pytest.raises(UsageError, match="payload: expected"):
        protocol.check_flat("payload", tensor)


def test_addresses():
    assert protocol.endpoint("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert protocol.endpoint("::1", "*") == "tcp://[::1]:*"
