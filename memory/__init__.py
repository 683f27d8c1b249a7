"""A working memory for contrastive learning from a stream. Needs torch and numpy alone."""

from memory.admission import Admission
from memory.draws import Draw, Negatives
from memory.duplicates import Duplicates
from memory.memory import WorkingMemory
from memory.state import load, save
from memory.stats import MemoryStats

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
