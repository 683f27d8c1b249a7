"""Imported by the fork server (tests/forked.py), so that no fork builds these parsers again."""

from __future__ import annotations

import parsers

from stream_ssl.app.commands import produce
from stream_ssl.config import options

parsers.share(options, *parsers.OF_ROLES)
parsers.share(produce, "source_parser")
options.receiver_parser()
options.receiver_parser("run")
options.learner_parser()
produce.source_parser("synthetic")
