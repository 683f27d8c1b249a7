"""The metrics of a restored memory, before the learner gets its first batch."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import pytest

from stream_ssl.daemon.learn import Process


@pytest.mark.parametrize("slots", [0, 64])
def test_a_restored_memory_is_exported_before_the_first_batch(slots: int) -> None:
    """Otherwise the page calls a full memory empty while no batch comes."""
    process = MagicMock()
    process.learner.memory.occupied_of_all = slots
    process.learner.run.return_value = iter(())
    Process.run(process, threading.Event())
    names = [name for name, _, _ in process.mock_calls]
    begun = names[: names.index("learner.run")]
    assert ("_observers.survey_memory" in begun) == (slots > 0)
