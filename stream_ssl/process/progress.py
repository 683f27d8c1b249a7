"""The progress of a command: a bar in a terminal, and lines in the log elsewhere."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

log = logging.getLogger("stream_ssl.progress")

LOG_SECONDS: Final = 30.0


class ShownProgress(Progress):
    """A bar that disappears at the end. Without a terminal, a log line every 30 seconds."""

    def __init__(self, *columns: str | ProgressColumn) -> None:
        console = Console(stderr=True)
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._due_s = time.monotonic() + LOG_SECONDS

    def update(self, task_id: TaskID, *arguments: Any, **changes: Any) -> None:
        """Change a task; see `rich.progress.Progress.update`."""
        super().update(task_id, *arguments, **changes)
        if not self.console.is_terminal and time.monotonic() >= self._due_s:
            task = next(task for task in self.tasks if task.id == task_id)
            total = "" if task.total is None else f" of {task.total:,.0f}"
            done = f": {task.completed:,.0f}{total}" if task.completed else ""
            log.info("%s%s", task.description, done)
            self._due_s = time.monotonic() + LOG_SECONDS
