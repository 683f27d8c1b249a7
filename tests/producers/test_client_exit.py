"""Scripts that end without close(): nothing is lost in silence, and nothing waits for ever."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from client_peer import Peer, arrived, image
from waiting import until

from stream_ssl.producers import Producer

SCRIPT = """
import sys
import numpy as np
from stream_ssl.producers import Producer
producer = Producer(sys.argv[1], name="a", exit_timeout=float(sys.argv[2]))
for number in range(200):
    producer.send(np.zeros((4, 4), np.uint8), id=str(number))
"""

CHILDREN = """
import multiprocessing, sys
import numpy as np
from stream_ssl.producers import Producer
def send(address):
    producer = Producer(address, name="a", exit_timeout=30.0)
    for number in range(200):
        producer.send(np.zeros((4, 4), np.uint8), id=str(number))
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=send, args=sys.argv[2:])
    child.start()
    child.join()
"""


def script(address: str, timeout: float, more: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT + more, address, str(timeout)]
    return subprocess.run(command, timeout=60, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("end", "status"),
    [("del producer", 0), ("producer.extra = producer; sys.exit(3)", 3), ("1 / 0", 1)],
)
def test_a_script_without_close_loses_nothing(end: str, status: int) -> None:
    with Peer() as peer, peer.serving() as journal:
        done = script(peer.address, 30.0, end)
    assert arrived(journal) == [str(n) for n in range(200)]
    assert done.returncode == status
    assert "lost" not in done.stderr


def test_the_exit_does_not_wait_for_a_stuck_callback() -> None:
    more = "from stream_ssl.producers import _io_thread\n_io_thread.CALLBACK_SECONDS = 0.2\n"
    more += "import threading\nstuck = lambda _: threading.Event().wait()\n"
    more += "producer.send(np.zeros((4, 4), np.uint8), on_delivery=stuck)"
    with Peer() as peer, peer.serving() as journal:
        done = script(peer.address, 1.0, more)
    assert len(arrived(journal)) == 201
    assert done.returncode == 0
    assert "a callback does not return: <function <lambda>" in done.stderr


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_process_of_multiprocessing_without_close_loses_nothing(
    method: str, tmp_path: Path
) -> None:
    path = tmp_path / "children.py"
    path.write_text(CHILDREN)
    with Peer() as peer, peer.serving() as journal:
        command = [sys.executable, path, method, peer.address]
        subprocess.run(command, timeout=60, check=True)
    assert arrived(journal) == [str(n) for n in range(200)]


def test_a_script_without_a_receiver_ends_in_time_and_counts_the_lost_samples() -> None:
    began = time.monotonic()
    done = script("tcp://127.0.0.1:1", 0.3)
    assert time.monotonic() - began < 20
    assert done.returncode == 0
    assert "closed with 200 samples unacknowledged: a source that" in done.stderr
    assert "else they are lost: nobody listens" in done.stderr


def test_several_producers_share_one_deadline() -> None:
    began = time.monotonic()
    more = "others = [Producer(sys.argv[1], f'b{n}', exit_timeout=2.0) for n in range(8)]\n"
    more += "for other in others: other.send(np.zeros((4, 4), np.uint8))"
    done = script("tcp://127.0.0.1:1", 2.0, more)
    assert time.monotonic() - began < 14  # eight in a row would take 16
    assert done.stderr.count("closed with 1 samples unacknowledged") == 8


def test_a_forgotten_producer_warns_and_still_sends_its_samples() -> None:
    with Peer() as peer, peer.serving() as journal:
        producer = Producer(peer.address, name="robot-7")
        io = producer._io
        producer.send(image(), id="x")
        with pytest.warns(ResourceWarning, match="producer 'robot-7' was not closed"):
            del producer  # and with it the last reference
        until(lambda: io.closed)
        assert arrived(journal) == ["x"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_forgotten_producer_sends_and_ends_although_its_warning_is_an_error() -> None:
    with Peer() as peer, peer.serving() as journal, warnings.catch_warnings():
        warnings.simplefilter("error")
        producer = Producer(peer.address, name="robot-7")
        io = producer._io
        producer.send(image(), id="x")
        del producer
        until(lambda: io.closed)
        assert arrived(journal) == ["x"]


def test_a_closed_producer_does_not_warn() -> None:
    producer = Producer("tcp://127.0.0.1:1", name="a")
    producer.close()
    del producer
    gc.collect()
    with pytest.raises(ValueError, match="two words"):
        Producer("tcp://127.0.0.1:1", name="two words")
    gc.collect()


def test_stats_count_the_samples_that_close_gives_up() -> None:
    producer = Producer("tcp://127.0.0.1:1", name="a", packet_samples=2)
    for _ in range(5):
        producer.send(image())
    with pytest.raises(TimeoutError, match="5 of 5 samples are not acknowledged"):
        producer.close(timeout=0.05)
    assert producer.stats.dropped_by_reason["closed"].samples == 5
    assert (producer.stats.state, producer.stats.buffered.samples) == ("closed", 0)


def test_a_producer_runs_on_a_system_without_forks() -> None:
    """Python on Windows lacks these functions and modules."""
    program = """
import sys, os, signal
for name in ("fcntl", "termios", "pwd", "grp", "resource", "tty"):
    sys.modules[name] = None
import multiprocessing, subprocess, numpy, zmq
for name in ("fork", "register_at_fork", "getuid", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGALRM", "SIGPIPE", "pthread_sigmask"):
    delattr(signal, name)
from stream_ssl.producers import Producer
Producer("tcp://127.0.0.1:9", name="robot").close(0)
print("closed")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("closed\n", 0), done.stderr
