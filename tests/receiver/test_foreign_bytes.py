"""Peers that speak another protocol: each is counted, and the receiver goes on."""

import socket
import threading

import pytest
import zmq
from receiver_peer import Peer, Running, packet
from waiting import until

from stream_ssl.receiver.protocol import ReceiverProtocol

ZMTP_1 = b"\x01\x00\x03\x00ab"
ZMTP_2 = b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x02ab"
HTTP = (
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1:5557\r\nUser-Agent: Mozilla/5.0 (X11)\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 200\r\n\r\n" + bytes(200)
)


def raw(endpoint, data):
    """Send bytes over a TCP connection of their own, and return the open connection."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    peer = socket.create_connection((host, int(port)), timeout=60.0)
    peer.sendall(data)
    return peer


@pytest.mark.parametrize("data", [ZMTP_1, ZMTP_2, HTTP], ids=["zmtp-1", "zmtp-2", "http"])
def test_the_receiver_counts_connections_without_zmtp_3_and_goes_on(tmp_path, data):
    with Running(tmp_path) as running, Peer(running.endpoint) as good:
        good.hello("good")
        with raw(running.endpoint, data):
            until(lambda: running.counted("refused")["zmtp"])
            good.say(packet(1))
            good.acked(1)
        assert running.error is None


def test_an_internal_error_costs_only_one_message(tmp_path, monkeypatch, caplog):
    """The loop goes on, whatever the handling of a message raises."""
    with Running(tmp_path) as running, Peer(running.endpoint) as good:
        good.hello("good")
        with monkeypatch.context() as patch:
            patch.setattr(ReceiverProtocol, "handle", lambda *_: 1 // 0)
            good.say(packet(1))
            until(lambda: running.counted("refused")["internal"] == 1)
        good.say(packet(1))
        good.acked(1)
    assert "ZeroDivisionError" in caplog.text


def test_the_watch_of_connections_continues_after_an_error(tmp_path, monkeypatch):
    with Running(tmp_path) as running:
        backlogs, called = running.receiver._listener.backlogs, threading.Event()

        def broken(now):
            called.set()
            raise zmq.ZMQError(22)

        with monkeypatch.context() as patch:
            patch.setattr(backlogs, "check", broken)
            assert called.wait(60.0)
        before = backlogs._next
        until(lambda: backlogs._next > before)
