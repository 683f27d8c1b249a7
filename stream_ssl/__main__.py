"""`python -m stream_ssl COMMAND`, which is how torchrun starts ranks: see docs/scale.md."""

import sys

from stream_ssl.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
