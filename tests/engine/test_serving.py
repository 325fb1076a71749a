import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from scripted_engine import build

from atlas_core.engine.serving import serve
from atlas_core.engine.wire import MAX_FRAME, VERSION, Configure, Frames, decode, encode
from atlas_core.vocab.messages import Abort, Faulted, Hello, Progress, Ready


@contextlib.contextmanager
def serving():
    """A socket to an engine on a thread, and the events that its callbacks set."""
    ours, theirs = socket.socketpair()
    closed = threading.Event()
    results = []
    thread = threading.Thread(
        target=lambda: results.append(serve(theirs, closed=closed.set, ready=lambda: None, build=build))
    )
    thread.start()
    ours.settimeout(10)
    try:
        yield ours, closed, results
    finally:
        ours.close()
        thread.join(10)
        assert not thread.is_alive()


def received(connection, count):
    frames = Frames()
    messages = []
    while len(messages) < count:
        data = connection.recv(1 << 16)
        assert data, "the engine hung up"
        messages += [decode(payload) for payload in frames.feed(data)]
    return messages


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (encode(Hello(VERSION + 1)), "the peer speaks version"),
        (encode(Hello(VERSION, (("toy", "1 aa"),))), "the API process and the engine process do not have"),
        (encode(Abort("a")), "the peer began with Abort"),
        (encode(Hello(VERSION)) + encode(Abort("a")), "Abort came instead of Configure"),
        (struct.pack("<I", MAX_FRAME + 1), "a frame of"),
        (struct.pack("<I", 3) + b"abc", "a frame of 3 bytes is no message"),
    ],
)
def test_a_peer_that_speaks_otherwise_is_told(sent, what):
    with serving() as (connection, _, results):
        connection.sendall(sent)
        hello, fault = received(connection, 2)
        assert hello == Hello(VERSION)
        assert isinstance(fault, Faulted)
        assert fault.failure.what.startswith(what)
        assert connection.recv(1) == b""
    assert results == [False]


def test_the_last_message_can_be_read_by_a_peer_that_still_writes(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-m", "atlas_core.engine.process", "--socket", str(tmp_path / "s")]
        with subprocess.Popen(command) as process:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(encode(Hello(VERSION + 1)))
                time.sleep(0.3)
                connection.sendall(encode(Abort("a")))
                assert isinstance(received(connection, 2)[1], Faulted)
            assert process.wait(5) == 1


def test_hanging_up_is_noticed_at_once_even_while_the_engine_is_built():
    with serving() as (connection, closed, results):
        connection.sendall(encode(Hello(VERSION)) + encode(Configure("", b'{"load": 1.0}')))
        assert [type(message) for message in received(connection, 2)] == [Hello, Progress]
        connection.close()
        assert closed.wait(0.5)
        assert results == []
    assert results == [True]


def test_garbage_after_ready_is_a_fault():
    with serving() as (connection, _, results):
        connection.sendall(encode(Hello(VERSION)) + encode(Configure("", b"{}")))
        assert isinstance(received(connection, 4)[-1], Ready)
        connection.sendall(struct.pack("<I", 1) + b"\x00")
        (fault,) = received(connection, 1)
        assert "no message" in fault.failure.what
    assert results == [False]
