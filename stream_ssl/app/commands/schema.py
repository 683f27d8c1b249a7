"""stream-ssl schema: print a JSON Schema of the config file, for editors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

DESCRIPTION = (
    "Print a JSON Schema (2020-12) of the config file: names, types, choices, defaults and "
    "descriptions. `run` knows the sections of both roles. `receiver` and `learner` check the "
    "sections of their role alone; `receiver` needs no torch."
)


def main(arguments: Sequence[str]) -> int:
    """Print the schema of a role, and return the exit status."""
    parser = schema_parser()
    role = parser.parse_args(list(arguments)).role
    from stream_ssl.config import options
    from stream_ssl.config.schema import config_schema

    made = {
        "run": options.run_parser,
        "receiver": options.receiver_parser,
        "learner": options.learner_parser,
    }[role]()
    schema = config_schema(made, f"stream-ssl {role}: config file")
    print(json.dumps(schema, indent=1, ensure_ascii=False))
    return 0


def schema_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="stream-ssl schema", description=DESCRIPTION)
    parser.add_argument(
        "role",
        nargs="?",
        default="run",
        choices=["learner", "receiver", "run"],
        help="whose sections; default: run",
    )
    return parser
