"""The clock of a producer, which HELLO carries."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from receiver_peer import Running
from waiting import until

from stream_ssl.producers import Producer
from stream_ssl.receiver import greeter


def test_a_receiver_learns_the_clock_of_a_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's clock is 40 days ahead."""
    days = 40 * 86_400.0
    ahead = SimpleNamespace(time=lambda: time.time() + days, time_ns=time.time_ns)
    monkeypatch.setattr(greeter, "time", ahead)
    told: list[Any] = []
    opened = greeter.Greeter._open_session

    def keep(self: greeter.Greeter, *args: Any) -> Any:
        session = opened(self, *args)
        told.append(self._counters.producer_clock["yard"])
        return session

    monkeypatch.setattr(greeter.Greeter, "_open_session", keep)
    with Running(tmp_path) as running, Producer(running.endpoint, name="yard") as producer:
        producer.connect()
        until(lambda: told)
    assert told[0] == pytest.approx(-days, abs=30)
