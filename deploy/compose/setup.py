"""Make the receiver's keys, its allow-list and the page's token in a folder, unless they exist."""

import os
import secrets
import sys
from pathlib import Path

from stream_ssl.wire.keys import Keys

folder = Path(sys.argv[1])
folder.chmod(0o750)  # the group: Prometheus reads the token
if not (folder / "receiver.secret.json").exists():
    Keys.generate("receiver").save(folder)
allow = folder / "allow.json"
if not allow.exists():
    allow.write_text("{}\n")
token = folder / "http.token"
if not token.exists():
    with os.fdopen(os.open(token, os.O_CREAT | os.O_WRONLY, 0o640), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
