"""Kafka topics, from librdkafka's mock cluster over real TCP."""

import signal
import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace

import confluent_kafka
import pytest
from broker_files import image_files, on_disk, start_producing, wait_for
from confluent_kafka import KafkaError, TopicPartition
from receiver_peer import Running
from table import table
from waiting import until

from stream_ssl.producers.sources import Kafka
from stream_ssl.producers.sources.base import SourceError
from stream_ssl.producers.sources.kafka_member import READY, GroupMember


@contextmanager
def cluster():
    """Yield a mock cluster's publisher and its address. A topic has four partitions."""
    publisher = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "log_level": 2}
    )
    broker = next(iter(publisher.list_topics("frames", timeout=10).brokers.values()))
    yield publisher, f"{broker.host}:{broker.port}"
    publisher.flush(10)


def publish(publisher, payloads, partition=0, **fields):
    for payload in payloads:
        publisher.produce("frames", payload, partition=partition, **fields)
    assert publisher.flush(10) == 0


def committed(address, partitions=2):
    asking = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "robots"})
    with closing(asking):
        asked = [TopicPartition("frames", number) for number in range(partitions)]
        return [max(one.offset, 0) for one in asking.committed(asked, 10)]


def taken(source, position=None, count=None):
    stream = source.samples(position)
    return [next(stream) for _ in range(count)] if count else list(stream)


@pytest.fixture
def config(tmp_path):
    """A config file under which the group notices after six seconds that a member is gone."""
    path = tmp_path / "kafka.properties"
    path.write_text("# as ours\nsession.timeout.ms = 6000\nheartbeat.interval.ms = 200\n")
    return path


def source_of(address, config, **settings):
    return Kafka("frames", "robots", address, config, **{"idle_seconds": 0.5, **settings})


def test_a_message_without_an_image_is_counted_and_committed(config):
    images = image_files(4)
    with cluster() as (publisher, address):
        headers = [("id", b"seven"), ("time", b"1700000000.5"), ("label", b"3"), ("gain", b"2")]
        publish(publisher, images[:1], headers=headers, key=b"robot-1")
        publish(publisher, [b"", b"no image", images[1]])
        publish(publisher, images[1:2], headers=[("label", b"many"), ("time", b"yesterday")])
        publish(publisher, images[2:3], partition=1, timestamp=1_600_000_000_000)
        publish(publisher, images[3:], partition=1, timestamp=-1)  # Kafka's number for no time
        with closing(source_of(address, config)) as source:
            samples = taken(source)
            by_id = {sample.id: sample for sample, _ in samples}
            assert set(by_id) == {"seven", "frames-0-3", "frames-0-4", "frames-1-0", "frames-1-1"}
            first = by_id["seven"]
            assert (first.time, first.label, first.source) == (1700000000.5, 3, "kafka")
            assert first.meta == {"key": "robot-1", "gain": "2"}
            assert by_id["frames-1-0"].time == 1_600_000_000
            assert by_id["frames-1-1"].time > 1_600_000_000
            assert [by_id[name].data for name in ("frames-1-0", "frames-1-1")] == images[2:]
            assert source.skipped.by_reason == {"no image": 2, "bad label": 1, "bad time": 1}
            assert source.lag() == 0
            source.acknowledged(samples[-1][1])
        assert committed(address) == [5, 2]


def test_a_source_without_a_broker_ends_after_idle_seconds_with_a_short_log(config, caplog):
    why = r"no broker at 127\.0\.0\.1:1 answered within idle_seconds"
    with (
        closing(source_of("127.0.0.1:1", config, idle_seconds=2.0)) as source,
        pytest.raises(SourceError, match=why),
    ):
        list(source.samples())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) < 8
    assert len([line for line in lines if "FAIL" in line]) == 1


def test_the_refusal_of_an_idle_time_of_0_names_the_value_for_no_limit():
    with pytest.raises(ValueError, match="idle_seconds 0: must be above 0, or null for ever"):
        Kafka("frames", "robots", idle_seconds=0)


def test_a_config_file_that_is_readable_by_others_or_unsafe_is_refused(config):
    for text, why in (
        ("enable.auto.offset.store=true", "line 1: enable.auto.offset.store is set by"),
        ("# fine\nsecret", "line 2 is not KEY=VALUE"),
        ("sasl.password=hidden", "chmod 600"),
    ):
        config.write_text(text)
        config.chmod(0o644)
        with pytest.raises(ValueError, match=why) as refused:
            Kafka("frames", "robots", config=config)
        assert "hidden" not in str(refused.value)
    config.write_text("security.protocol=SASL_SSL\nno.such.setting=1")
    with pytest.raises(ValueError, match=r"no\.such\.setting"):
        Kafka("frames", "robots", config=config).samples()


@pytest.mark.servers  # the mock cluster's groups take seconds
def test_an_offset_is_committed_only_after_the_acknowledgement(config):
    images = image_files(10)
    with cluster() as (publisher, address):
        publish(publisher, [*images[:6], b"no image", *images[6:]])
        with closing(source_of(address, config)) as source:
            samples = taken(source, count=7)
            source.stop()
            source.acknowledged(samples[3][1])  # while the source waits for the last ones
        assert committed(address, 1) == [4]
        with closing(source_of(address, config)) as source:  # a producer without a position
            assert next(sample.id for sample, _ in taken(source)) == "frames-0-4"
        # The position is ahead of the group: a crash came between the two acknowledgements.
        with closing(source_of(address, config)) as source:
            again = taken(source, samples[6][1])
            assert [sample.data for sample, _ in again] == images[7:]
            assert again[0][0].id == "frames-0-8"
        assert committed(address, 1) == [8]


@pytest.mark.servers  # the mock cluster's groups take seconds
def test_a_slow_receiver_stops_neither_commits_nor_the_group_membership(config):
    """`samples` stands still meanwhile. The position also names a partition of another member."""
    images = image_files(3 * READY)
    with cluster() as (publisher, address):
        publish(publisher, images)
        with closing(source_of(address, config, idle_seconds=None)) as source:
            begin = {"at": [[0, 2], [3, 0], [77, 9]], "of": source._facts}
            stream = source.samples(begin)
            first, position = next(stream)
            assert (first.id, [77, 9] in position["at"]) == ("frames-0-2", True)
            until(lambda: source._ready.paused)
            source.acknowledged(position)
            until(lambda: committed(address) == [3, 0])
            assert len(source._ready) == READY
            assert [next(stream)[0].data for _ in images[3:]] == images[3:]
            until(lambda: source.lag() == 0)


@pytest.mark.servers  # the mock cluster's groups take seconds
def test_a_partition_changes_owner_only_after_its_messages_are_acknowledged(config, monkeypatch):
    """Another thread acknowledges while `samples` waits for a silent topic, as a client does."""
    image, events, came, acknowledging = image_files(1), [], [], threading.Event()

    def noting(method, begin, end):
        def noted(source, *arguments):
            events.append(f"{source.name} {begin}")
            method(source, *arguments)
            events.append(f"{source.name} {end}")

        monkeypatch.setattr(GroupMember, method.__name__, noted)

    def consume(source):
        for sample, position in source.samples():
            came.append((sample.id, position))
            if acknowledging.is_set():
                source.acknowledged(position)

    noting(GroupMember._revoke, "is asked", "lets go")
    noting(GroupMember._assign, "is given", "has partitions")
    with cluster() as (publisher, address):
        for partition in (0, 1):
            publish(publisher, image * 6, partition=partition)
        sources = [source_of(address, config, name=n, idle_seconds=None) for n in ("one", "two")]
        members = [threading.Thread(target=consume, args=(source,)) for source in sources]
        try:
            members[0].start()
            until(lambda: len(came) == 12)
            sources[0].acknowledged(came[-1][1])
            until(lambda: committed(address) == [6, 6])
            for partition in (0, 1):
                publish(publisher, image, partition=partition)
            until(lambda: len(came) == 14)
            members[1].start()
            until(lambda: "one is asked" in events)
            events.append("the receiver has all")
            sources[0].acknowledged(came[13][1])
            acknowledging.set()
            until(lambda: "two has partitions" in events and events.count("one has partitions") > 1)
            for partition in (0, 1):
                publish(publisher, image, partition=partition)
            until(lambda: {"frames-0-7", "frames-1-7"} <= {name for name, _ in came[14:]})
            until(lambda: committed(address) == [8, 8])
            one, two = (source._member.offsets.consumed.keys() for source in sources)
            assert not one & two
        finally:
            for source, member in zip(sources, members, strict=True):
                source.stop()
                if member.is_alive():
                    member.join()
                source.close()
        asked = events.index("one is asked")
        assert events[asked : asked + 3] == ["one is asked", "the receiver has all", "one lets go"]
        # The mock cluster, unlike a real one, commits nothing while a group changes: 6 may return.
        again = {f"frames-{partition}-{at}" for partition in (0, 1) for at in (6, 7)}
        assert {name for name, _ in came[14:]} <= again


@pytest.mark.servers  # the mock cluster's groups take seconds
def test_positions_of_a_recreated_topic_or_another_source_are_refused(config):
    with cluster() as (publisher, address):
        publish(publisher, image_files(3))
        with closing(source_of(address, config)) as source:
            position = taken(source, count=3)[-1][1]
        ahead = {**position, "at": [[0, 17]]}
        with (
            closing(source_of(address, config)) as source,
            pytest.raises(SourceError, match="deleted and created again"),
        ):
            taken(source, ahead)
        other = source_of(address, config, name="other")
        with closing(other), pytest.raises(ValueError, match="was 'kafka' and is 'other'"):
            other.samples(position)


@pytest.mark.servers  # the mock cluster's groups take seconds
def test_a_killed_produce_command_of_kafka_loses_and_repeats_no_message(tmp_path, config):
    images = image_files(400)
    with cluster() as (publisher, address), Running(tmp_path) as running:
        for number in range(0, 400, 40):
            publish(publisher, images[number : number + 40], partition=number // 40 % 2)
        arguments = (
            *("kafka", "--source.topic", "frames", "--source.group", "robots"),
            *("--source.servers", address, "--source.idle_seconds", "0.5", "--shape.rate", "400"),
            *("--source.config", str(config)),
        )
        first = start_producing(running, *arguments)
        wait_for(running, 60, first)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        assert sum(committed(address)) <= len(on_disk(running)) < 400
        second = start_producing(running, *arguments)
        _, said = second.communicate(timeout=60)
        assert second.returncode == 0, said
        assert "0 waiting at the broker" in said
        assert sorted(bytes(sample.data) for sample in on_disk(running)) == sorted(images)
        assert committed(address) == [200, 200]


def test_messages_that_retention_deleted_are_counted_and_a_fatal_error_ends_the_source(
    config, caplog
):
    with closing(source_of("127.0.0.1:1", config)) as source:
        ends = SimpleNamespace(get_watermark_offsets=lambda *_: (5, 9))
        source._member.offsets.consumed = {0: 2}
        source._member._place(ends, TopicPartition("frames", 0, 1))
        assert source.skipped.by_reason == {"deleted by retention": 3}
        assert source._member.offsets.consumed == source._member.offsets.safe == {0: 5}
        stream = source.samples()
        source._member._failed(
            KafkaError(KafkaError._TRANSPORT)
        )  # librdkafka recovers from this error
        assert source._ready.error is None
        source._member._failed(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
        with pytest.raises(SourceError, match="TOPIC_AUTHORIZATION_FAILED"):
            next(stream)
    assert "has deleted 3 messages of partition 0" in caplog.text


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_messages_that_retention_deletes_before_a_slow_consumer_are_counted(config, caplog, start):
    """The mock cluster keeps five megabytes of a partition."""
    config.write_text(config.read_text() + "queued.max.messages.kbytes = 1\n")
    small, large = image_files(READY + 20), [image + bytes(100_000) for image in image_files(150)]
    with (
        cluster() as (publisher, address),
        closing(source_of(address, config, start=start, idle_seconds=6.0)) as source,
    ):
        stream = source.samples()
        assert until(lambda: source._member.offsets.safe)
        publish(publisher, small)
        samples = [next(stream)]
        assert until(lambda: source._ready.paused)  # the sender is slow
        publish(publisher, large)
        samples += stream
    offsets = [int(sample.id.rpartition("-")[2]) for sample, _ in samples]
    lost = source.skipped.by_reason["deleted by retention"]
    assert offsets == sorted(set(offsets))
    assert offsets[-1] == len(small) + len(large) - 1
    assert lost > 50
    assert len(offsets) + lost == len(small) + len(large)
    assert f"has deleted {lost} messages of partition 0" in caplog.text


@table("method", ["committed", "get_watermark_offsets"])
def test_a_failed_query_of_the_broker_during_an_assignment_is_repeated(config, monkeypatch, method):
    plain, failures = getattr(confluent_kafka.Consumer, method), []

    class Consumer(confluent_kafka.Consumer):
        pass

    def failing(self, *arguments, **more):
        if not failures:
            failures.append(KafkaError(KafkaError._TIMED_OUT))
            raise confluent_kafka.KafkaException(failures[0])
        return plain(self, *arguments, **more)

    setattr(Consumer, method, failing)
    with cluster() as (publisher, address):
        publish(publisher, image_files(3))
        monkeypatch.setattr(confluent_kafka, "Consumer", Consumer)
        with closing(source_of(address, config, idle_seconds=5.0)) as source:
            assert len(taken(source, count=3)) == 3
    assert failures


@pytest.mark.parametrize("static", [False, True])
def test_only_a_member_without_a_static_id_leaves_the_group(config, static):
    """`unsubscribe` makes the member leave the group; see group.instance.id."""
    if static:
        config.write_text(config.read_text() + "group.instance.id = arm-1\n")
    source, asked, held = source_of("127.0.0.1:1", config), [], [1, 1]
    consumer = SimpleNamespace(
        unsubscribe=lambda: asked.append("unsubscribe"),
        poll=lambda _: held.pop(),
        assignment=lambda: held,
    )
    source._member._leave(consumer)
    assert asked == ([] if static else ["unsubscribe"])
    assert held == ([1, 1] if static else []), "it polls until nothing is assigned"
