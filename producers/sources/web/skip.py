"""The reason why a URL gives no image."""

from __future__ import annotations

import time


class Skip(Exception):
    """A URL gives no image. `reason` names its counter, and the message has the details.

    Attributes:
        silent: whether the host did not answer at all, so that the network may be down.
        offline: whether the error shows that this machine has no network, or no name server.
        at: when it was raised, in monotonic seconds.
    """

    def __init__(self, reason: str, why: str, silent: bool = False, offline: bool = False) -> None:
        super().__init__(why)
        self.reason, self.silent, self.offline = reason, silent, offline
        self.at = time.monotonic()
