"""A camera over RTSP, from GStreamer's server; `make servers` runs this where it is installed."""

import itertools
import logging
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from stream_ssl.producers.sources import Camera
from stream_ssl.producers.sources.base import SourceError

pytestmark = pytest.mark.servers
SERVER = Path(__file__).with_name("rtsp_server.py")


@contextmanager
def rtsp_server(port="0"):
    """Yield the process and its port."""
    process = subprocess.Popen(
        ["/usr/bin/python3", str(SERVER), port], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_frames_arrive_at_the_rate_of_the_camera(transport):
    with rtsp_server() as (_, port):
        url = f"rtsp://robot:secret@127.0.0.1:{port}/camera"
        stream = Camera(url, rtsp_transport=transport).samples()
        samples = [next(stream)[0] for _ in range(50)]
        assert abs(samples[-1].time - time.time()) < 2
        steps = [b.time - a.time for a, b in itertools.pairwise(samples)]
        assert sum(steps) / len(steps) == pytest.approx(1 / 25, rel=0.1)
        assert len({sample.id for sample in samples}) == 50
        assert {sample.codec for sample in samples} == {"jpeg"}


def test_fps_and_key_frames_thin_a_live_stream():
    with rtsp_server() as (_, port):
        url = f"rtsp://robot:secret@127.0.0.1:{port}/camera"
        for settings, apart in (({"fps": 5}, 0.2), ({"key_frames": True}, 1.0)):
            source = Camera(url, **settings)
            stream = source.samples()
            times = [next(stream)[0].time for _ in range(6)]
            source.stop()
            # Frames before the stream's clock is known get their times from this machine.
            between = median(after - before for before, after in pairwise(times))
            assert between == pytest.approx(apart, rel=0.15)


def test_the_source_reconnects_to_a_rebooted_camera(caplog):
    caplog.set_level(logging.INFO)
    with rtsp_server() as (first, port):
        url = f"rtsp://robot:secret@127.0.0.1:{port}/camera"
        source = Camera(url, timeout=2, retry_seconds=0.5)
        stream = source.samples()
        before, _ = next(stream)
        first.kill()
        first.wait()
        with rtsp_server(port):
            deadline = time.monotonic() + 60
            while next(stream)[0].id.partition("-")[0] == before.id.partition("-")[0]:
                assert time.monotonic() < deadline
        source.stop()
    assert "trying again in" in caplog.text
    assert "secret" not in caplog.text


def test_the_error_names_a_wrong_password():
    with rtsp_server() as (_, port):
        url = f"rtsp://robot:wrong@127.0.0.1:{port}/camera"
        with pytest.raises(SourceError, match="401 Unauthorized"):
            next(Camera(url, give_up_seconds=0.1).samples())


def test_the_first_sigterm_ends_a_live_stream(tmp_path):
    from stream_ssl.journal.consumer_offsets import ConsumerOffsets
    from stream_ssl.journal.journal import Journal
    from stream_ssl.receiver.receiver import Receiver

    stop = threading.Event()
    journal = Journal(tmp_path / "journal", budget=64 << 20)
    receiver = Receiver(journal, ConsumerOffsets(tmp_path))
    with rtsp_server() as (_, port):
        thread = threading.Thread(target=lambda: [None for _ in receiver.run(stop)])
        thread.start()
        try:
            url = f"rtsp://robot:secret@127.0.0.1:{port}/camera"
            command = ["produce", "camera", "--to", receiver.endpoint, "--name", "robot"]
            command += ["--source.url", url]
            producer = subprocess.Popen(
                [sys.executable, "-m", "stream_ssl.app.cli", *command],
                stderr=subprocess.PIPE,
                text=True,
            )
            deadline = time.monotonic() + 60
            while journal.last < 3:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            began = time.monotonic()
            producer.send_signal(signal.SIGTERM)
            _, said = producer.communicate(timeout=30)
            assert producer.returncode == 0, said
            assert time.monotonic() - began < 5
            assert "on the receiver's disk" in said
            assert "Traceback" not in said
        finally:
            stop.set()
            thread.join()
            journal.close()
