"""The catalogue of all metrics: name, unit, labels, help, and the record's field that fills them.

To add a metric, add an entry to `learner_metrics.py`, to `receiver_metrics.py` or to BOTH below.
`Spec` explains its arguments, and CONTRIBUTING.md lists all steps. `make docs` makes
docs/metrics.md from the catalogue. The tests check the dashboard and the alerts against it.
"""

from __future__ import annotations

from functools import partial

from stream_ssl.observe.learner_metrics import LEARNER
from stream_ssl.observe.metric_spec import Role, Spec
from stream_ssl.observe.receiver_metrics import RECEIVER

PERCENTILES = ("50", "90", "100")
EXTREMES = ("mean", "max")
SKIPS = ("loss", "gradient", "keys", "pace", "novelty")
REFUSALS = (
    *("denied", "handshake", "internal", "no-key", "plain-receiver", "server-key", "silent"),
    "zmtp",
)
"""Reasons to refuse a connection, beside the reasons of the wire protocol:

- denied: the key is not on the allow-list.
- handshake: the handshake is not valid.
- internal: the receiver failed.
- no-key: the producer sends plain text, and the receiver uses keys.
- plain-receiver: the producer uses keys, and the receiver does not.
- server-key: the producer has the public key of another receiver.
- silent: the peer never sends HELLO, for example because its routing id is already in use.
- zmtp: the peer speaks ZMTP 1 or 2, or HTTP."""
BAD_SAMPLES = ("damaged", "empty", "expensive", "fields", "format", "packet", "pixels", "shape")
SIGNALS = ("loss", "collision", "embedding", "image")
CLASSIFIERS = ("linear", "knn", "no_change", "majority")
"""The classifiers of the online probe. The first two use the embeddings, the last two do not."""
RESTARTS, LAST_END = "STREAM_SSL_RESTARTS", "STREAM_SSL_LAST_END"
"""The environment variables that hold how often the supervisor has restarted this process, and how
the previous process ended."""
PRODUCERS = 256
"""The most producers with a label of their own. All others count as "other"."""
CLASSES = 64
"""The number of class labels, "0" to "63". All other classes count as "other"."""
WORKING = "working"
"""The label of the memory that the learner trains from. Shadows have their own names."""

info = partial(Spec, "both", "info")
counter = partial(Spec, "both", "counter")
gauge = partial(Spec, "both", "gauge")

BOTH: tuple[Spec, ...] = (
    info("build_info", "",
        "Versions of the running program, and the role of the process.",
        "Join other series with it to see their version.", ("version", "role", "python"),
    ),
    info("config_info", "", "Settings of this process.",
        "Compare a change of a setting with changes of other metrics.",
    ),
    counter("restarts_total", "restarts",
        "How often `stream-ssl run` has restarted this process.",
        "Any growth: the process died. The supervisor's log has the reason.",
    ),
    gauge("loop_age_seconds", "seconds",
        "Seconds since the latest round of the process's main loop. /healthz checks the same.",
        "Above a few seconds: the process hangs, though its port answers.",
    ),
    gauge("disk_free_bytes", "bytes",
        "Free space on the file system of a folder that this process writes.",
        "Less than the size of a checkpoint plus the rest of the journal's budget: the disk will "
        "be full.", ("folder",),
    ),
    gauge("condition", "",
        "1 while a condition needs attention, otherwise 0. The label producer names the producer "
        "that it concerns.", "1: read the runbook of that name. The alerts use this metric.",
        ("name", "producer"),
    ),
    gauge("starting", "",
        "1 until the process has reached its main loop, otherwise 0.",
        "1 for minutes: the process loads a large checkpoint, or hangs.",
    ),
)  # fmt: skip

CATALOGUE: tuple[Spec, ...] = (*BOTH, *RECEIVER, *LEARNER)


def metrics_of(role: Role) -> tuple[Spec, ...]:
    """Return the metrics that a process of this role exports."""
    return tuple(spec for spec in CATALOGUE if spec.role in (role, "both"))
