"""Writes a row for each example of an environment: ``python -m rlhf_plugin_verifiers ID --python PYTHON``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from rlhf.errors import ConfigError
from rlhf.supervisor import supervised

from rlhf_plugin_verifiers.config import VerifiersConfig, check_python, own_python
from rlhf_plugin_verifiers.process import PROGRAM


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlhf_plugin_verifiers", description=__doc__)
    parser.add_argument("id", help="name of the environment")
    parser.add_argument("--args", default="{}", help="arguments of its load_environment, as JSON")
    parser.add_argument("--python", help="the Python that has verifiers and the environment (default: this one)")
    parser.add_argument("--split", default="train", choices=("train", "eval"))
    parser.add_argument("--first", type=int, default=0, help="number of the first example (default: %(default)s)")
    parser.add_argument("--rows", type=int, help="number of rows (default: all examples)")
    options = parser.parse_args()
    try:
        config = VerifiersConfig(id=options.id, args=json.loads(options.args), python=options.python)
        if options.first < 0 or (options.rows is not None and options.rows < 1):
            raise ValueError("--first must be at least 0 and --rows at least 1")
        check_python(config)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    rows = {"split": options.split, "first": options.first, "count": options.rows}
    settings = json.dumps({"id": config.id, "args": dict(config.args), "rows": rows})
    command = supervised([own_python(config.python), str(PROGRAM), settings])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            row = json.loads(line)
            if "loaded" in row:
                sys.exit(f"the environment {config.id!r} cannot be used: {row['loaded']}")
            sys.stdout.write(json.dumps(row) + "\n")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
