"""Errors of the daemon's processes, sent to Sentry if SENTRY_DSN names a project there."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from stream_ssl import __version__

log = logging.getLogger(__name__)


def report_errors(environment: Mapping[str, str] = os.environ) -> None:
    """Send log records from level ERROR on, and uncaught exceptions, if SENTRY_DSN is set.

    Sentry's other variables apply too, such as SENTRY_ENVIRONMENT. The values of local variables
    are not sent, because they contain samples. A server that does not answer holds nothing up.

    Raises:
        ValueError: SENTRY_DSN is not the address of a project.
    """
    address = environment.get("SENTRY_DSN")
    if not address:
        return
    try:
        import sentry_sdk
    except ModuleNotFoundError:
        log.warning(
            "SENTRY_DSN is set and sentry-sdk is not installed, so errors are only logged: "
            "pip install 'stream-ssl[sentry]'"
        )
        return
    try:
        sentry_sdk.init(
            address,
            release=f"stream-ssl@{__version__}",
            auto_enabling_integrations=False,
            include_local_variables=False,
            max_breadcrumbs=20,
        )
    except sentry_sdk.utils.BadDsn as error:
        raise ValueError(f"SENTRY_DSN is not the address of a Sentry project: {error}") from error
