"""A working memory for contrastive learning from a stream. Needs torch and numpy alone."""

from memory.admission import Admission
from memory.draws import Draw, Negatives
from memory.duplicates import Duplicates
from memory.files import load, save
from memory.stats import MemoryStats
from memory.working import WorkingMemory

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
