"""Make the receiver's keys, its allow-list and the page's token in a folder, unless they exist."""

import secrets
import sys
from pathlib import Path

from stream_ssl.durable import write
from stream_ssl.wire.keys import make_secret

folder = Path(sys.argv[1])
folder.chmod(0o750)  # the group: Prometheus reads the token
make_secret(folder, "receiver").save_public(folder)
allow, token = folder / "allow.json", folder / "http.token"
if not allow.exists():
    write(allow, "{}\n")
if not token.exists():
    write(token, f"{secrets.token_urlsafe(32)}\n", mode=0o640)
