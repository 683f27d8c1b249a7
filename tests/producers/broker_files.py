"""Helpers for tests of brokers: images, `produce` as a process, and the samples that it sent."""

import io
import subprocess
import sys

import numpy as np
from PIL import Image
from waiting import until

from stream_ssl.journal.reader import JournalReader
from stream_ssl.wire import Data


def image_files(count):
    """Return the given number of different PNG files."""
    files = []
    for number in range(count):
        file = io.BytesIO()
        pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(pixels).save(file, "png")
        files.append(file.getvalue())
    return files


def start_producing(running, *arguments):
    """Start `stream-ssl produce` with a running receiver as its target."""
    command = ("produce", arguments[0], "--to", running.endpoint, "--name", "robot")
    return subprocess.Popen(
        [sys.executable, "-m", "stream_ssl.app.cli", *command, *arguments[1:]],
        stderr=subprocess.PIPE,
        text=True,
    )


def on_disk(running):
    """Return all samples of the journal, in order."""
    reader, position, found = JournalReader(running.journal.path), 1, []
    while records := reader.read(position):
        for record in records:
            found += Data(record.sequence, record.header, record.payload).samples()
        position = records[-1].position + 1
    reader.close()
    return found


def wait_for(running, count, process):
    """Wait until the journal holds the given number of samples."""

    def there():
        assert process.poll() is None, process.communicate()[1]
        return running.total("acked_samples") >= count

    until(there)
