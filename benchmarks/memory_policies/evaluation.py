"""What an encoder is worth on a balanced test: nearest neighbours and a linear probe.

Shapes: N images, Q test images, F features, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.memory_policies.stream import CLASSES, Images
from stream_ssl.learning.views import Views
from stream_ssl.methods import Method
from stream_ssl.observe.probe import probe

CHUNK = 500
NEIGHBOURS = 20
DECAY = 1e-3  # of the linear probe's weights, on features of variance 1
ITERATIONS = 100


def evaluate(method: Method, views: Views, reference: Images, test: Images) -> dict[str, float]:
    """Accuracy in [0, 1] of each probe, with the labels of `reference`."""
    feature_NF, feature_QF = (features(method, views, part) for part in (reference, test))
    label_N, label_Q = (torch.from_numpy(part.label_N) for part in (reference, test))
    return {
        "knn": probe(feature_QF, label_Q, feature_NF, label_N, k=NEIGHBOURS).accuracy,
        "linear": linear_probe(feature_NF, label_N, feature_QF, label_Q),
    }


def features(method: Method, views: Views, images: Images) -> Tensor:
    """The encoder's features [N, F] of images as they are."""
    image_NCHW = torch.from_numpy(images.image_NHWC).permute(0, 3, 1, 2)
    return torch.cat(
        [method.features(views.plain(part)) for part in torch.split(image_NCHW, CHUNK)]
    )


def linear_probe(feature_NF: Tensor, label_N: Tensor, test_QF: Tensor, label_Q: Tensor) -> float:
    """Accuracy of a logistic regression on frozen features.

    The objective is convex and L-BFGS comes close to its minimum, so that neither a learning rate
    nor a seed stands between two encoders.
    """
    std_F, mean_F = torch.std_mean(feature_NF, dim=0)
    scale_F = std_F.clamp_min(1e-6)
    feature_NF, test_QF = ((part - mean_F) / scale_F for part in (feature_NF, test_QF))
    layer = nn.Linear(feature_NF.shape[1], CLASSES)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimiser = torch.optim.LBFGS(
        layer.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(layer(feature_NF), label_N) + DECAY * layer.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return float((layer(test_QF).argmax(dim=1) == label_Q).double().mean())
