"""An estimate of how long a sample takes to decode, from its header and without a decoder.

The learner rejects images by `decode_work`. The receiver charges producers by `decode_cost`, so
that a small file with an expensive decode uses as much credit as a large file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

MOST_SCANS = 16
"""Most scans of a JPEG that has `max_pixels`; a JPEG with fewer pixels may have proportionally
more scans. Encoders write about a dozen scans. Each scan takes the decoder as long as reading all
pixels, but may be only 76 bytes long."""

FREE_WORK = 1 << 20
"""Pixels that every image may have, even if the file is very small."""
WORK_PER_BYTE = 512
"""Pixels that an image may have for each byte of its file, if this is more than FREE_WORK.

It bounds the decoding time for a given number of bytes. Every baseline JPEG and every 8-bit RGB PNG
stays below the limit: these formats need at least one byte for 256 and 344 pixels."""

WORK_PER_CHARGED_BYTE = 16
"""Pixels that cost as much as one byte. Photos have fewer pixels per byte, so they cost only their
bytes."""

SOS = b"\xff\xda"  # begins a scan of a JPEG
_APP1 = 0xE1  # the marker of EXIF and XMP in a JPEG
_SCAN_BYTES = 10  # of the shortest marker of a scan
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # EOI, or a marker with a length after it
_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers that give the size of a JPEG
_LOSSLESS = {0xC3, 0xC7, 0xCB, 0xCF}  # the markers among them of a lossless JPEG
_MOST_PARTS = 1000  # parts of a header that are read; a colour profile may take 255
_UNKNOWN = 1 << 62  # pixels assumed for an image whose header has more or shorter parts

View = bytes | memoryview


def decode_work(pixels: int, scans: int | None = None) -> int:
    """Return the decode work of an image, as the pixels of an equally slow PNG or WebP.

    Args:
        pixels: width times height.
        scans: the number of scans of a grey or colour JPEG; None for any other image.
    """
    return pixels if scans is None else pixels * max(1, scans) // MOST_SCANS


def most_work(size: int) -> int:
    """Return the most work that the learner accepts for an image of `size` bytes, in pixels."""
    return max(FREE_WORK, WORK_PER_BYTE * size)


def scans_of(data: View) -> int:
    """Return the number of scans in a JPEG, without the scans of embedded thumbnails."""
    scans, at = 0, 2  # after SOI
    while found := _MARKER.search(data, at):
        at = found.end()
        if found[0][-1] == 0xD9:  # EOI
            break
        scans += found[0][-1] == SOS[-1]
        at += int.from_bytes(data[at : at + 2], "big")
    return scans


class JpegHeader(NamedTuple):
    """Facts that a JPEG states before its first scan, without those of its thumbnails.

    Both attributes are True for a header with too many parts to read.

    Attributes:
        app1: whether the file has an APP1 segment, which may contain an orientation.
        lossless: whether its frame is lossless. libjpeg-turbo never decodes such a frame at a
            smaller size, but simplejpeg then reserves memory for the smaller size: the decoder
            writes beyond its end.
    """

    app1: bool
    lossless: bool


def jpeg_header(data: View) -> JpegHeader:
    """Read the markers of a JPEG before its first scan, as libjpeg does."""
    markers: set[int] = set()
    at = 2  # after SOI
    for _ in _parts(data):
        found = _MARKER.search(data, at)
        if found is None or found[0][-1] in (0xD9, SOS[-1]):
            return JpegHeader(_APP1 in markers, not _LOSSLESS.isdisjoint(markers))
        markers.add(found[0][-1])
        at = found.end()
        at += int.from_bytes(data[at : at + 2], "big")
    return JpegHeader(app1=True, lossless=True)


def decode_cost(codec: str, payload: View) -> int:
    """Return the cost of a sample in bytes: its size, or more if it takes long to decode.

    Never raises. The cost is the size if the header cannot be read, or if the learner will reject
    a PNG or WebP by its header. The running time is at most linear in the size of the payload.
    """
    size = len(payload)
    if codec not in _WORK:
        return size
    most = most_work(size)
    work = _WORK[codec](payload)
    return max(size, min(work, most) // WORK_PER_CHARGED_BYTE)


def extra_cost(rows: Iterable[Mapping[str, Any]], payload: View) -> int:
    """Return the cost of a packet's samples beyond their size, in bytes.

    Args:
        rows: the maps of the samples in the packet's header, already checked.
        payload: the payload of the packet.
    """
    extra, at = 0, 0
    for row in rows:
        size = row["size"]
        if row["codec"] in _WORK:
            extra += decode_cost(row["codec"], payload[at : at + size]) - size
        at += size
    return extra


def _jpeg_work(data: View) -> int:
    """Return the decode work of a JPEG, or 0 if it costs no more than its bytes.

    Scans are counted by searching for the SOS bytes. The search is quick, and the count is never
    too low.
    """
    if data[:2] != b"\xff\xd8":
        return 0
    at = 2
    for _ in _parts(data):
        found = _MARKER.search(data, at)
        if found is None or found[0][-1] in (0xD9, SOS[-1]):
            return 0  # no size
        at, kind = found.end(), found[0][-1]
        if kind in _SOF:
            break
        at += int.from_bytes(data[at : at + 2], "big")
    else:
        return _UNKNOWN
    height, width = (int.from_bytes(data[at + n : at + n + 2], "big") for n in (3, 5))
    pixels, size = width * height, len(data)
    if size < at + 8:
        return 0
    if data[at + 7] not in (1, 3):  # Pillow decodes CMYK in full
        return max(pixels, decode_work(pixels, _count_scans(data)))
    if decode_work(pixels, size // _SCAN_BYTES) <= WORK_PER_CHARGED_BYTE * size:
        return 0  # even with the most scans that fit, it costs only its bytes
    return decode_work(pixels, _count_scans(data))


def _parts(data: View) -> range:
    """Return a range with a number for each part of a header that may be read.

    A small file may have only a few parts, because the parts of real headers have more than 64
    bytes on average. A packet of small files with shorter parts would take the receiver a second.
    """
    return range(min(_MOST_PARTS, 16 + len(data) // 64))


def _count_scans(data: View) -> int:
    """Return how often SOS occurs in the bytes. This is several times faster than bytes.count."""
    byte_N = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((byte_N[:-1] == SOS[0]) & (byte_N[1:] == SOS[1])))


def _png_work(data: View) -> int:
    """Return the decode work of a PNG from the last IHDR before the pixels, which Pillow uses."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        return 0
    at, work = 8, 0
    for _ in _parts(data):
        kind = data[at + 4 : at + 8]
        if kind == b"IHDR" and len(data) >= at + 16:
            width, height = (int.from_bytes(data[at + n : at + n + 4], "big") for n in (8, 12))
            work = decode_work(width * height)
        elif kind == b"IDAT" or len(kind) < 4:
            return _accepted(work, data)
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return _UNKNOWN


def _webp_work(data: View) -> int:
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return 0
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        sides = [int.from_bytes(data[n : n + 3], "little") + 1 for n in (24, 27)]
    elif kind == b"VP8 ":
        sides = [int.from_bytes(data[n : n + 2], "little") & 0x3FFF for n in (26, 28)]
    elif kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        sides = [(bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1]
    else:
        return 0
    return _accepted(decode_work(sides[0] * sides[1]), data)


def _accepted(work: int, data: View) -> int:
    """Return the work, or 0 if the learner will reject the image by its header."""
    return work if work <= most_work(len(data)) else 0


_WORK = {"jpeg": _jpeg_work, "png": _png_work, "webp": _webp_work}
