"""Helpers for tests of shaped streams."""

import itertools

import numpy as np

from stream_ssl.producers.sources import Synthetic


def draw(stream, count=None):
    return [sample for sample, _ in itertools.islice(stream.samples(), count)]


def small(**settings):
    return Synthetic(**({"size": 6, "shift": 0} | settings))


def pixels_of(sample):
    return np.frombuffer(sample.data, np.uint8).reshape(sample.shape).astype(int)


def sigmas(share, law, count):
    """Return the distance of a share of draws from its law, in standard errors."""
    return abs(share - law) / np.sqrt(law * (1 - law) / count)
