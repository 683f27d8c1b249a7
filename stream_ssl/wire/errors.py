"""How a message can break the protocol."""

from __future__ import annotations

REASONS = (
    "checksum",  # damaged on the way: send again
    "codec",  # a codec that WELCOME did not list
    "gap",  # not the next sequence: go back to the one named
    "hello-required",  # the receiver does not know this connection: say HELLO
    "names",  # its key has as many producers' names as one may have
    "malformed",  # no message of this protocol
    "oversize",  # larger than WELCOME allows
    "superseded",  # a newer incarnation of the same producer has connected
    "unauthorised",  # the key may not speak for this producer
    "version",  # another version of the protocol
)


class WireError(ValueError):
    """A message that breaks the protocol.

    Attributes:
        reason: one of REASONS, the bounded set that NACK and the metrics use.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
