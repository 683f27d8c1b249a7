"""Streams shaped like those of the world: biased, repetitive, correlated in time, paced."""

from producers.shaping.continual import Continual
from producers.shaping.episodes import Stalls, Video
from producers.shaping.parked import Parked
from producers.shaping.popularity import Popularity
from producers.shaping.rate import RateLimit
from producers.shaping.shaped import Shaped
from producers.shaping.shift import Shift

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
