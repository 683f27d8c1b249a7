"""The metrics that records of the receiver and the learner cause."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import torch
from observe_records import admission, step
from prometheus_client import CollectorRegistry

from stream_ssl.batch import Offset, Origin
from stream_ssl.feed import decode
from stream_ssl.learning import records
from stream_ssl.learning.checkpoint import CheckpointRecord
from stream_ssl.learning.divergence import ROW, Divergence
from stream_ssl.learning.records import NOT_FINITE, DroppedSample, Idle
from stream_ssl.memory import MemoryStats
from stream_ssl.memory.process_group import RankGroup
from stream_ssl.memory.shares import Holding
from stream_ssl.observe import catalogue
from stream_ssl.observe.balance import Balance
from stream_ssl.observe.families import LIMIT, settings
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.receiver.records import ReceiverRecord
from stream_ssl.version import version


def saved(step: int, created: float) -> CheckpointRecord:
    return CheckpointRecord(
        step=step,
        created=created,
        seconds=0.4,
        stalled=0.02,
        bytes=5000,
        path=Path("step-7"),
        offset=Offset(9, 0),
        needed=Offset(3, 0),
    )


def receiver() -> ReceiverMetrics:
    return ReceiverMetrics(CollectorRegistry())


def learner() -> LearnerMetrics:
    return LearnerMetrics(CollectorRegistry(), ("working", "queue"), classes=3)


def value(metrics: ReceiverMetrics | LearnerMetrics, name: str, /, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"stream_ssl_{name}", labels)


def test_counters_of_the_receiver_add_up_and_gauges_show_the_last_record() -> None:
    metrics = receiver()
    first = ReceiverRecord(
        packets=2,
        samples=128,
        bytes=4096,
        duplicates=3,
        rejected={"codec": 5},
        refused={"denied": 1},
        missing=1,
        acked_samples=128,
        fsync_seconds=0.004,
        journal_failures=1,
        allow_list_errors=2,
        journal_damaged=2,
        producers=3,
        journal_bytes=10_000,
        journal_first=4,
        journal_last=9,
        credit=77,
        room=90_000,
        lag_bytes=500,
        captured=12.0,
        received=13.0,
    )
    metrics.consume(first)
    metrics.consume(ReceiverRecord(packets=1, samples=2, journal_damaged=2, producers=1))
    expected = {
        "received_packets_total": 3,
        "received_samples_total": 130,
        "received_bytes_total": 4096,
        "acked_samples_total": 128,
        "duplicate_samples_total": 3,
        "missing_packets_total": 1,
        "journal_failures_total": 1,
        "allow_list_errors_total": 2,
        "journal_damaged_segments_total": 2,
        "journal_fsync_seconds_count": 1,
        "producers_connected": 1,
        "journal_bytes": 0,
        "journal_first_record": 1,
        "journal_last_record": 0,
        "lag_bytes": 0,
        "credit_bytes": 0,
        "journal_room_bytes": 0,
        "last_captured_timestamp_seconds": 12,
        "last_received_timestamp_seconds": 13,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    assert value(metrics, "rejected_samples_total", reason="codec") == 5
    assert value(metrics, "refused_connections_total", reason="denied") == 1


def test_every_reason_starts_at_zero() -> None:
    metrics = receiver()
    assert value(metrics, "rejected_samples_total", reason="malformed") == 0
    assert value(metrics, "rejected_samples_total", reason="other") == 0
    assert value(metrics, "refused_connections_total", reason="unauthorised") == 0
    assert value(learner(), "quarantined_samples_total", reason="pixels", producer="other") == 0
    assert value(learner(), "step_seconds_count", phase="backward") == 0
    assert value(learner(), "memory_evictions_total", memory="queue") == 0


def test_the_catalogue_has_the_same_reasons_as_the_code() -> None:
    assert tuple(decode.REASONS) == catalogue.BAD_SAMPLES
    for reason in catalogue.SKIPS:
        assert f'"{reason}"' in (records.StepRecord.__doc__ or "")


def test_a_step_updates_the_metrics_of_the_learner() -> None:
    metrics = learner()
    metrics.consume(
        step(
            loss=1.5,
            diagnostics={"clamp_rate": 0.25},
            collision_true=0.125,
            admission=admission(4, 3, 1),
            lag_seconds=9.0,
            rejected={"damaged": 2},
            relative_change=0.003,
        )
    )
    metrics.consume(step(loss=1.25, batch=4))
    expected = {
        "steps_total": 2,
        "trained_samples_total": 8,
        "replayed_samples_total": 0,
        "loss": 1.25,
        "gradient_norm": 0.5,
        "relative_weight_change": 0.003,
        "learning_rate": 0.01,
        "lag_seconds": 0.0,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    assert value(metrics, "step_seconds_sum", phase="forward") == pytest.approx(0.4)
    assert value(metrics, "loss_diagnostic", name="clamp_rate") == 0.25
    assert value(metrics, "collision_similarity") == 0.5
    assert value(metrics, "collision_probability", kind="true") == 0.125
    assert value(metrics, "memory_inserted_total", memory="working") == 8
    assert value(metrics, "memory_evictions_total", memory="working") == 3
    assert value(metrics, "memory_refused_total", memory="working") == 1


def test_near_duplicates_are_counted_by_memory() -> None:
    metrics = learner()
    metrics.consume(step(admission=admission(4, refused=3, duplicates=5, merged=2)))
    metrics.of_memories.admitted("queue", admission(4))
    metrics.of_memories.admitted("queue", admission(4, duplicates=1))
    counted = {
        memory: [
            value(metrics, name, memory=memory)
            for name in ("memory_near_duplicates_total", "memory_merged_total")
        ]
        for memory in ("working", "queue")
    }
    assert counted == {"working": [5, 2], "queue": [1, 0]}


def test_dropped_samples_are_counted_by_producer_class_and_distance() -> None:
    metrics = learner()
    robot, yard = (Origin(name, "lens", "1", 0.0) for name in ("robot", "yard"))
    dropped = [
        DroppedSample(yard, 0.1, 3, 3),
        DroppedSample(yard, 0.1, 3, 4),
        DroppedSample(yard, 0.1, 3, -1),
    ]
    novelty = [(robot, math.inf), (yard, 0.1), (yard, 0.1), (yard, 0.1)]
    dropped_origins = [one.origin for one in dropped]
    metrics.consume(step(dropped_origins=dropped_origins, dropped=dropped, novelty=novelty))
    counted = {
        name: value(metrics, "dropped_samples_total", producer=name, reason="near_duplicate")
        for name in ("robot", "yard")
    }
    assert counted == {"robot": None, "yard": 3}
    for twin in ("same", "other", "unknown"):
        assert value(metrics, "dropped_class_samples_total", twin=twin, **{"class": "3"}) == 1
    assert value(metrics, "novelty_distance_bucket", producer="yard", le="0.12") == 3
    assert value(metrics, "novelty_distance_bucket", producer="robot", le="1.0") == 0
    assert value(metrics, "novelty_distance_sum", producer="robot") == 2  # not infinite


@pytest.mark.parametrize("metrics", [learner(), receiver()])
def test_gauges_without_a_measurement_are_absent_and_counters_start_at_zero(
    metrics: LearnerMetrics | ReceiverMetrics,
) -> None:
    for family in metrics.registry.collect():
        if family.name.startswith("stream_ssl_") and family.type != "info":
            if family.type == "gauge":
                assert {one.name for one in family.samples} <= {
                    "stream_ssl_checkpoint_age_seconds",  # since the start
                    "stream_ssl_checkpoint_lag_seconds",
                    "stream_ssl_condition",  # none is present
                    "stream_ssl_starting",
                }
            else:
                assert {one.value for one in family.samples} <= {0}


def test_replayed_samples_do_not_count_as_trained_samples() -> None:
    metrics = learner()
    metrics.consume(step(replay=True, admission=None))
    assert value(metrics, "steps_total") == 1
    assert value(metrics, "trained_samples_total") == 0
    assert value(metrics, "replayed_samples_total") == 4


def test_a_step_without_an_update_due_keeps_the_last_loss() -> None:
    metrics = learner()
    metrics.consume(step(loss=1.5))
    metrics.consume(step(skipped="pace", loss=math.nan, grad_norm=math.nan))
    assert value(metrics, "loss") == 1.5
    assert value(metrics, "gradient_norm") == 0.5
    assert value(metrics, "steps_total") == 1


def test_an_update_that_is_not_finite_leaves_no_stale_loss() -> None:
    for reason in NOT_FINITE:
        metrics = learner()
        metrics.consume(step(loss=1.5))
        metrics.consume(step(skipped=reason, loss=math.nan, grad_norm=math.nan))
        assert value(metrics, "loss") is None
        assert value(metrics, "gradient_norm") is None
        assert value(metrics, "steps_total") == 1
        assert value(metrics, "skipped_updates_total", reason=reason) == 1
        metrics.consume(step(loss=1.25))
        assert value(metrics, "loss") == 1.25


def test_samples_of_skipped_updates_are_not_trained() -> None:
    metrics = learner()
    for skipped in (None, "loss", "gradient", "keys", "pace"):
        metrics.consume(step(skipped=skipped))
        metrics.consume(step(skipped=skipped, replay=True, admission=None))
    assert value(metrics, "trained_samples_total") == 4
    assert value(metrics, "replayed_samples_total") == 4
    for reason in ("loss", "gradient", "keys", "pace"):
        assert value(metrics, "skipped_samples_total", reason=reason) == 4


def test_divergence_is_exported() -> None:
    metrics, divergence = learner(), Divergence()
    for _ in range(3):
        for _ in range(ROW):
            divergence.consume(step(skipped="gradient"))
        metrics.observe_divergence(divergence)
        assert value(metrics, "skipped_updates_in_a_row") == ROW
        assert value(metrics, "learner_halted") == 0
        divergence.reloaded(0)
    metrics.observe_divergence(divergence)
    assert value(metrics, "skipped_updates_in_a_row") == 0
    assert value(metrics, "divergence_reloads_total") == 3
    assert value(metrics, "learner_halted") == 1


def test_an_idle_learner_exports_its_lag() -> None:
    metrics = learner()
    metrics.consume(Idle(3.5))
    assert value(metrics, "lag_seconds") == 3.5
    assert value(metrics, "steps_total") == 0


def test_counters_of_ranks_rise_to_the_totals_of_the_ranks() -> None:
    metrics, group = learner(), RankGroup()
    group.size, group.waited, group.bytes, group.collectives = 2, 1.5, 1000, 40
    metrics.observe_ranks([3.0, 5.0], slots=[4, 3], group=group)
    group.waited = 2.0
    metrics.observe_ranks([4.0, 9.0], slots=[5, 4], group=group)
    busy = [value(metrics, "rank_busy_seconds_total", rank=rank) for rank in ("0", "1")]
    assert busy == [4.0, 9.0]
    assert value(metrics, "rank_waited_seconds_total") == 2.0
    assert value(metrics, "rank_sent_bytes_total") == 1000
    assert value(metrics, "rank_collectives_total") == 40
    assert [value(metrics, "rank_shard_slots", rank=rank) for rank in ("0", "1")] == [5, 4]


def test_checkpoint_age_is_computed_when_it_is_read() -> None:
    now = [1000.0]
    metrics = LearnerMetrics(CollectorRegistry(), clock=lambda: now[0])
    now[0] = 1060.0
    assert value(metrics, "checkpoint_age_seconds") == 60  # none yet: since the start
    assert value(metrics, "checkpoint_timestamp_seconds") is None
    metrics.consume(saved(step=7, created=1050.0))
    assert value(metrics, "checkpoint_age_seconds") == 10
    now[0] = 1100.0
    assert value(metrics, "checkpoint_age_seconds") == 50
    assert value(metrics, "checkpoint_step") == 7
    assert value(metrics, "checkpoint_timestamp_seconds") == 1050
    assert value(metrics, "checkpoint_bytes") == 5000
    assert value(metrics, "checkpoint_seconds_sum") == 0.4
    metrics.of_checkpoints.failed()
    assert value(metrics, "checkpoint_failures_total") == 1
    metrics.of_checkpoints.resumed(step=3, created=900.0)
    assert value(metrics, "checkpoint_age_seconds") == 200
    assert value(metrics, "checkpoint_seconds_count") == 1  # nothing was written


def test_the_lag_of_checkpoints_is_the_age_of_the_oldest_unsaved_update() -> None:
    now = [1000.0]
    metrics = LearnerMetrics(
        CollectorRegistry(), clock=lambda: 9 * now[0], monotonic=lambda: now[0]
    )
    now[0] = 5000.0
    assert value(metrics, "checkpoint_lag_seconds") == 0  # nothing learned, nothing to lose
    metrics.consume(step())
    now[0] = 5040.0
    metrics.consume(step())
    assert value(metrics, "checkpoint_lag_seconds") == 40
    metrics.of_checkpoints.failed()
    metrics.consume(Idle(0.0))
    assert value(metrics, "checkpoint_lag_seconds") == 40
    metrics.consume(saved(step=2, created=5040.0))
    now[0] = 50_000.0
    assert value(metrics, "checkpoint_lag_seconds") == 0
    assert value(metrics, "checkpoint_age_seconds") == 9 * 50_000 - 5040


def stats(occupancy: int = 8) -> MemoryStats:
    return MemoryStats(
        occupancy=occupancy,
        capacity=16,
        added=100,
        inserted=90,
        evicted=82,
        refused=10,
        expected_collisions=0.3,
        effective_rank=2.5,
        age_p50=10.0,
        age_p90=40.0,
        age_max=99.0,
        duplicates=7,
        merged=4,
        count_mean=1.5,
        count_p50=1.0,
        count_p90=3.0,
        count_max=5.5,
        counted=6,
        stale_p50=2.0,
        stale_p90=9.0,
        stale_max=21.0,
        turnover=0.75,
        multiplicity_mean=1.25,
        drift_mean=0.875,
        drift_min=0.5,
    )


def class_slots(metrics: LearnerMetrics, label: str) -> float | None:
    return metrics.registry.get_sample_value(
        "stream_ssl_memory_class_slots", {"memory": "working", "class": label}
    )


def test_the_statistics_of_a_memory_are_exported() -> None:
    metrics = learner()
    metrics.of_memories.observe("working", stats(), Counter({0: 4, 1: 4}))
    expected = {
        "memory_slots": 8,
        "memory_capacity_slots": 16,
        "memory_similarity": 0.3,
        "memory_effective_rank": 2.5,
        "memory_class_entropy_nats": pytest.approx(math.log(2)),
        "memory_turnover_ratio": 0.75,
        "memory_slot_duplicates_mean": 1.5,
        "memory_counted_slots": 6,
        "memory_multiplicity_mean": 1.25,
    }
    assert {name: value(metrics, name, memory="working") for name in expected} == expected
    percentiles = {
        "memory_age_samples": [10, 40, 99],
        "memory_staleness_samples": [2, 9, 21],
        "memory_slot_duplicates": [1, 3, 5.5],
    }
    for name, expected_values in percentiles.items():
        values = [
            value(metrics, name, memory="working", percentile=percentile)
            for percentile in ("50", "90", "100")
        ]
        assert values == expected_values
    shifts = [
        value(metrics, "memory_reencoding_shift", memory="working", statistic=statistic)
        for statistic in ("mean", "max")
    ]
    assert shifts == [0.125, 0.5]
    assert value(metrics, "memory_slots", memory="queue") is None


def test_a_class_that_left_the_memory_goes_to_zero() -> None:
    metrics = learner()
    metrics.of_memories.observe("working", stats(), {0: 4, 9: 4})
    metrics.of_memories.observe("working", stats(), {0: 8})
    assert class_slots(metrics, "0") == 8
    assert class_slots(metrics, "9") == 0
    assert value(metrics, "memory_class_entropy_nats", memory="working") == 0


def test_classes_above_63_count_as_other() -> None:
    metrics = learner()
    metrics.of_memories.observe("working", stats(), {63: 1, 64: 2, 1_000_000: 3})
    assert class_slots(metrics, "63") == 1
    assert class_slots(metrics, "other") == 5
    metrics.of_memories.observe("working", stats(), dict.fromkeys(range(500), 1))
    assert class_slots(metrics, "0") == 1
    assert class_slots(metrics, "other") == 500 - 64


class FixedBalance:
    effective_rank = 3.5
    class_entropy = 1.25

    def take_new(self) -> dict[int, int]:
        return {2: 5, 70: 1}


def test_the_rank_of_a_stream_without_a_batch_is_unknown() -> None:
    """A restarted learner would otherwise show a collapse until its first batch."""
    metrics = learner()
    metrics.observe_balance(Balance())
    assert value(metrics, "stream_effective_rank") is None


def test_balance_drift_and_figures_of_the_journal_are_exported() -> None:
    metrics = learner()
    metrics.observe_balance(FixedBalance())
    metrics.observe_drift(0.2, 0.1, {"loss": 1, "embedding": 0})
    metrics.observe_journal(
        waiting=12, pending=9, corrupt=2, rejected={("empty", "yard"): 1}, decoded={"yard": 4}
    )
    bad = {("empty", "yard"): 4, ("empty", "barn"): 1, ("damaged", "yard"): 2}
    metrics.observe_journal(3, pending=7, corrupt=5, rejected=bad, decoded={"yard": 9})
    assert value(metrics, "stream_effective_rank") == 3.5
    assert value(metrics, "stream_class_entropy_nats") == 1.25
    seen = {
        label: metrics.registry.get_sample_value(
            "stream_ssl_stream_class_samples_total", {"class": label}
        )
        for label in ("0", "2", "other")
    }
    assert seen == {"0": 0, "2": 5, "other": 1}
    assert value(metrics, "embedding_shift") == 0.2
    assert value(metrics, "image_shift") == 0.1
    assert value(metrics, "drift_detections_total", signal="loss") == 1
    assert value(metrics, "drift_detections_total", signal="collision") == 0
    assert value(metrics, "quarantined_samples_total", reason="empty", producer="yard") == 4
    assert value(metrics, "quarantined_samples_total", reason="empty", producer="barn") == 1
    assert value(metrics, "quarantined_samples_total", reason="damaged", producer="yard") == 2
    assert value(metrics, "lag_records") == 3
    assert value(metrics, "pending_samples") == 7
    assert value(metrics, "journal_corrupt_records_total") == 5


def test_collisions_are_absent_until_known_and_then_keep_the_last_value() -> None:
    metrics = learner()
    metrics.observe_collisions(None, None)
    assert value(metrics, "collision_probability", kind="calibrated") is None
    assert value(metrics, "memory_near_duplicates_ratio") is None
    metrics.observe_collisions(0.25, 0.5)
    metrics.observe_collisions(None, None)  # the last one stands
    assert value(metrics, "collision_probability", kind="calibrated") == 0.25
    assert value(metrics, "memory_near_duplicates_ratio") == 0.5


def test_a_batch_of_few_classes_does_not_move_the_collisions_much() -> None:
    metrics = learner()
    for _ in range(20):
        metrics.consume(step(collision_true=0.1))
        metrics.observe_collisions(0.1, None)
    metrics.consume(step(collision_true=0.9))
    metrics.observe_collisions(0.9, None)
    for kind in ("true", "calibrated"):
        assert value(metrics, "collision_probability", kind=kind) == pytest.approx(0.15)


def test_the_age_of_a_hung_loop_grows() -> None:
    now = [10.0]
    metrics = LearnerMetrics(
        CollectorRegistry(), clock=lambda: -now[0], monotonic=lambda: now[0]
    )  # a wall clock that runs backwards
    assert value(metrics, "loop_age_seconds") is None
    metrics.consume(Idle(0.0))
    now[0] = 310.0
    assert value(metrics, "loop_age_seconds") == 300


def test_an_unreadable_folder_removes_only_its_own_metrics(tmp_path: Path) -> None:
    folder = tmp_path / ("name-too-long" * 40)
    metrics = LearnerMetrics(CollectorRegistry(), folders={"checkpoints": folder})
    metrics.consume(Idle(2.5))
    assert value(metrics, "checkpoints_damaged") is None
    assert value(metrics, "lag_seconds") == 2.5


def test_free_space_restarts_and_damaged_checkpoints_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(catalogue.RESTARTS, "3")
    (tmp_path / "damaged-step-000000007").mkdir()
    folders = {"checkpoints": tmp_path, "images": tmp_path / "unmounted"}
    metrics = LearnerMetrics(CollectorRegistry(), folders=folders)
    assert value(metrics, "restarts_total") == 3
    assert value(metrics, "checkpoints_damaged") == 1
    free = value(metrics, "disk_free_bytes", folder="checkpoints")
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert value(metrics, "disk_free_bytes", folder="images") is None
    (tmp_path / "damaged-step-000000007").rmdir()
    assert value(metrics, "checkpoints_damaged") == 0


def test_producers_have_labels_of_their_own_up_to_a_bound() -> None:
    record = ReceiverRecord(
        producer_samples={"robot": 5, "crawler": 2},
        producer_bytes={"robot": 50},
        producer_received={"robot": 12.5},
    )
    metrics = receiver()
    metrics.consume(record)
    assert value(metrics, "producer_samples_total", producer="robot") == 5
    assert value(metrics, "producer_last_received_timestamp_seconds", producer="robot") == 12.5
    for number in range(1000):
        metrics.consume(ReceiverRecord(producer_samples={f"new-{number}": 1}))
    (family,) = (f for f in metrics.registry.collect() if f.name == "stream_ssl_producer_samples")
    assert len(family.samples) == catalogue.PRODUCERS + 1
    assert sum(one.value for one in family.samples) == 1007


def test_bad_samples_are_counted_by_producer_up_to_a_bound() -> None:
    metrics = learner()
    bad = {("empty", f"new-{number}"): 1 for number in range(1000)}
    metrics.observe_journal(0, 0, 0, bad, {})
    name = "stream_ssl_quarantined_samples"
    (family,) = (one for one in metrics.registry.collect() if one.name == name)
    assert len({one.labels["producer"] for one in family.samples}) == catalogue.PRODUCERS
    assert sum(one.value for one in family.samples) == 1000


def test_the_number_of_reasons_stays_bounded() -> None:
    metrics = receiver()
    for number in range(1000):
        metrics.consume(ReceiverRecord(rejected={f"reason-{number}": 1}))
    family = next(
        family
        for family in metrics.registry.collect()
        if family.name == "stream_ssl_rejected_samples"
    )
    assert len(family.samples) == LIMIT
    assert sum(sample.value for sample in family.samples) == 1000


def test_the_version_of_torch_needs_no_package_of_this_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    (family,) = (one for one in learner().registry.collect() if one.name == "stream_ssl_build")
    assert family.samples[0].labels["torch"] == torch.__version__


def test_build_and_configuration_are_exported() -> None:
    metrics = learner()
    metrics.describe({"loss.temperature": 0.2, "loss.Prior+": "memory", "device": "cpu"})
    families = {family.name: family for family in metrics.registry.collect()}
    build = families["stream_ssl_build"].samples[0].labels
    assert build["version"] == version()
    assert build["role"] == "learner"
    assert build["torch"]
    assert families["stream_ssl_config"].samples[0].labels == {
        "loss_temperature": "0.2",
        "loss_prior": "memory",
        "device": "cpu",
    }


def test_settings_hide_secrets_and_stay_bounded() -> None:
    flat = settings({"secret_key": "abc", "keys.password": "x", "name": "y" * 1000})
    assert flat == {"name": "y" * 128}
    assert len(settings({f"setting{number}": number for number in range(500)})) == 256
    assert settings({"2d": True, "learner.seed": 1}) == {"setting_2d": "True", "learner_seed": "1"}


def test_two_sets_of_metrics_share_no_values() -> None:
    one, other = receiver(), receiver()
    one.consume(ReceiverRecord(samples=5))
    assert value(one, "received_samples_total") == 5
    assert value(other, "received_samples_total") == 0


def test_the_metrics_of_a_receiver_need_no_torch() -> None:
    script = (
        "import sys; from prometheus_client import CollectorRegistry as R;"
        "from stream_ssl.observe.metrics import ReceiverMetrics;"
        "from stream_ssl.observe.server import Server;"
        "ReceiverMetrics(R()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def producer_slots(metrics: LearnerMetrics, producer: str) -> list[float | None]:
    names = ("producer_slots", "producer_guaranteed_slots")
    return [value(metrics, name, producer=producer) for name in names]


def test_slots_are_exported_by_producer_up_to_a_bound() -> None:
    metrics = learner()
    metrics.of_memories.observe_producers(
        {"robot": Holding(12, 4), "yard": Holding(3, 4), None: Holding(1, 0)}
    )
    assert producer_slots(metrics, "robot") == [12, 4]
    assert producer_slots(metrics, "yard") == [3, 4]
    assert producer_slots(metrics, "other") == [1, 0]
    metrics.of_memories.observe_producers({"robot": Holding(16, 8)})
    assert producer_slots(metrics, "robot") == [16, 8]
    assert producer_slots(metrics, "yard") == [0, 0]
    metrics.of_memories.observe_producers(
        {f"camera {number}": Holding(1, 1) for number in range(400)}
    )
    (slots,) = (one for one in metrics.registry.collect() if one.name.endswith("_producer_slots"))
    there = [one for one in slots.samples if one.labels["producer"].startswith("camera")]
    assert producer_slots(metrics, "other") == [400 - len(there)] * 2
    assert 200 < len(there) < 257
