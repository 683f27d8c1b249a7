"""A working memory for contrastive learning from a stream. It needs only torch and numpy."""

from stream_ssl.memory.admission import Admission
from stream_ssl.memory.draws import Draw, Negatives
from stream_ssl.memory.duplicates import Duplicates
from stream_ssl.memory.memory import WorkingMemory
from stream_ssl.memory.state import load, save
from stream_ssl.memory.stats import MemoryStats

__all__ = [
    "Admission",
    "Draw",
    "Duplicates",
    "MemoryStats",
    "Negatives",
    "WorkingMemory",
    "load",
    "save",
]
