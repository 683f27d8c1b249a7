"""The protocol between producers and receivers; docs/wire.md describes it."""

from stream_ssl.wire.address import is_loopback, require_loopback
from stream_ssl.wire.keys import Keys
from stream_ssl.wire.messages import (
    REASONS,
    VERSION,
    Ack,
    Bye,
    Data,
    Hello,
    Message,
    Nack,
    Welcome,
    WireError,
    check_name,
    decode,
    encode,
    sample_of,
)
from stream_ssl.wire.sample import CODECS, Position, Sample

__all__ = [
    "CODECS",
    "REASONS",
    "VERSION",
    "Ack",
    "Bye",
    "Data",
    "Hello",
    "Keys",
    "Message",
    "Nack",
    "Position",
    "Sample",
    "Welcome",
    "WireError",
    "check_name",
    "decode",
    "encode",
    "is_loopback",
    "require_loopback",
    "sample_of",
]
