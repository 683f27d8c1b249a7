"""Print constraints to the lowest versions that pyproject.toml allows to users."""

import re
import sys
import tomllib
from pathlib import Path

TOOLS = {"browser", "dev", "docs", "manifests"}  # what tests and builds use

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
parts = [project["dependencies"], *(extras[name] for name in extras.keys() - TOOLS)]
for needed in sorted({one for part in parts for one in part}):
    if found := re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", needed):
        sys.stdout.write(f"{found[1]}=={found[2]}\n")
