"""The generator ``sglang_server``: SGLang servers that are already running.

SGLang itself runs only in the servers, which load :mod:`rlhf_plugin_sglang.worker` as an SGLang plugin.
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
