"""The generator ``sglang_server``: SGLang servers that are already running.

SGLang itself runs in the servers only, which load :mod:`rlhf_plugin_sglang.worker` as a plugin of theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl

if TYPE_CHECKING:
    from rlhf.interfaces import Generator


@hookimpl
def rlhf_register_generator() -> list[type[Generator]]:
    from rlhf_plugin_sglang.generator import SglangServerGenerator

    return [SglangServerGenerator]
