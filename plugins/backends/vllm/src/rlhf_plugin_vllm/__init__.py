"""The generators ``vllm`` (an engine in this process) and ``vllm_server`` (servers that are already running).

Importing this package imports neither torch nor vLLM. vLLM is imported when the engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl

if TYPE_CHECKING:
    from rlhf.interfaces import Check, Generator


@hookimpl
def rlhf_register_generator() -> list[type[Generator]]:
    from rlhf_plugin_vllm.generator import VllmGenerator
    from rlhf_plugin_vllm.server.generator import VllmServerGenerator

    return [VllmGenerator, VllmServerGenerator]


@hookimpl
def rlhf_register_check() -> list[type[Check]]:
    from rlhf_plugin_vllm.checks import VllmCheck

    return [VllmCheck]
