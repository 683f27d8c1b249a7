"""The client that sends images to a receiver. It needs pyzmq, numpy and msgpack, but not torch.

This producer resumes at the position where its last run ended:

    import numpy as np
    from stream_ssl.producers import Producer

    with Producer(run="runs/laptop", name="camera-1") as producer:
        start = producer.connect().position or 0
        for number in range(start, 1000):
            pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
            producer.send(pixels, id=f"frame-{number}", position=number + 1)
    print("every image is on the receiver's disk")
"""

from stream_ssl.producers.client import Producer
from stream_ssl.producers.errors import (
    BufferFullError,
    CannotConnectError,
    ClosedError,
    DamagedError,
    DeadlineError,
    DeliveryError,
    ProducerError,
    RefusedError,
    SampleTooLargeError,
    SupersededError,
    UnauthorisedError,
    VersionRefusedError,
)
from stream_ssl.producers.stats import Count, Delivery, Rejection, StateChange, Stats
from stream_ssl.wire import Keys, Sample, Welcome
from stream_ssl.wire.messages import Verdict

__all__ = [
    "BufferFullError",
    "CannotConnectError",
    "ClosedError",
    "Count",
    "DamagedError",
    "DeadlineError",
    "Delivery",
    "DeliveryError",
    "Keys",
    "Producer",
    "ProducerError",
    "RefusedError",
    "Rejection",
    "Sample",
    "SampleTooLargeError",
    "StateChange",
    "Stats",
    "SupersededError",
    "UnauthorisedError",
    "Verdict",
    "VersionRefusedError",
    "Welcome",
]
