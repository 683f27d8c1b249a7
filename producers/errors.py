"""What can go wrong for a producer: one tree, every message with its remedy."""

from __future__ import annotations

from stream_ssl.producers.stats import Delivery


class ProducerError(Exception):
    """Anything that a producer raises about its connection or its buffer."""


class CannotConnectError(ProducerError):
    """No WELCOME within the deadline; the message says why."""


class RefusedError(ProducerError):
    """The receiver refuses this producer for good. Nothing that was acknowledged is affected."""


class VersionRefusedError(RefusedError):
    """The two sides speak different versions of the protocol."""


class SupersededError(RefusedError):
    """Another producer with the same name is connected, or has taken over."""


class UnauthorisedError(RefusedError):
    """The key may not speak for this producer's name."""


class DeadlineError(ProducerError, TimeoutError):
    """Samples were not acknowledged, or found no room, in time; the message says why. They stay
    buffered, and are still sent while the producer is open."""


class BufferFullError(ProducerError):
    """The buffer has no room for a sample, and on_full is "raise"."""


class DeliveryError(ProducerError):
    """A sample was rejected or dropped; raised by the future of submit() and send_async().

    Attributes:
        delivery: what became of the sample.
    """

    def __init__(self, message: str, delivery: Delivery) -> None:
        super().__init__(message)
        self.delivery = delivery


class DamagedError(ProducerError):
    """A packet arrived damaged several times in a row."""


class ClosedError(ProducerError):
    """The producer was closed, or its process was forked."""


class SampleTooLargeError(ProducerError, ValueError):
    """One sample is larger than the receiver takes in a packet, or than the buffer."""
