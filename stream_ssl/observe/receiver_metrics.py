"""The catalogue's entries for metrics that only the receiver exports."""

from __future__ import annotations

from stream_ssl.observe.metric_spec import Spec

FSYNC_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

RECEIVER: tuple[Spec, ...] = (
    # -- receiver: incoming data
    Spec(
        "receiver", "counter", "received_packets_total", "packets",
        "Packets taken from producers for the first time.",
        "The rate; zero while producers are connected means that they wait for credit.",
        field="ReceiverRecord.packets",
    ),
    Spec(
        "receiver", "counter", "received_samples_total", "samples",
        "Samples taken from producers for the first time.",
        "The rate of the stream: what is trained, skipped (skipped_samples_total), dropped as "
        "near-duplicates, quarantined and waits (pending_samples, and in the records of "
        "lag_records) adds up to it.", field="ReceiverRecord.samples",
    ),
    Spec(
        "receiver", "counter", "received_bytes_total", "bytes",
        "Bytes of headers and payloads taken from producers for the first time.",
        "The rate against what disk and wire can carry.", field="ReceiverRecord.bytes",
    ),
    Spec(
        "receiver", "counter", "acked_samples_total", "samples",
        "Samples that are durable in the journal and that their producers may forget.",
        "Follows received_samples_total within a second.", field="ReceiverRecord.acked_samples",
    ),
    Spec(
        "receiver", "counter", "duplicate_samples_total", "samples",
        "Samples sent again after a lost acknowledgement, and left out.",
        "Grows at restarts only; steady growth means that acknowledgements are lost.",
        field="ReceiverRecord.duplicates",
    ),
    Spec(
        "receiver", "counter", "rejected_samples_total", "samples",
        "Samples refused at the wire, by reason.",
        "Any growth: a producer sends what this receiver will never take.", ("reason",),
        field="ReceiverRecord.rejected",
    ),
    Spec(
        "receiver", "counter", "missing_packets_total", "packets",
        "Packets that a producer says it sent and had acknowledged, but the journal lacks.",
        "Must stay 0 unless a journal was lost or replaced.", field="ReceiverRecord.missing",
    ),
    Spec(
        "receiver", "counter", "refused_connections_total", "connections",
        "Connections and frames refused before any sample was read, by reason.",
        "Growth: a wrong or revoked key, or somebody trying.", ("reason",),
        field="ReceiverRecord.refused",
    ),
    Spec(
        "receiver", "counter", "producer_samples_total", "samples",
        "Samples taken for the first time, by producer: by its key's name on the allow-list; in "
        "plain text, by the name that it gives itself.",
        "Who sends how much; one that stopped.", ("producer",),
        field="ReceiverRecord.producer_samples",
    ),
    Spec(
        "receiver", "counter", "producer_bytes_total", "bytes",
        "Bytes taken for the first time, by producer.", "As producer_samples_total.",
        ("producer",), field="ReceiverRecord.producer_bytes",
    ),
    Spec(
        "receiver", "gauge", "producer_last_received_timestamp_seconds", "seconds",
        "Unix time at which the latest packet of a producer came.",
        "time() less this: silent for so long.", ("producer",),
        field="ReceiverRecord.producer_received",
    ),
    Spec(
        "receiver", "gauge", "producer_last_captured_timestamp_seconds", "seconds",
        "Capture time of a producer's latest sample, by the producer's clock.",
        "Ahead of producer_last_received_timestamp_seconds: the producer's clock is wrong.",
        ("producer",), field="ReceiverRecord.producer_captured",
    ),
    Spec(
        "receiver", "counter", "producer_rejected_samples_total", "samples",
        "Samples refused at the wire, by producer.",
        "As rejected_samples_total; the receiver's log has the reason.", ("producer",),
        field="ReceiverRecord.producer_rejected",
    ),
    Spec(
        "receiver", "gauge", "producer_finished", "",
        "1 after a producer said BYE, until it connects again; else 0.",
        "0 while producer_last_received_timestamp_seconds stands still: it hangs, or was lost.",
        ("producer",), field="ReceiverRecord.producer_finished",
    ),
    Spec(
        "receiver", "gauge", "producer_clock_offset_seconds", "seconds",
        "A producer's clock less this machine's, when the producer last said HELLO.",
        "More than a minute: one of the two clocks is wrong. The same for all producers: this "
        "machine's.", ("producer",), field="ReceiverRecord.producer_clock",
    ),
    Spec(
        "receiver", "gauge", "producers_connected", "producers",
        "Producers heard of within the heartbeat's time-out.",
        "Against the number that ought to send.", field="ReceiverRecord.producers",
    ),
    Spec(
        "receiver", "gauge", "credit_bytes", "bytes", "Credit granted to all producers together.",
        "0 for minutes: the learner is too slow, or the disk is full.",
        field="ReceiverRecord.credit",
    ),
    # -- receiver: the journal
    Spec(
        "receiver", "gauge", "journal_bytes", "bytes",
        "Bytes that the journal holds.", "Growth without end: the learner does not keep up.",
        field="ReceiverRecord.journal_bytes",
    ),
    Spec(
        "receiver", "gauge", "journal_room_bytes", "bytes",
        "Bytes that the journal can still take within its budget.",
        "Towards 0 the producers are held back.", field="ReceiverRecord.room",
    ),
    Spec(
        "receiver", "gauge", "journal_first_record", "position",
        "Position of the oldest record kept.",
        "Rises with each checkpoint; flat while the last rises: nothing is trimmed.",
        field="ReceiverRecord.journal_first",
    ),
    Spec(
        "receiver", "gauge", "journal_last_record", "position",
        "Position of the newest durable record.", "Rises while anything comes in.",
        field="ReceiverRecord.journal_last",
    ),
    Spec(
        "receiver", "histogram", "journal_fsync_seconds", "seconds",
        "Time of a group commit to the journal, until it is on disk.",
        "The 99th percentile above 0.25 s: a slow or failing disk.", buckets=FSYNC_BUCKETS,
        field="ReceiverRecord.fsync_seconds",
    ),
    Spec(
        "receiver", "counter", "journal_failures_total", "commits",
        "Group commits that found no room or a failing disk.",
        "Any growth: nothing is acknowledged until it is mended, and nothing is lost.",
        field="ReceiverRecord.journal_failures",
    ),
    Spec(
        "receiver", "counter", "allow_list_errors_total", "reads",
        "Reads of a changed allow-list that could not be used; the list before it stays in force.",
        "Any growth: a revoked key may still be admitted; the log names the fault.",
        field="ReceiverRecord.allow_list_errors",
    ),
    Spec(
        "receiver", "gauge", "allow_list_broken", "",
        "1 while the newest version of the allow-list cannot be read, or is deleted.",
        "1: the list before it stays in force, so a key that was revoked since is admitted.",
        field="ReceiverRecord.allow_list_broken",
    ),
    Spec(
        "receiver", "counter", "journal_damaged_segments_total", "segments",
        "Segments of the journal found damaged.", "Must stay 0; the disk is failing.",
    ),
    Spec(
        "receiver", "gauge", "lag_bytes", "bytes",
        "Bytes journalled and not yet read by the learner.",
        "Steady growth: the learner does not keep up, or does not run.",
        field="ReceiverRecord.lag_bytes",
    ),
    Spec(
        "receiver", "gauge", "last_received_timestamp_seconds", "seconds",
        "Unix time at which the latest packet came.",
        "Standing still while producers are connected: the stream dried up.",
        field="ReceiverRecord.received",
    ),
    Spec(
        "receiver", "gauge", "last_captured_timestamp_seconds", "seconds",
        "Latest capture time of a sample, by its producer's clock.",
        "Behind last_received: producers lag; ahead of it, or years off: their clocks are wrong.",
        field="ReceiverRecord.captured",
    ),
)  # fmt: skip
