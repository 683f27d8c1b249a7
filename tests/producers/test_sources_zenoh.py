"""Live robots over Zenoh: a router and nodes like those of rmw_zenoh and the bridge."""

import json
import socket
import time
from types import SimpleNamespace

import pytest
import trustme
import zenoh
from going_on import check_stop_ends
from robot_files import BEGAN, COMPRESSED, IMAGE, ROS2, SECOND, TEXT
from ros_reading import cdr, jpeg, raw, reading, wait_for
from source_files import encoded
from table import table
from video_files import number_of, numbered

from stream_ssl.producers.sources import ZenohRos
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.zenoh_ros import Subscriptions, publisher_of


def opened(mode, **settings):
    """Return a session of Zenoh. Settings have __ for each slash of a name."""
    config = zenoh.Config()
    config.insert_json5("mode", json.dumps(mode))
    config.insert_json5("scouting/multicast/enabled", "false")
    for name, value in settings.items():
        config.insert_json5(name.replace("__", "/"), json.dumps(value))
    return zenoh.open(config)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


class Robot:
    """A router with nodes, which announce their topics as rmw_zenoh or the bridge does."""

    def __init__(self, bridged=False, port=None, kind="tcp", **settings):
        self.endpoint = f"{kind}/127.0.0.1:{port or free_port()}"
        self._bridged = bridged
        self.router = opened("router", listen__endpoints=[self.endpoint], **settings)
        self._tokens = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.router.close()

    def announce(self, token):
        self._tokens.append(self.router.liveliness().declare_token(token))

    def topic(self, name, kind=IMAGE):
        """Return a function that publishes messages on a topic."""
        if self._bridged:
            signs = name.strip("/").replace("/", "§"), kind.replace("/", "§")
            self.announce(f"@/0123/@ros2_lv/MP/{signs[0]}/{signs[1]}/:::")
            key = name.strip("/")
        else:
            type_ = kind.replace("/msg/", "::msg::dds_::") + "_"
            mangled = name.replace("/", "%")
            at = f"{mangled}/{type_}/RIHS01_00ff"
            self.announce(f"@ros2_lv/7/ab12/0/{len(self._tokens)}/MP/%/%/camera/{at}/::,10:,:,:,,")
            key = f"7{name}/{type_}/RIHS01_00ff"
        return lambda data: self.router.put(key, data)

    def source(self, **settings):
        quick = {"retry_seconds": 0.05, "codec": "raw", "timeout": 20.0}
        return ZenohRos(self.endpoint, **(quick | settings))


@table("bridged", [False, True])
def test_images_over_zenoh_keep_their_stamps_topics_and_frames(bridged):
    with Robot(bridged) as robot:
        plain = robot.topic("/front/camera/raw")
        packed = robot.topic("/front/camera/jpeg", COMPRESSED)
        words = robot.topic("/chatter", TEXT)

        def publish():
            words(cdr(ROS2.types[TEXT]("hello"), TEXT))
            plain(raw(3, BEGAN + SECOND // 2))
            packed(jpeg(5, stamp=0))

        source = robot.source()
        with reading(source) as (samples, _):
            wait_for(lambda: len({sample.codec for sample in samples}) == 2, publish)
    by_codec = {sample.codec: sample for sample in samples}
    plain, packed = by_codec["raw"], by_codec["jpeg"]
    assert number_of(plain) == 3
    assert plain.time == pytest.approx(BEGAN / SECOND + 0.5)
    assert plain.meta == {"topic": "/front/camera/raw", "frame_id": "front"}
    assert bytes(packed.data) == encoded(numbered(5), "JPEG")  # unchanged
    assert packed.time == pytest.approx(time.time(), abs=60)  # without a stamp
    assert packed.id.startswith("/front/camera/jpeg@")
    assert len({sample.id for sample in samples}) == len(samples)
    assert {sample.source for sample in samples} == {"zenoh"}
    assert set(source.skipped.by_reason) <= {"late"}


def test_topics_are_chosen_by_name_or_type_and_others_are_named(caplog):
    with Robot() as robot:
        wanted, other = robot.topic("/left/raw"), robot.topic("/right/jpeg", COMPRESSED)

        def publish():
            wanted(raw(1))
            other(jpeg(2))

        for topics, expected in ((["/left/raw"], "/left/raw"), ([COMPRESSED], "/right/jpeg")):
            with reading(robot.source(topics=topics)) as (samples, _):
                wait_for(lambda samples=samples: len(samples) > 5, publish)
            assert {sample.meta["topic"] for sample in samples} == {expected}
        with reading(robot.source(topics=["/rear"], timeout=1.0)):
            wait_for(lambda: "no frames yet" in caplog.text)
        said = "advertises none of the wanted topics; it has only "
        assert said in caplog.text
        assert "/left/raw (sensor_msgs/msg/Image)" in caplog.text.rpartition(said)[2]
        hopeful = robot.source(topics=["/left/raw"], give_up_seconds=0.5)
        with pytest.raises(SourceError, match="nothing is published on /left/raw"):
            next(hopeful.samples())


def test_a_node_that_starts_later_and_a_robot_that_restarts_are_read():
    with Robot() as robot:
        source = robot.source()
        with reading(source) as (samples, _):
            time.sleep(0.3)
            late = robot.topic("/camera")
            wait_for(lambda: samples, lambda: late(raw(1)))
            robot.router.close()
            port = int(robot.endpoint.rpartition(":")[2])
            with Robot(port=port) as again:
                topic = again.topic("/camera")
                wait_for(lambda: number_of(samples[-1]) == 2, lambda: topic(raw(2)))
    assert {number_of(sample) for sample in samples} == {1, 2}
    assert len({sample.id for sample in samples}) == len(samples)


def test_the_source_gives_up_an_absent_robot_after_give_up_seconds():
    port = free_port()
    source = ZenohRos(f"tcp/127.0.0.1:{port}", give_up_seconds=0.2, retry_seconds=0.05)
    with pytest.raises(SourceError, match=rf"no frame for \d+ s: .*tcp/127.0.0.1:{port}") as caught:
        next(source.samples())
    assert " at /" not in str(caught.value)


def test_stop_ends_a_source_whose_robot_is_silent():
    with Robot() as robot:
        check_stop_ends(robot.source())


def test_unreadable_messages_and_tokens_are_counted_and_cost_no_image():
    with Robot() as robot:
        good, bad = robot.topic("/good"), robot.topic("/bad")
        for token in (
            "@ros2_lv/7/x",
            "@ros2_lv/7/ab/0/1/MP/%/%/n/%/EMPTY/EMPTY/q",
            "@/1/@ros2_lv/MP/x",
        ):
            robot.announce(token)
        robot.announce("@/1/@ros2_lv/MP/a§§b/sensor_msgs§msg§Image/q")  # no key

        def publish():
            for broken in (b"", b"\0\1\0\0", bytes(300), raw(9)[:60], b"\xff" * 1000):
                bad(broken)
            good(raw(4))

        source = robot.source(waiting=100)
        with reading(source) as (samples, _):
            wait_for(lambda: len(samples) > 5, publish)
    assert {number_of(sample) for sample in samples} == {4}
    assert {sample.meta["topic"] for sample in samples} == {"/good"}
    counted = source.skipped.by_reason
    assert counted["undecodable"] + counted["no image"] >= 5
    assert counted["unreadable"] == 1


def test_topics_beyond_the_limit_are_counted_and_not_read(monkeypatch):
    monkeypatch.setattr("stream_ssl.producers.sources.live_robot.MAX_TOPICS", 3)
    with Robot() as robot:
        topics = [robot.topic(f"/camera_{number}") for number in range(5)]
        source = robot.source(waiting=100)
        with reading(source) as (samples, _):
            wait_for(
                lambda: len({sample.meta["topic"] for sample in samples}) == 3,
                lambda: [topic(raw(1)) for topic in topics],
            )
    assert source.skipped.by_reason["channels"] == 2


def test_the_bytes_of_waiting_messages_are_bounded(monkeypatch):
    monkeypatch.setattr("stream_ssl.producers.sources.zenoh_ros.WAITING_BYTES", 3 * len(raw(0)))
    with Robot() as robot:
        skipped = robot.source()._images
        waiting = Subscriptions(robot.router, skipped, "here")
        topic = robot.topic("/camera")
        wait_for(lambda: waiting.topics, waiting.follow)
        wait_for(lambda: skipped.skipped.by_reason["late"] >= 5, lambda: topic(raw(1)))
        taken = [waiting.take() for _ in range(4)]
    assert [None if one is None else one[1] for one in taken] == [*[len(raw(0))] * 3, None]


def test_endless_announcements_of_a_topic_do_not_block_the_source():
    asked = []

    def announce(*names):
        asked.append(names)
        assert len(asked) < 100  # each look at the topic announces the topic again
        waiting._announced(token)

    token = SimpleNamespace(key_expr=f"@/1/@ros2_lv/MP/t/{IMAGE.replace('/', '§')}/q")
    images = SimpleNamespace(unwanted={}, wanted=announce)
    live = SimpleNamespace(declare_subscriber=lambda *_, history: None)
    waiting = Subscriptions(SimpleNamespace(liveliness=lambda: live), images, "here")
    waiting._announced(token)
    waiting.follow()
    assert len(asked) == 1


def test_a_message_that_is_too_large_does_not_end_the_source(monkeypatch):
    monkeypatch.setattr("stream_ssl.producers.sources.zenoh_ros.MAX_MESSAGE", 2**20)
    with Robot() as robot:
        topic, large = robot.topic("/camera"), robot.topic("/large")
        source = robot.source()
        with reading(source) as (samples, _):
            wait_for(lambda: samples, lambda: topic(raw(1)))
            large(bytes(3 * 2**20))
            had = len(samples)
            wait_for(lambda: len(samples) > had + 5, lambda: topic(raw(1)))
    assert {sample.meta["topic"] for sample in samples} == {"/camera"}


def test_the_source_uses_the_tls_files_of_its_zenoh_config(tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "chain.pem")
    config = tmp_path / "zenoh.json5"
    tls = {"root_ca_certificate": str(tmp_path / "ca.pem")}
    config.write_text(json.dumps({"transport": {"link": {"tls": tls}}}))
    files = {
        "transport__link__tls__listen_private_key": str(tmp_path / "key.pem"),
        "transport__link__tls__listen_certificate": str(tmp_path / "chain.pem"),
    }
    with Robot(kind="tls", **files) as robot:
        robot.endpoint = robot.endpoint.replace("127.0.0.1", "localhost")
        topic = robot.topic("/camera")
        with reading(robot.source(config=config)) as (samples, _):
            wait_for(lambda: samples, lambda: topic(raw(9)))
        stranger = robot.source(give_up_seconds=0.2)
        with pytest.raises(SourceError, match="no frame"):
            next(stranger.samples())
    assert number_of(samples[0]) == 9


def test_only_tokens_of_publishers_announce_a_topic():
    at = "%a%b/sensor_msgs::msg::dds_::Image_/RIHS01_0/::"
    assert publisher_of(f"@ros2_lv/3/s/0/1/MP/%/%/n/{at}") == (
        "/a/b",
        "sensor_msgs/msg/Image",
        "3/a/b/sensor_msgs::msg::dds_::Image_/*",
    )
    for token in (f"@ros2_lv/3/s/0/1/MS/%/%/n/{at}", "@ros2_lv/3/s/0/1/NN/%/%/n", "a/b", "", "@/1"):
        assert publisher_of(token) is None


@table(
    ("settings", "message"),
    [
        ({"endpoint": "robot:7447"}, "endpoint 'robot:7447': must be tcp/HOST:PORT"),
        ({"endpoint": "tcp/robot"}, "must be tcp/HOST:PORT"),
        ({"endpoint": "tcp/a:secret@robot:1"}, "passwords belong into the file `config`"),
        ({"timeout": 0}, "timeout 0: must be above 0"),
        ({"timeout": float("inf")}, r"timeout inf: must lie in \[0, 86400\]"),
        ({"retry_seconds": float("inf")}, r"retry_seconds inf: must lie in \[0, 86400\]"),
        ({"waiting": 0}, "waiting 0"),
        ({"quality": 101}, "quality 101"),
        ({"config": "/none.json5"}, r"config /none.json5: "),
    ],
)
def test_wrong_arguments_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ZenohRos(**({"endpoint": "tcp/127.0.0.1:7447"} | settings))
