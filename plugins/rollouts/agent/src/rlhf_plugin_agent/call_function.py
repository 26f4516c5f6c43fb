"""Calls the function and sends its result back. Run by the program's Python, which need not have this package.

Only the standard library may be imported here.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import sys
from typing import Any


def main(path: str, name: str) -> None:
    result = os.fdopen(int(os.environ.pop("RLHF_RESULT_FD")), "w")
    os.set_inheritable(result.fileno(), False)
    task = json.load(sys.stdin)
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    returned = getattr(module, name)(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    if inspect.isawaitable(returned):
        returned = asyncio.run(_awaited(returned))
    if hasattr(returned, "item"):  # a number of numpy or torch
        returned = returned.item()
    json.dump({"reward": returned}, result)
    result.close()


async def _awaited(returned: Any) -> Any:
    return await returned


if __name__ == "__main__":
    main(*sys.argv[1:])
