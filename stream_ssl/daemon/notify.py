"""Tell systemd when a process is ready, works and stops (sd_notify(3))."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Self

from stream_ssl.background import Background
from stream_ssl.observe.health import Health
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

EVERY = 5.0
"""Seconds between two messages without a watchdog. With one, a third of the watchdog's time."""


class Notifier:
    """A context that reports a process's state to systemd. Without systemd it does nothing.

    It sends READY on entry, so enter it once the process serves. It feeds the watchdog while every
    loop ticks within its patience: systemd restarts a process whose loop hangs, but not one that
    waits for samples.

    Args:
        environment: names systemd's socket (NOTIFY_SOCKET, WATCHDOG_USEC).
    """

    def __init__(self, health: Health, environment: Mapping[str, str] = os.environ) -> None:
        self._health = health
        self._limited_log = RateLimitedLogger(log, seconds=600.0, lines=3)
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # an abstract socket name of Linux
            self._address = "\0" + self._address[1:]
        watchdog = environment.get("WATCHDOG_USEC", "")
        every = int(watchdog) / 3e6 if watchdog.isdecimal() and int(watchdog) else EVERY
        self._background = Background("notify", self._tell, every)

    def __enter__(self) -> Self:
        if self._address:
            self._say("READY=1")
            self._tell()
            self._background.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._background.close()
        if self._address:
            self._say("STOPPING=1")

    def _tell(self) -> None:
        live, ready = self._health.live(), self._health.ready()
        status = "; ".join(
            f"{name}: {part.get('detail') or 'not ready'}"
            for name, part in ready.parts.items()
            if not part["ok"]
        )
        line = " ".join(status.split()) or "ready"  # a line break would end the assignment
        self._say(f"STATUS={line}" + ("\nWATCHDOG=1" if live.ok else ""))

    def _say(self, message: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(1.0)
                sender.sendto(message.encode(errors="replace"), self._address)
        except OSError as error:
            line = message.partition("\n")[0]
            self._limited_log.warning("send", f"cannot send {line!r} to systemd: {error}")
