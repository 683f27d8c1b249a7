"""The catalogue's part on probes: what labels, where there are some, can tell of the encoder."""

from __future__ import annotations

from stream_ssl.observe.spec import Spec

PROBES: tuple[Spec, ...] = (
    Spec(
        "learner", "counter", "prequential_samples_total", "samples",
        "Labelled samples that the online probe predicted before it learned from them.",
        "0: the stream carries no labels, and the figures below mean nothing.",
    ),
    Spec(
        "learner", "gauge", "prequential_accuracy", "",
        "Share of the last labelled samples that were predicted right, test then learn, by "
        "classifier on the keys.",
        "linear and knn above no_change and majority, which need no encoder.", ("classifier",),
    ),
    Spec(
        "learner", "gauge", "prequential_balanced_accuracy", "",
        "Mean over the classes of prequential_accuracy: what a balanced stream would give.",
        "Far below prequential_accuracy: the rare classes are not told apart.", ("classifier",),
    ),
    Spec(
        "learner", "gauge", "prequential_kappa", "",
        "Cohen's kappa of the same predictions: 0 is chance, 1 is perfect.",
        "Rises while the encoder learns; a fall after a change of the stream: forgetting.",
        ("classifier",),
    ),
    Spec(
        "learner", "gauge", "held_out_accuracy", "",
        "kNN accuracy of the encoder's features on the held-out labelled set, at the last probe.",
        "Rises; the one figure here that does not depend on the stream. 0 without such a set.",
    ),
    Spec(
        "learner", "gauge", "held_out_class_accuracy", "",
        "The same, by class.", "Classes that the stream left long ago fall: forgetting.",
        ("class",),
    ),
    Spec(
        "learner", "gauge", "held_out_step", "steps",
        "Step of the last probe of the held-out set.", "Follows the steps, by its interval.",
    ),
    Spec(
        "learner", "gauge", "held_out_probe_seconds", "seconds",
        "Time of the last probe of the held-out set, in which nothing is learned.",
        "Above a few per cent of its interval: probe less often, or fewer samples.",
    ),
)  # fmt: skip
