"""The child process of a probe: ``python -m rlhf_cli.doctor.probe_process MODULE FUNCTION JSON``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

from rlhf.errors import RlhfError
from rlhf.plugins.registration import first_cause


def main(module: str, function: str, argument: str) -> None:
    """Run a probe. Standard output gets one line for each reported value, ``{"value": ...}``, and one for an exception,
    ``{"error": text}``. Prints of libraries go to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(key: str, value: object) -> None:
        out.write(json.dumps({key: value}, default=str) + "\n")
        out.flush()

    try:
        getattr(importlib.import_module(module), function)(json.loads(argument), lambda value: write("value", value))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        write("error", str(error) if isinstance(error, RlhfError) else first_cause(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skip what libraries do at exit
