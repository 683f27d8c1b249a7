"""The command line as `python -m stream_ssl COMMAND`; torchrun starts ranks so (docs/scale.md)."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109 - pathlib may be theirs
    del sys.path[0]  # a file of the working folder must not replace a library

from stream_ssl.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
