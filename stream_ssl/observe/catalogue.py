"""Every metric of a run, by name: the one place where a name, its unit and its help stand.

Those of memories and probes lie in `catalogue_memory.py` and `catalogue_probes.py`. The classes of
`metrics.py` create them, `page.py` documents them, the tests hold the dashboard and the alerts to
them. A name here is without the prefix `stream_ssl_`.
"""

from __future__ import annotations

from stream_ssl.observe.catalogue_memory import MEMORIES
from stream_ssl.observe.catalogue_probes import PROBES
from stream_ssl.observe.spec import PREFIX, Role, Spec

__all__ = ["CATALOGUE", "MEMORIES", "PREFIX", "Role", "Spec", "of_role"]

FSYNC_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CHECKPOINT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

PHASES = ("data", "forward", "backward", "memory")
PERCENTILES = ("50", "90", "100")
EXTREMES = ("mean", "max")
SKIPS = ("loss", "gradient", "keys", "pace")
REFUSALS = ("denied", "internal")
"""Why a connection is refused, beside the wire's reasons: by its key; by an error of ours."""
BAD_SAMPLES = ("damaged", "empty", "fields", "format", "packet", "pixels", "shape")
SIGNALS = ("loss", "collision", "embedding")
CLASSIFIERS = ("linear", "knn", "no_change", "majority")
"""Of the online probe: two that go by the embeddings, and two that need none."""
CLASSES = 64
"""Class labels "0" to "63" are told apart; the rest are counted as "other"."""

CATALOGUE: tuple[Spec, ...] = (
    # -- both roles
    Spec(
        "both", "info", "build_info", "", "Versions of what runs, and its role.",
        "Joins the other series to a version.", ("version", "role", "python"),
    ),
    Spec(
        "both", "info", "config_info", "", "The settings that this process runs with.",
        "A change here explains a change elsewhere.",
    ),
    # -- receiver: what comes in
    Spec(
        "receiver", "counter", "received_packets_total", "packets",
        "Packets taken from producers for the first time.",
        "The rate; zero while producers are connected means that they wait for credit.",
    ),
    Spec(
        "receiver", "counter", "received_samples_total", "samples",
        "Samples taken from producers for the first time.",
        "The rate of the stream. Less rejected, it must be what is trained plus what waits.",
    ),
    Spec(
        "receiver", "counter", "received_bytes_total", "bytes",
        "Bytes of headers and payloads taken from producers for the first time.",
        "The rate against what disk and wire can carry.",
    ),
    Spec(
        "receiver", "counter", "acked_samples_total", "samples",
        "Samples that are durable in the journal and that their producers may forget.",
        "Follows received_samples_total within a second.",
    ),
    Spec(
        "receiver", "counter", "duplicate_samples_total", "samples",
        "Samples sent again after a lost acknowledgement, and left out.",
        "Grows at restarts only; steady growth means that acknowledgements are lost.",
    ),
    Spec(
        "receiver", "counter", "rejected_samples_total", "samples",
        "Samples refused at the wire, by reason.",
        "Any growth: a producer sends what this receiver will never take.", ("reason",),
    ),
    Spec(
        "receiver", "counter", "missing_packets_total", "packets",
        "Packets that a producer says it sent and had acknowledged, but the journal lacks.",
        "Must stay 0 unless a journal was lost or replaced.",
    ),
    Spec(
        "receiver", "counter", "refused_connections_total", "connections",
        "Connections and frames refused before any sample was read, by reason.",
        "Growth: a wrong or revoked key, or somebody trying.", ("reason",),
    ),
    Spec(
        "receiver", "gauge", "producers_connected", "producers",
        "Producers heard of within the heartbeat's time-out.",
        "Against the number that ought to send.",
    ),
    Spec(
        "receiver", "gauge", "credit_bytes", "bytes",
        "Credit granted to all producers together.",
        "0 for minutes: the learner is too slow, or the disk is full.",
    ),
    # -- receiver: the journal
    Spec(
        "receiver", "gauge", "journal_bytes", "bytes",
        "Bytes that the journal holds.", "Growth without end: the learner does not keep up.",
    ),
    Spec(
        "receiver", "gauge", "journal_room_bytes", "bytes",
        "Bytes that the journal can still take within its budget.",
        "Towards 0 the producers are held back.",
    ),
    Spec(
        "receiver", "gauge", "journal_first_record", "position",
        "Position of the oldest record kept.",
        "Rises with each checkpoint; flat while the last rises: nothing is trimmed.",
    ),
    Spec(
        "receiver", "gauge", "journal_last_record", "position",
        "Position of the newest durable record.", "Rises while anything comes in.",
    ),
    Spec(
        "receiver", "histogram", "journal_fsync_seconds", "seconds",
        "Time of a group commit to the journal, until it is on disk.",
        "The 99th percentile above 0.25 s: a slow or failing disk.", buckets=FSYNC_BUCKETS,
    ),
    Spec(
        "receiver", "counter", "journal_failures_total", "commits",
        "Group commits that found no room or a failing disk.",
        "Any growth: nothing is acknowledged until it is mended, and nothing is lost.",
    ),
    Spec(
        "receiver", "counter", "journal_damaged_segments_total", "segments",
        "Segments of the journal found damaged.", "Must stay 0; the disk is failing.",
    ),
    Spec(
        "receiver", "gauge", "lag_bytes", "bytes",
        "Bytes journalled and not yet read by the learner.",
        "Steady growth: the learner does not keep up, or does not run.",
    ),
    Spec(
        "receiver", "gauge", "last_received_timestamp_seconds", "seconds",
        "Unix time at which the latest packet came; 0 before the first.",
        "Standing still while producers are connected: the stream dried up.",
    ),
    Spec(
        "receiver", "gauge", "last_captured_timestamp_seconds", "seconds",
        "Latest capture time of a sample, by its producer's clock; 0 before the first.",
        "Behind last_received: producers lag, or their clocks are wrong.",
    ),
    # -- learner: the loop
    Spec(
        "learner", "counter", "steps_total", "steps",
        "Updates of the weights since this process started.", "The rate; 0 while lag grows: stuck.",
    ),
    Spec(
        "learner", "counter", "trained_samples_total", "samples",
        "Fresh samples taken from the journal since this process started.",
        "The rate against that of received_samples_total.",
    ),
    Spec(
        "learner", "counter", "replayed_samples_total", "samples",
        "Samples trained on again, drawn from the memory.",
        "The rate that the pace asks for; 0 when the stream alone keeps the learner busy.",
    ),
    Spec(
        "learner", "counter", "skipped_updates_total", "updates",
        "Steps without an update: loss or gradient not finite, keys not of unit norm, none owed.",
        "Any but pace, more than a few an hour: the learning rate is too high.", ("reason",),
    ),
    Spec(
        "learner", "counter", "quarantined_samples_total", "samples",
        "Samples that could not be decoded, by reason; kept in the quarantine folder.",
        "A sudden rise: a source went bad.", ("reason",),
    ),
    Spec(
        "learner", "histogram", "step_seconds", "seconds",
        "Time of one step, by phase.",
        "data above forward and backward: decoding is the limit, add workers.",
        ("phase",), STEP_BUCKETS,
    ),
    Spec(
        "learner", "gauge", "loss", "nats", "Loss of the last step.",
        "A level of log(N + 1) means that nothing is learnt.",
    ),
    Spec(
        "learner", "gauge", "loss_diagnostic", "", "What the loss reports of itself, by name.",
        "A clamp rate near 1: the debiased estimate sits on its floor, no gradient.", ("name",),
    ),
    Spec(
        "learner", "gauge", "gradient_norm", "", "Norm of the gradient of the last step.",
        "Jumps come before losses that are not finite.",
    ),
    Spec(
        "learner", "gauge", "learning_rate", "", "Learning rate of the last step.",
        "Follows the schedule.",
    ),
    Spec(
        "learner", "gauge", "lag_seconds", "seconds",
        "Age of the oldest sample received and not yet trained on; 0 when none waits.",
        "Steady growth: the learner does not keep up with the stream.",
    ),
    Spec(
        "learner", "gauge", "lag_records", "records",
        "Journal records received and not yet trained on.", "As lag_seconds.",
    ),
    Spec(
        "learner", "counter", "journal_corrupt_records_total", "records",
        "Journal records whose checksum was wrong when they were read, left out.",
        "Must stay 0; each is a packet that the weights never see.",
    ),
    # -- learner: collisions and balance
    Spec(
        "learner", "gauge", "collision_probability", "",
        "Probability that a sample and a slot of the working memory share a class: expected from "
        "the memory's descriptors, true from labels.",
        "Expected far above 1 / classes: the memory is unbalanced, or the embeddings collapse.",
        ("kind",),
    ),
    Spec(
        "learner", "gauge", "stream_effective_classes", "classes",
        "Effective number of classes of the stream, from the spectrum of its embeddings.",
        "Less than the memory's: the memory is more balanced than the stream, as it should be. "
        "Towards 1: collapse.",
    ),
    Spec(
        "learner", "counter", "stream_class_samples_total", "samples",
        "Labelled samples seen, by class.", "How unbalanced the stream is.", ("class",),
    ),
    Spec(
        "learner", "gauge", "stream_class_entropy_nats", "nats",
        "Entropy of the class labels of the recent stream.",
        "Less than the memory's memory_class_entropy_nats.",
    ),
    Spec(
        "learner", "gauge", "embedding_shift", "",
        "1 - cosine between the short and the long running mean of the keys.",
        "A jump: the stream changed, or the encoder did.",
    ),
    Spec(
        "learner", "counter", "drift_detections_total", "detections",
        "Changes of level found in a signal by ADWIN.",
        "Read together with the sources that came and went.", ("signal",),
    ),
    *PROBES,
    *MEMORIES,
    # -- learner: checkpoints
    Spec(
        "learner", "gauge", "checkpoint_timestamp_seconds", "seconds",
        "Unix time of the newest durable checkpoint; 0 when there is none.", "Rises.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_age_seconds", "seconds",
        "Seconds since the newest durable checkpoint, or since the start when there is none.",
        "Above three intervals: checkpoints fail, and the journal is not trimmed.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_step", "steps",
        "Step of the newest durable checkpoint.", "What a restart would go on from.",
    ),
    Spec(
        "learner", "gauge", "checkpoint_bytes", "bytes",
        "Size of the newest checkpoint that this process wrote.",
        "Times the checkpoints kept: the disk that a run needs beside its journal.",
    ),
    Spec(
        "learner", "histogram", "checkpoint_seconds", "seconds",
        "Time to make a checkpoint durable.", "Against the interval.", buckets=CHECKPOINT_BUCKETS,
    ),
    Spec(
        "learner", "counter", "checkpoint_failures_total", "checkpoints",
        "Checkpoints that could not be written.", "Any growth: disk full or read-only.",
    ),
)  # fmt: skip


def of_role(role: Role) -> tuple[Spec, ...]:
    """The metrics that a process of this role exports."""
    return tuple(spec for spec in CATALOGUE if spec.role in (role, "both"))
