"""Headers and payloads: what is written is read, and nothing else is."""

import contextlib

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
    Refused,
    Unit,
)
from paceline.transport import payloads, protocol
from paceline.transport.protocol import RefusalError

CHUNK = protocol.CHUNK_BYTES


@contextlib.contextmanager
def pair():
    context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://pair")
    other.connect("inproc://pair")
    try:
        yield one, other
    finally:
        context.destroy(0)


def send(socket, first, payload):
    for words, chunk in payloads.messages(first, payload, None):
        socket.send_multipart([words] if chunk is None else [words, chunk], copy=False)


def take(inbox, socket):
    words = protocol.decode_from_worker(socket.recv())
    return inbox.take(words, payloads.Chunk(socket))


UNITS = [[Unit(0, 0, 4, 0, (2, 2)), Unit(1, 0, 3, 0)], []]


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (protocol.decode_hello, protocol.Hello(1, "token", 2, 3, "channel")),
        (protocol.decode_from_worker, protocol.Bye()),
        (protocol.decode_from_worker, protocol.More(7)),
        (protocol.decode_from_worker, protocol.More(7, 3)),
        (protocol.decode_from_worker, protocol.Share(protocol.Memory(1, 2, b"nonce"))),
        (
            protocol.decode_from_worker,
            protocol.Begin(7, 3, Load(bucket=2), "float32", 9),
        ),
        (
            protocol.decode_from_worker,
            protocol.Begin(
                0,
                0,
                Push(step=1, bucket=2, used=[True], hyperparameters=[{"lr": 0.1}]),
            ),
        ),
        (
            protocol.decode_from_worker,
            protocol.Begin(0, 0, Join(options="", units=UNITS, dtypes=["float32"] * 2)),
        ),
        (protocol.decode_from_server, protocol.Welcome(1, "ticket")),
        (protocol.decode_from_server, protocol.Answered(1, Refused(reason="no"))),
        (protocol.decode_from_server, protocol.Answered(1, Done(), "int64", 2)),
        (protocol.decode_from_worker, protocol.Reads()),
        (protocol.decode_from_server, protocol.Shared(None)),
        (protocol.decode_from_server, protocol.Shared(protocol.Memory(1, 2, b"nonce"))),
        (protocol.decode_from_server, protocol.Farewell()),
        (protocol.decode_from_server, protocol.Rejected("no")),
    ],
)
def test_what_is_written_is_read(decode, words):
    header = protocol.encode(words)
    assert decode(header) == words
    for wrong in (header[:-1], header + b"x", b"", b"\xc1", header[1:]):
        with pytest.raises(RefusalError):
            decode(wrong)


def test_what_nobody_says_is_not_read():
    for wrong in (
        ["shout", 1],
        ["more", "one"],
        ["more", 1, "two"],
        ["more", 1, 2, 3],
        ["begin", 0, 0, {"type": "shout"}],
        ["begin", 0, 0, {"type": "load", "bucket": "one"}],
        {"type": "more", "number": 1},
        [["more"] * 3] * 3,
    ):
        with pytest.raises(RefusalError):
            protocol.decode_from_worker(msgspec.msgpack.encode(wrong))
    with pytest.raises(RefusalError):
        protocol.decode_from_worker(b"\x91" * 100_000)  # deeply nested


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", [0, 16, CHUNK, CHUNK + 16, 3 * CHUNK - 16])
def test_payloads_travel_in_chunks(dtype, size):
    sent = (torch.arange(size // dtype.itemsize) % 97).to(dtype)
    begin = protocol.Begin(0, 0, Load(bucket=0), *payloads.described(sent))
    inbox = payloads.Inbox(size)
    with pair() as (one, other):
        send(one, begin, sent)
        complete = None
        for _ in range(max(1, -(-size // CHUNK))):
            assert complete is None
            complete = take(inbox, other)
        words, got = complete
    assert words == begin
    assert got.dtype == dtype
    assert torch.equal(got, sent)
    assert got.data_ptr() % 16 == 0 or not size


def test_chunks_are_views_of_the_tensors_own_memory():
    tensor = torch.zeros(CHUNK, requires_grad=True)
    begin = protocol.Begin(0, 0, Load(bucket=0), *payloads.described(tensor))
    (_, first), (_, second), *_ = payloads.messages(begin, tensor, None)
    with torch.no_grad():
        tensor.fill_(1.0)
    assert bytes(first[:4]) == bytes(second[:4]) == torch.ones(1).numpy().tobytes()


def test_a_message_without_payload_is_one_frame():
    begin = protocol.Begin(0, 0, Load(bucket=0))
    assert list(payloads.messages(begin, None, None)) == [
        (protocol.encode(begin), None)
    ]
    assert payloads.described(None) == (None, 0)
    assert payloads.payload_bytes(None, 0, 0) == 0


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
    assert payloads.payload_bytes("float32", 25, 100) == 100
    with pytest.raises(RefusalError) as caught:
        payloads.payload_bytes(dtype, elements, 100)
    assert caught.value.kind == kind


def test_credits_are_given_back_with_the_answer():
    inbox = payloads.Inbox(1 << 30)
    with pair() as (_, socket):
        for number in range(protocol.CREDITS):
            inbox.take(
                protocol.Begin(number, 0, Load(bucket=0)), payloads.Chunk(socket)
            )
        inbox.answered(0)
        inbox.answered(0)
        inbox.take(
            protocol.Begin(protocol.CREDITS, 1, Load(bucket=0)), payloads.Chunk(socket)
        )
        with pytest.raises(RefusalError) as caught:
            inbox.take(
                protocol.Begin(protocol.CREDITS + 1, 1, Load(bucket=0)),
                payloads.Chunk(socket),
            )
    assert caught.value.kind == "credits"
    assert caught.value.fatal


def test_credits_in_bytes_let_one_large_request_pass_alone():
    size = protocol.CREDIT_BYTES + 1
    inbox = payloads.Inbox(size)
    with pair() as (_, socket):
        begin = protocol.Begin(0, 0, Load(bucket=0), "uint8", size)
        with pytest.raises(RefusalError, match="missing"):
            inbox.take(begin, payloads.Chunk(socket))
        assert inbox.abandon() == 0
        assert (
            inbox.take(protocol.More(0), payloads.Chunk(socket)) is None
        )  # thrown away
        inbox.take(protocol.Begin(1, 0, Load(bucket=0)), payloads.Chunk(socket))
        with pytest.raises(RefusalError) as caught:
            inbox.take(
                protocol.Begin(2, 0, Load(bucket=0), "uint8", size),
                payloads.Chunk(socket),
            )
    assert caught.value.kind == "credits"


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 2), torch.ones(4)[::2], torch.ones(2, dtype=torch.bool)],
    ids=["not flat", "not contiguous", "bool"],
)
def test_tensors_that_cannot_travel(tensor):
    payloads.check_flat("payload", torch.ones(2))
    with pytest.raises(UsageError, match="payload: expected"):
        payloads.check_flat("payload", tensor)


def test_addresses():
    assert protocol.endpoint("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert protocol.endpoint("::1", "*") == "tcp://[::1]:*"
