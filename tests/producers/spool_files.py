"""Packets of a spool, for its tests."""

from __future__ import annotations

from client_peer import image

from stream_ssl.producers._packer import NOT_GIVEN, Packer, Packet
from stream_ssl.producers._spool import Spool
from stream_ssl.wire import Sample


def packet(*names: str, position: object = NOT_GIVEN) -> Packet:
    packer = Packer(1 << 20, 1 << 10)
    for name in names:
        sample = Sample.from_array(image(side=2), name, source="a", time=0.0)
        assert not list(packer.add([(sample, 100, position, 0.0, None)]))
    return packer.take()


def ids(spool: Spool) -> list[str]:
    """Return the ids of all samples that are on disk only."""
    found: list[str] = []
    while (packet := spool.load()) is not None:
        found += packet.ids
    return found


def flip(spool: Spool, at: int) -> None:
    """Damage a byte of the only segment."""
    (segment,) = spool.folder.glob("*.spool")
    content = bytearray(segment.read_bytes())
    content[at] ^= 1
    segment.write_bytes(content)


def reopen(spool: Spool, **settings: int) -> Spool:
    spool.close()
    return Spool(spool.folder, "a", settings.get("max_bytes", 1 << 20))
