"""The command line as `python -m stream_ssl COMMAND`; torchrun starts ranks so (docs/scale.md)."""

import os
import sys

try:
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109 - may be theirs
        del sys.path[0]  # a file of the working folder must not replace a library
except FileNotFoundError:  # the working folder is deleted: `main` says so
    pass

from stream_ssl.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
