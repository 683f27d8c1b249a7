"""Print constraints to the lowest versions that pyproject.toml allows to users."""

import re
import sys
import tomllib
from pathlib import Path

TOOLS = {"browser", "dev", "docs", "manifests"}  # what tests and builds use

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
parts = [project["dependencies"], *(extras[name] for name in extras.keys() - TOOLS)]
lines = "\n".join(needed for part in parts for needed in part)
bounds = re.findall(r"^([\w-]+)(?:\[.*\])?>=([\d.]+)", lines, re.MULTILINE)
bounds.sort(key=lambda bound: [int(number) for number in bound[1].split(".")])
for name, version in dict(bounds).items():  # the highest bound of each, over all extras
    sys.stdout.write(f"{name}=={version}\n")
