"""A JetStream stream, from a real nats-server; `make servers` runs this where it is installed."""

import asyncio
import json
import logging
import signal
import socket
import ssl
import subprocess
import time
from contextlib import closing, contextmanager

import nats
import pytest
import trustme
from broker_files import image_files, on_disk, start_producing, wait_for
from nats.js.api import ConsumerConfig
from receiver_peer import Running
from waiting import until

from stream_ssl.producers.sources import Nats
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.nats import READY

pytestmark = pytest.mark.servers


class Server:
    """nats-server on loopback, with TLS and a password."""

    def __init__(self, folder):
        self.folder = folder
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        certificate.private_key_pem.write_to_path(folder / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
        self.credentials = folder / "nats.json"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.set_password("hidden")
        self.enter_password()
        self.start()

    def set_password(self, password):
        """Give the server another password, from its next start on."""
        self.password, folder = password, self.folder
        (folder / "nats.conf").write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{folder}/store" }}\n'
            f'tls {{ cert_file: "{folder}/cert.pem", key_file: "{folder}/key.pem" }}\n'
            f'authorization {{ user: "robot", password: "{password}" }}\n'
        )

    def enter_password(self):
        self.credentials.write_text(json.dumps({"user": "robot", "password": self.password}))
        self.credentials.chmod(0o600)

    def start(self):
        command = ["nats-server", "-c", str(self.folder / "nats.conf")]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def kill(self):
        self.process.kill()
        self.process.wait()

    @property
    def url(self):
        return f"tls://127.0.0.1:{self.port}"

    def source(self, **settings):
        own = {"idle_seconds": 1.5, "ack_wait": 2.0, **settings}
        secure = {"tls_ca": self.ca, "credentials": self.credentials}
        return Nats("FRAMES", "ssl", self.url, **secure, **own)

    def ask(self, what):
        """Return the result of a coroutine of a JetStream context."""

        async def asked():
            tls = ssl.create_default_context(cafile=self.ca)
            client = await nats.connect(self.url, tls=tls, user="robot", password=self.password)
            try:
                return await what(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(asked())

    def publish(self, payloads, subject="frames.a", headers=None):
        async def published(js):
            for payload in payloads:
                await js.publish(subject, payload, headers=headers)

        self.ask(published)

    def consumer(self):
        """Return the server's state of our consumer: delivered, acknowledged, pending."""
        return self.ask(lambda js: js.consumer_info("FRAMES", "ssl"))


@contextmanager
def server(folder):
    running = Server(folder)
    try:
        running.ask(lambda js: js.add_stream(name="FRAMES", subjects=["frames.*"]))
        yield running
    finally:
        running.kill()


def settled(running):
    """Wait until the server has all acknowledgements."""
    until(lambda: not ((info := running.consumer()).num_ack_pending or info.num_pending))


def test_a_message_without_an_image_is_terminated(tmp_path):
    images = image_files(4)
    with server(tmp_path) as running:
        headers = {"id": "seven", "time": "1700000000.5", "label": "3", "gain": "2"}
        running.publish(images[:1], headers=headers)
        running.publish([b"", b"no image", images[1]])
        running.publish(images[2:3], headers={"label": "many", "time": "yesterday"})
        running.publish(images[3:], subject="frames.b", headers={"Nats-Msg-Id": "once"})
        with closing(running.source()) as source:
            samples = list(source.samples())
            ids = [sample.id for sample, _ in samples]
            assert ids == ["seven", "FRAMES-4", "FRAMES-5", "once"]
            first = samples[0][0]
            assert (first.time, first.label, first.source) == (1700000000.5, 3, "nats")
            assert first.meta == {"subject": "frames.a", "gain": "2"}
            assert [sample.data for sample, _ in samples] == images
            assert source.skipped.by_reason == {"no image": 2, "bad label": 1, "bad time": 1}
            assert source.lag() == 0
            assert running.consumer().num_ack_pending == 4  # and two were terminated
            source.acknowledged(samples[1][1])
            until(lambda: running.consumer().num_ack_pending <= 2)
            assert running.consumer().delivered.consumer_seq == 6  # each once
        # The source returned the unacknowledged messages, so they come again at once.
        with closing(running.source()) as source:
            again = list(source.samples(samples[1][1]))
            assert [sample.id for sample, _ in again] == ["FRAMES-5", "once"]
        other = running.source(name="other")
        with closing(other), pytest.raises(ValueError, match="was 'nats' and is 'other'"):
            other.samples(samples[0][1])
        running.ask(lambda js: js.delete_stream("FRAMES"))
        running.ask(lambda js: js.add_stream(name="FRAMES", subjects=["frames.*"]))
        with closing(running.source()) as source, pytest.raises(ValueError, match="created was"):
            source.samples(samples[0][1])


def test_the_source_keeps_unacknowledged_messages_and_survives_a_server_restart(tmp_path):
    images = image_files(30)
    with server(tmp_path) as running:
        running.publish(images[:20])
        with closing(running.source(idle_seconds=15)) as source:
            stream = source.samples()
            sent = [next(stream) for _ in range(20)]
            time.sleep(3)  # beyond ack_wait
            assert running.consumer().num_redelivered == 0
            running.kill()
            source.acknowledged(sent[9][1])
            running.start()
            running.publish(images[20:])
            sent += [next(stream) for _ in range(10)]
            assert [sample.data for sample, _ in sent] == images
            source.acknowledged(sent[-1][1])
            settled(running)


def test_a_password_that_is_changed_is_read_from_its_file_again(tmp_path, caplog):
    images = image_files(2)
    with server(tmp_path) as running:
        running.publish(images[:1])
        with closing(running.source(idle_seconds=60)) as source:
            stream = source.samples()
            assert next(stream)[0].data == images[0]
            running.kill()
            running.set_password("renewed")
            running.start()
            until(lambda: "Authorization Violation" in caplog.text)
            running.enter_password()
            running.publish(images[1:])
            assert next(stream)[0].data == images[1]


def test_a_pause_beyond_ack_wait_repeats_no_message_and_close_returns_waiting_ones(tmp_path):
    images = image_files(READY + 100)
    with server(tmp_path) as running:
        running.publish(images[:20])
        source = running.source(ack_wait=1.0)
        stream = source.samples()
        sent = [next(stream)]
        source._loop.call_soon_threadsafe(time.sleep, 2.5)  # like a process that was stopped
        sent += [next(stream) for _ in range(19)]
        until(lambda: source._last_delivery > 20)
        assert not source._ready
        running.publish(images[20:])
        source.acknowledged(sent[-1][1])
        until(lambda: len(source._ready) >= READY)
        source.close()
        # The task ended by itself, although nobody made room.
        assert not source._pulling.cancelled()
        with closing(running.source()) as source:
            stream = source.samples(sent[-1][1])
            sent += [next(stream) for _ in images[20:]]
            assert [sample.data for sample, _ in sent] == images
            source.acknowledged(sent[-1][1])
            settled(running)


def test_a_message_that_is_lost_on_the_way_is_delivered_again_in_order(tmp_path):
    images, lost = image_files(6), []
    with server(tmp_path) as running, closing(running.source(ack_wait=1.0)) as source:
        arrived = source._arrived

        async def losing(message):
            if message.metadata.sequence.stream == 3 and not lost:
                lost.append(message)
            else:
                await arrived(message)

        source._arrived = losing
        running.publish(images)
        stream = source.samples()
        assert [next(stream)[0].data for _ in images] == images
        assert lost


def test_a_consumer_that_would_lose_messages_is_refused(tmp_path):
    with server(tmp_path) as running:
        for settings, why in (
            ({"ack_policy": "none"}, "explicit acknowledgement"),
            ({"ack_policy": "explicit", "max_deliver": 3}, "up after 3 deliveries"),
            ({"ack_policy": "explicit", "headers_only": True}, "delivers no images"),
        ):
            made = ConsumerConfig(durable_name="ssl", **settings)
            running.ask(lambda js, made=made: js.add_consumer("FRAMES", made))
            with closing(running.source()) as source, pytest.raises(SourceError, match=why):
                source.samples()
            running.ask(lambda js: js.delete_consumer("FRAMES", "ssl"))


def test_a_second_client_of_one_consumer_gets_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("stream_ssl.producers.sources.nats.MISSING_SECONDS", 0.0)
    with server(tmp_path) as running:
        running.publish(image_files(3))
        first, second = running.source(ack_wait=0.5), running.source()
        with closing(first), closing(second):
            next(first.samples())
            stream = second.samples()
            with pytest.raises(SourceError, match="another client takes from consumer"):
                next(stream)


def test_a_killed_produce_command_of_nats_loses_and_repeats_no_message(tmp_path):
    images = image_files(400)
    with server(tmp_path) as running, Running(tmp_path) as receiver:
        running.publish([*images[:200], b"no image", *images[200:]])
        arguments = (
            *("nats", "--source.stream", "FRAMES", "--source.durable", "ssl"),
            *("--source.servers", running.url, "--source.tls_ca", str(running.ca)),
            *("--source.credentials", str(running.credentials)),
            *("--source.ack_wait", "2", "--source.idle_seconds", "4", "--shape.rate", "300"),
        )
        first = start_producing(receiver, *arguments)
        wait_for(receiver, 100, first)
        first.send_signal(signal.SIGKILL)
        _, said = first.communicate()
        assert running.consumer().num_ack_pending > 0
        assert len(on_disk(receiver)) < 400
        second = start_producing(receiver, *arguments)
        _, more = second.communicate(timeout=60)
        assert second.returncode == 0, more
        assert "0 waiting at the broker" in more
        assert "hidden" not in said + more
        assert [bytes(sample.data) for sample in on_disk(receiver)] == images
        settled(running)


def test_the_error_says_why_a_nats_server_cannot_be_used(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with server(tmp_path) as running:
        running.credentials.write_text(json.dumps({"user": "robot", "password": "wrong-one"}))
        running.credentials.chmod(0o600)
        with closing(running.source()) as source, pytest.raises(SourceError, match=r"(?i)authoriz"):
            source.samples()
        strange = Nats("FRAMES", "ssl", running.url)
        with closing(strange), pytest.raises(SourceError, match="certificate"):
            strange.samples()
        running.credentials.chmod(0o644)
        with pytest.raises(ValueError, match="chmod 600"):
            running.source()
        with pytest.raises(ValueError, match="credentials"):
            Nats("FRAMES", "ssl", "nats://robot:wrong-one@127.0.0.1")
    assert "wrong-one" not in caplog.text
