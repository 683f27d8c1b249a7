"""Wrappers that add class bias, duplicates, correlation in time or a pace to any source."""

from stream_ssl.producers.shaping.continual import Continual
from stream_ssl.producers.shaping.episodes import Stalls, Video
from stream_ssl.producers.shaping.parked import Parked
from stream_ssl.producers.shaping.popularity import Popularity
from stream_ssl.producers.shaping.rate import RateLimit
from stream_ssl.producers.shaping.shaped import Shaped
from stream_ssl.producers.shaping.shift import Shift

__all__ = [
    "Continual",
    "Parked",
    "Popularity",
    "RateLimit",
    "Shaped",
    "Shift",
    "Stalls",
    "Video",
]
