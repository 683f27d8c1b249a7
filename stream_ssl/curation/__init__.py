"""Curation: choose a small, diverse set of pictures from a large source, without a learner.

`Curator` reads a source once. `write_results` writes what it kept as WebDataset shards, Parquet, a
FAISS index and a report. The command is `stream-ssl curate`.
"""

from stream_ssl.curation.curator import Curator, Dropped, Kept, Progress
from stream_ssl.curation.results import write_results

__all__ = ["Curator", "Dropped", "Kept", "Progress", "write_results"]
