"""Clients that send images: needs pyzmq, numpy and msgpack, never torch."""

from producers.client import Producer
from producers.errors import (
    CannotConnectError,
    ClosedError,
    DamagedError,
    DeadlineError,
    ProducerError,
    RefusedError,
    SampleTooLargeError,
    SupersededError,
    UnauthorisedError,
    VersionRefusedError,
)
from producers.stats import Count, Rejection, Stats
from stream_ssl.wire import Keys, Sample, Welcome

__all__ = [
    "CannotConnectError",
    "ClosedError",
    "Count",
    "DamagedError",
    "DeadlineError",
    "Keys",
    "Producer",
    "ProducerError",
    "RefusedError",
    "Rejection",
    "Sample",
    "SampleTooLargeError",
    "Stats",
    "SupersededError",
    "UnauthorisedError",
    "VersionRefusedError",
    "Welcome",
]
