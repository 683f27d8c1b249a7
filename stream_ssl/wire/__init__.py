"""What producers and receivers say to each other: see docs/wire.md."""

from stream_ssl.wire.messages import (
    Ack,
    Bye,
    Data,
    Hello,
    Message,
    Nack,
    Welcome,
    WireError,
    decode,
)
from stream_ssl.wire.sample import CODECS, Position, Sample

__all__ = [
    "CODECS",
    "Ack",
    "Bye",
    "Data",
    "Hello",
    "Message",
    "Nack",
    "Position",
    "Sample",
    "Welcome",
    "WireError",
    "decode",
]
