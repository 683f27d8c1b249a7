"""What an encoder is worth on a balanced test: nearest neighbours and a linear probe.

Shapes: N images, Q test images, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stream_ssl import evaluation
from stream_ssl.learning.views import Views
from stream_ssl.methods import Method
from stream_ssl.reproduction.data import Images

CHUNK = 500
NEIGHBOURS = 20


def evaluate(method: Method, views: Views, reference: Images, test: Images) -> dict[str, float]:
    """Accuracy in [0, 1] of each probe, with the labels of `reference`."""
    feature_NF, feature_QF = (features(method, views, part) for part in (reference, test))
    label_N, label_Q = (torch.from_numpy(part.label_N) for part in (reference, test))
    return {
        "knn": evaluation.knn_accuracy(
            feature_QF, label_Q, feature_NF, label_N, k=NEIGHBOURS
        ).accuracy,
        "linear": linear_probe(feature_NF, label_N, feature_QF, label_Q),
    }


def features(method: Method, views: Views, images: Images) -> Tensor:
    """The encoder's features [N, F] of images as they are."""
    image_NCHW = torch.from_numpy(images.image_NHWC).permute(0, 3, 1, 2)
    return torch.cat(
        [method.features(views.plain(part)) for part in torch.split(image_NCHW, CHUNK)]
    )


def linear_probe(feature_NF: Tensor, label_N: Tensor, test_QF: Tensor, label_Q: Tensor) -> float:
    """Accuracy of a logistic regression on frozen features, at its minimum: neither a learning rate
    nor a seed stands between two encoders."""
    found = evaluation.linear_probe(feature_NF, label_N, test_QF, label_Q, evaluation.CONVEX)
    return found.accuracy
