"""The catalogue of all metrics: name, unit, labels, help, and the record's field that fills them.

To add a metric, add a `Spec` to `learner_metrics.py`, to `receiver_metrics.py` or to BOTH below.
CONTRIBUTING.md lists all steps. `make docs` makes docs/metrics.md from the catalogue. The tests
check the dashboard and the alerts against the catalogue.
"""

from __future__ import annotations

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
RESTARTS = "STREAM_SSL_RESTARTS"
"""The environment variable that holds how often the supervisor has restarted this process."""
PRODUCERS = 256
"""The most producers with a label of their own. All others count as "other"."""
CLASSES = 64
"""The number of class labels, "0" to "63". All other classes count as "other"."""

BOTH: tuple[Spec, ...] = (
    Spec(
        "both", "info", "build_info", "", "Versions of what runs, and its role.",
        "Joins the other series to a version.", ("version", "role", "python"),
    ),
    Spec(
        "both", "info", "config_info", "", "The settings that this process runs with.",
        "A change here explains a change elsewhere.",
    ),
    Spec(
        "both", "counter", "restarts_total", "restarts",
        "How often `stream-ssl run` started this process again since it was started itself.",
        "Any growth: it died; its log says of what.",
    ),
    Spec(
        "both", "gauge", "loop_age_seconds", "seconds",
        "Seconds since the process's loop last went round; /healthz asks for the same.",
        "Above a few seconds: it hangs, though its port answers.",
    ),
    Spec(
        "both", "gauge", "disk_free_bytes", "bytes",
        "Space that is left to us on the file system of a folder that this process writes.",
        "Less than a checkpoint and the journal's room: it will be full.", ("folder",),
    ),
    Spec(
        "both", "gauge", "condition", "",
        "Whether a condition that asks for attention is present, by the producer that it concerns.",
        "1: see the runbook of that name. The alerts are made of this.", ("name", "producer"),
    ),
    Spec(
        "both", "gauge", "starting", "", "1 until the process has reached its loop, else 0.",
        "1 for minutes: it loads a large checkpoint, or hangs.",
    ),
)  # fmt: skip

CATALOGUE: tuple[Spec, ...] = (*BOTH, *RECEIVER, *LEARNER)


def of_role(role: Role) -> tuple[Spec, ...]:
    """Return the metrics that a process of this role exports."""
    return tuple(spec for spec in CATALOGUE if spec.role in (role, "both"))
