"""The exceptions of a producer. All derive from ProducerError, and messages name a remedy."""

from __future__ import annotations

from stream_ssl.producers.stats import Delivery


class ProducerError(Exception):
    """Base class of the errors about a producer's connection or buffer."""


class CannotConnectError(ProducerError):
    """The receiver sent no WELCOME before the deadline; the message gives the reason."""


class RefusedError(ProducerError):
    """The receiver refuses this producer permanently. Acknowledged samples are not affected."""


class VersionRefusedError(RefusedError):
    """The producer and the receiver speak different versions of the protocol."""


class SupersededError(RefusedError):
    """Another producer with the same name is connected, or has displaced this producer."""


class UnauthorisedError(RefusedError):
    """The receiver does not allow this key to use the producer's name."""


class DeadlineError(ProducerError, TimeoutError):
    """Samples were not acknowledged in time, or the buffer had no room in time.

    The message gives the reason. Samples that were accepted stay buffered, and the producer still
    sends them while it is open.
    """


class BufferFullError(ProducerError):
    """The buffer has no room for a sample, and `on_full` is "raise"."""


class DeliveryError(ProducerError):
    """A sample was rejected or dropped. The future of submit() and send_async() raises this error.

    Attributes:
        delivery: the outcome of the sample.
    """

    def __init__(self, message: str, delivery: Delivery) -> None:
        super().__init__(message)
        self.delivery = delivery

    def __reduce__(self) -> tuple[type[DeliveryError], tuple[str, Delivery]]:
        """Copy the error with its delivery, so that it can leave a process of a pool."""
        return type(self), (str(self), self.delivery)


class DamagedError(ProducerError):
    """A packet arrived at the receiver damaged several times in a row."""


class ClosedError(ProducerError):
    """The producer is closed, or this process was forked from the producer's process."""


class SampleTooLargeError(ProducerError, ValueError):
    """A sample is larger than the receiver's maximum packet, or larger than the buffer."""
