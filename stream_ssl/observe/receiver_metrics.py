"""The catalogue's entries for metrics that only the receiver exports."""

from __future__ import annotations

from stream_ssl.observe.metric_spec import Spec

FSYNC_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

RECEIVER: tuple[Spec, ...] = (
    # -- receiver: incoming data
    Spec(
        "receiver", "counter", "received_packets_total", "packets",
        "Packets that were received from producers for the first time.",
        "A rate of 0 while producers are connected: they wait for credit.",
        field="ReceiverRecord.packets",
    ),
    Spec(
        "receiver", "counter", "received_samples_total", "samples",
        "Samples that were received from producers for the first time.",
        "The rate of the stream. Each sample is trained on, skipped (skipped_samples_total), "
        "dropped as a near-duplicate, quarantined, or waits (pending_samples, lag_records).",
        field="ReceiverRecord.samples",
    ),
    Spec(
        "receiver", "counter", "received_bytes_total", "bytes",
        "Bytes of headers and payloads that were received from producers for the first time.",
        "Compare the rate with the speed of the disk and the network.",
        field="ReceiverRecord.bytes",
    ),
    Spec(
        "receiver", "counter", "acked_samples_total", "samples",
        "Samples that are durable in the journal. Their producers may delete them.",
        "It follows received_samples_total within a second.", field="ReceiverRecord.acked_samples",
    ),
    Spec(
        "receiver", "counter", "duplicate_samples_total", "samples",
        "Samples that were sent again after a lost acknowledgement, and left out.",
        "It grows after restarts. Steady growth: acknowledgements are lost.",
        field="ReceiverRecord.duplicates",
    ),
    Spec(
        "receiver", "counter", "rejected_samples_total", "samples",
        "Samples that the receiver refused, by reason.",
        "Any growth: a producer sends samples that this receiver never accepts.", ("reason",),
        field="ReceiverRecord.rejected",
    ),
    Spec(
        "receiver", "counter", "missing_packets_total", "packets",
        "Packets that a producer reports as acknowledged and that the journal lacks.",
        "It stays 0 unless a journal was lost or replaced.", field="ReceiverRecord.missing",
    ),
    Spec(
        "receiver", "counter", "refused_connections_total", "connections",
        "Connections and frames that were refused before a sample was read, by reason.",
        "Growth: a producer has a wrong or revoked key, or somebody tries to get in.", ("reason",),
        field="ReceiverRecord.refused",
    ),
    Spec(
        "receiver", "counter", "producer_samples_total", "samples",
        "Samples that were received for the first time, by producer. The producer is the name of "
        "its key on the allow-list. In plain text it is the name that the producer gives itself.",
        "The rate of each producer. A rate of 0: the producer has stopped.", ("producer",),
        field="ReceiverRecord.producer_samples",
    ),
    Spec(
        "receiver", "counter", "producer_bytes_total", "bytes",
        "Bytes that were received for the first time, by producer.", "The rate of each producer.",
        ("producer",), field="ReceiverRecord.producer_bytes",
    ),
    Spec(
        "receiver", "gauge", "producer_last_received_timestamp_seconds", "seconds",
        "Unix time at which the latest packet of a producer arrived.",
        "time() minus this value: the seconds since the producer's latest packet.", ("producer",),
        field="ReceiverRecord.producer_received",
    ),
    Spec(
        "receiver", "gauge", "producer_last_captured_timestamp_seconds", "seconds",
        "Capture time of a producer's latest sample, by the producer's clock.",
        "Later than producer_last_received_timestamp_seconds: the producer's clock is wrong.",
        ("producer",), field="ReceiverRecord.producer_captured",
    ),
    Spec(
        "receiver", "counter", "producer_rejected_samples_total", "samples",
        "Samples that the receiver refused, by producer.",
        "Any growth: read the reason in the receiver's log.", ("producer",),
        field="ReceiverRecord.producer_rejected",
    ),
    Spec(
        "receiver", "gauge", "producer_finished", "",
        "1 after a producer said BYE, and 2 if it also said that its source has ended. 0 once it "
        "connects again.",
        "0 while producer_last_received_timestamp_seconds is constant: the producer hangs, or was "
        "lost.", ("producer",), field="ReceiverRecord.producer_finished",
    ),
    Spec(
        "receiver", "gauge", "producer_clock_offset_seconds", "seconds",
        "A producer's clock minus this machine's clock, when the producer last said HELLO.",
        "More than a minute: one of the two clocks is wrong. If all producers have the same "
        "value, it is this machine's clock.", ("producer",), field="ReceiverRecord.producer_clock",
    ),
    Spec(
        "receiver", "gauge", "producer_sporadic", "",
        "1 for a producer whose source may send nothing for long, such as a watched folder.",
        "Its silence raises no condition.", ("producer",), field="ReceiverRecord.producer_sporadic",
    ),
    Spec(
        "receiver", "gauge", "producers_connected", "producers",
        "Producers that sent a message within the heartbeat's time-out.",
        "Compare it with the number of producers that you started.",
        field="ReceiverRecord.producers",
    ),
    Spec(
        "receiver", "gauge", "credit_bytes", "bytes", "Credit granted to all producers together.",
        "0 for minutes: the learner is too slow, or the disk is full.",
        field="ReceiverRecord.credit",
    ),
    # -- receiver: the journal
    Spec(
        "receiver", "gauge", "journal_bytes", "bytes", "Bytes that the journal holds.",
        "Growth without end: the learner does not keep up.", field="ReceiverRecord.journal_bytes",
    ),
    Spec(
        "receiver", "gauge", "journal_room_bytes", "bytes",
        "Bytes that the journal can still take within its budget.",
        "Near 0: the receiver makes the producers wait.", field="ReceiverRecord.room",
    ),
    Spec(
        "receiver", "gauge", "journal_first_record", "position",
        "Position of the oldest record that is kept.",
        "It rises with each checkpoint. Constant while journal_last_record rises: the journal is "
        "not trimmed.", field="ReceiverRecord.journal_first",
    ),
    Spec(
        "receiver", "gauge", "journal_last_record", "position",
        "Position of the newest durable record.", "It rises while packets arrive.",
        field="ReceiverRecord.journal_last",
    ),
    Spec(
        "receiver", "histogram", "journal_fsync_seconds", "seconds",
        "Time of a group commit to the journal, until it is on disk.",
        "99th percentile above 0.25 s: the disk is slow or failing.", buckets=FSYNC_BUCKETS,
        field="ReceiverRecord.fsync_seconds",
    ),
    Spec(
        "receiver", "counter", "journal_failures_total", "commits",
        "Group commits that failed, because the disk was full or failed.",
        "Any growth: nothing is acknowledged until the fault is repaired, and nothing is lost.",
        field="ReceiverRecord.journal_failures",
    ),
    Spec(
        "receiver", "counter", "allow_list_errors_total", "reads",
        "Attempts to read a changed allow-list that failed. The previous list stays in force.",
        "Any growth: a revoked key may still be admitted. The log names the fault.",
        field="ReceiverRecord.allow_list_errors",
    ),
    Spec(
        "receiver", "gauge", "allow_list_broken", "",
        "1 while the newest version of the allow-list is deleted or cannot be read.",
        "1: the previous list stays in force, so a key that was revoked since then is still "
        "admitted.", field="ReceiverRecord.allow_list_broken",
    ),
    Spec(
        "receiver", "counter", "journal_damaged_segments_total", "segments",
        "Segments of the journal that were damaged.", "Above 0: the disk is failing.",
    ),
    Spec(
        "receiver", "gauge", "lag_bytes", "bytes",
        "Bytes in the journal that the learner has not read yet.",
        "Steady growth: the learner does not keep up, or does not run.",
        field="ReceiverRecord.lag_bytes",
    ),
    Spec(
        "receiver", "gauge", "last_received_timestamp_seconds", "seconds",
        "Unix time at which the latest packet arrived.",
        "Constant while producers are connected: the producers send nothing.",
        field="ReceiverRecord.received",
    ),
    Spec(
        "receiver", "gauge", "last_captured_timestamp_seconds", "seconds",
        "Latest capture time of a sample, by its producer's clock.",
        "Earlier than last_received_timestamp_seconds: producers lag. Later, or wrong by years: "
        "their clocks are wrong.", field="ReceiverRecord.captured",
    ),
)  # fmt: skip
