"""Streams shaped like those of the world: biased, repetitive, correlated in time, paced."""

from producers.shaping.continual import Continual
from producers.shaping.parked import Parked
from producers.shaping.rate import RateLimit
from producers.shaping.shaped import Shaped

__all__ = ["Continual", "Parked", "RateLimit", "Shaped"]
