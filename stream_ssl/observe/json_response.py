"""A response of JSON that may name any file."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


class JsonResponse(JSONResponse):
    """A response of JSON in UTF-8.

    The name of a file may hold bytes that are not UTF-8. Python keeps each of them as a surrogate,
    which UTF-8 lacks, so the response has the surrogate's escape.
    """

    def render(self, content: Any) -> bytes:
        """Return the bytes of the body. A number that is not finite raises ValueError."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")
