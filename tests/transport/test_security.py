"""Plain or CURVE, and whom a server lets in."""

import pytest

from paceline.errors import UsageError
from paceline.transport.security import (
    PLAIN,
    SECRET,
    TRUSTED,
    choose,
    from_secret,
    is_loopback,
)

LONG = "a secret of the job"


@pytest.mark.parametrize(
    ("address", "environment", "encrypted"),
    [
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {TRUSTED: "0"}, False),
        ("10.0.0.1", {TRUSTED: "1"}, False),
        ("10.0.0.1", {SECRET: LONG}, True),
        ("127.0.0.1", {SECRET: LONG}, True),
        ("10.0.0.1", {SECRET: LONG, TRUSTED: "1"}, True),
        ("127.0.0.1", {SECRET: ""}, False),
    ],
)
def test_the_table(address, environment, encrypted):
    assert choose(address, environment).encrypted is encrypted


@pytest.mark.parametrize("address", ["10.0.0.1", "0.0.0.0", "::", "node-1", "*"])
@pytest.mark.parametrize("trusted", [{}, {TRUSTED: "0"}, {TRUSTED: ""}])
def test_nothing_listens_unprotected(address, trusted):
    with pytest.raises(UsageError) as caught:
        choose(address, trusted)
    for word in (address, SECRET, f"{TRUSTED}=1", "token_hex"):
        assert word in str(caught.value)


def test_wrong_words_are_refused():
    with pytest.raises(UsageError, match="expected 1 or 0, got 'yes'"):
        choose("127.0.0.1", {TRUSTED: "yes"})
    with pytest.raises(UsageError, match="at least 16 characters, got 5") as caught:
        choose("127.0.0.1", {SECRET: "short"})
    assert "short" not in str(caught.value)


def test_the_environment_is_asked_when_nothing_else_is_given(monkeypatch):
    monkeypatch.setenv(SECRET, LONG)
    assert choose("10.0.0.1") == from_secret(LONG)


def test_keys_come_from_the_secret_and_are_not_shown():
    from_secret.cache_clear()
    first = from_secret(LONG)
    from_secret.cache_clear()
    second, other = from_secret(LONG), from_secret(LONG + "!")
    assert first == second
    names = ("server_public", "server_secret", "worker_public", "worker_secret")
    keys = {getattr(one, name) for one in (first, other) for name in names}
    assert len(keys) == 8
    assert all(len(key) == 40 for key in keys)
    assert not any(key.decode() in repr(first) for key in keys)


def question(mechanism, *credentials):
    return [b"1.0", b"7", b"", b"127.0.0.1", b"", mechanism, *credentials]


def test_who_is_let_in():
    from zmq.utils import z85

    curve, token = from_secret(LONG), "the token"
    key = z85.decode(curve.worker_public)
    accepted = [b"1.0", b"7", b"200", b"OK", b"", b""]
    plain = question(b"PLAIN", b"paceline", b"the token")
    assert PLAIN.zap_reply(plain, token) == (accepted, True)
    assert curve.zap_reply(question(b"CURVE", key), token) == (accepted, True)
    for security, asked in [
        (PLAIN, question(b"PLAIN", b"paceline", b"another")),
        (PLAIN, question(b"NULL")),
        (PLAIN, question(b"CURVE", key)),
        (curve, plain),
        (curve, question(b"CURVE", bytes(32))),
        (curve, question(b"NULL")),
    ]:
        reply, admitted = security.zap_reply(asked, token)
        assert not admitted
        assert reply[2] == b"400"


def test_loopback():
    assert is_loopback("127.1.2.3")
    assert not is_loopback("localhost.example.org")
