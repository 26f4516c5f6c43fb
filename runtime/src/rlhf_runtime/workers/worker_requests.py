"""What the driver sends to a worker process: a plugin's reference, and calls. Both are pickled."""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from pathlib import Path
from typing import Any

from rlhf.errors import RlhfError
from rlhf.plugins import Resolved
from rlhf.plugins.resolved import IN_PROCESS
from rlhf.types import Row

MOST_COPIED = 64 << 20
"""Maximum bytes of a class defined in this process, with everything that it uses, when it is copied to a worker."""


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {Row: lambda row: (Row, (row.columns, row.source, row.index))}


def request(method: str, arguments: tuple[Any, ...]) -> bytes:
    """The bytes of a call. Rows are sent without their layout: only the run reads it, and another Python cannot import
    its class."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump((method, arguments))
    return buffer.getvalue()


def reference(resolved: Resolved, error: type[RlhfError]) -> bytes:
    """Bytes from which a worker process obtains the plugin's class: for an installed plugin its reference, by which the
    worker imports it; for a class defined in this process the class itself with the code that it uses (cloudpickle)."""
    cls = resolved.cls
    if resolved.distribution != IN_PROCESS:
        return pickle.dumps(resolved)
    import cloudpickle

    module = sys.modules.get(cls.__module__)
    by_value = _is_local(cls.__module__) and cls.__module__ not in cloudpickle.list_registry_pickle_by_value()
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        payload: bytes = cloudpickle.dumps(resolved)
    except Exception as cause:  # pickle.PicklingError, TypeError, and whatever an object's __reduce__ raises
        raise error(
            f"{resolved}: it is plain `def`, so it runs in worker processes and is copied to them, and something that "
            f"it uses cannot be copied: {type(cause).__name__}: {cause}. Make that inside of the function, or write "
            "the function as `async def`: it is then called in this process."
        ) from cause
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    if len(payload) > MOST_COPIED:
        raise error(
            f"{resolved}: it is plain `def`, so it is copied to worker processes, and it uses {len(payload) >> 20} MiB "
            f"of data of this process; at most {MOST_COPIED >> 20} MiB are copied. Load the data inside of the "
            "function, or write the function as `async def`: it is then called in this process."
        )
    return payload


def _is_local(module: str) -> bool:
    """Whether a module's code must be copied to worker processes: the code of a script, a notebook or a test, which
    another process may not be able to import. False for installed packages, which workers import, and for ``__main__``,
    which cloudpickle always copies."""
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = module.partition(".")[0] in sys.stdlib_module_names or "site-packages" in Path(file or "").parts
    return module in sys.modules and module != "__main__" and not installed
