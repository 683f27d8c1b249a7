"""What can go wrong for a producer: one tree, every message with its remedy."""

from __future__ import annotations


class ProducerError(Exception):
    """Anything that a producer raises about its connection or its buffer."""


class CannotConnectError(ProducerError):
    """No WELCOME within the deadline; the message says why."""


class RefusedError(ProducerError):
    """The receiver refuses this producer for good. Nothing that was acknowledged is affected."""


class VersionRefusedError(RefusedError):
    """The two sides speak different versions of the protocol."""


class SupersededError(RefusedError):
    """Another producer with the same name has taken over."""


class UnauthorisedError(RefusedError):
    """The key may not speak for this producer's name."""


class DeadlineError(ProducerError, TimeoutError):
    """Samples were not acknowledged, or found no room, in time; the message says why. They stay
    buffered, and are still sent while the producer is open."""


class DamagedError(ProducerError):
    """A packet arrived damaged several times in a row."""


class ClosedError(ProducerError):
    """The producer was closed, or its process was forked."""


class SampleTooLargeError(ProducerError, ValueError):
    """One sample is larger than the receiver takes in a packet, or than the buffer."""
