"""Writes a trained role as a model: the trainer's export, with what only the run knows."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rlhf.errors import DataError
from rlhf.interfaces import Algorithm
from rlhf.steps import STEP_SEPARATOR

from rlhf_runtime.checkpoint import read_json, write_json
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.prompts import Prompts
from rlhf_runtime.models.roles import Role

CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""transformers and vLLM read this file before the template in the tokenizer's config."""
NAMED_TEMPLATES, PROCESSOR_TEMPLATE = "additional_chat_templates", "chat_template.json"
"""Other templates of a tokenizer, which are used in place of the default where they have its name or there are tools,
and the template of an older processor."""
GENERATION_CONFIG = "generation_config.json"


class ModelFiles:
    """Writes the models of a run. Made before the first step.

    Args:
        template: how the run's rows become tokens.
    """

    def __init__(self, config: RunFile, algorithm: Algorithm, template: Prompts) -> None:
        self._config, self._algorithm, self._template = config, algorithm, template
        self._end_tokens: tuple[int, ...] = ()
        """Those that end an answer of the data, in addition to the model's."""
        with suppress(DataError):  # a template may refuse a conversation without a system message; rows have theirs
            self._end_tokens = template.end_token_ids

    def write_policy(self, policy: Role, path: Path) -> None:
        """Write the policy, or its moving average if one is kept, in Hugging Face format. ``config.json`` contains the
        algorithm's ``model_config`` and, if rows were solutions in steps, the separator of steps. A chat template that
        the run file names replaces all of the tokenizer's own."""
        self.write_role(policy, path)
        own = self._algorithm.model_config()
        if self._algorithm.data == "steps":
            own = {STEP_SEPARATOR: self._config.data.step_separator, **own}
        if own:
            config = path / "config.json"
            write_json(config, {**read_json(config), **own})

    def write_role(self, role: Role, path: Path) -> None:
        """A trained role in Hugging Face format. Where it generates, every end token of the run ends its texts."""
        role.every("export", path, "ema" if "ema" in role.facts.views else "live")
        if (path / GENERATION_CONFIG).is_file():
            _add_end_tokens(path / GENERATION_CONFIG, (*role.facts.eos_token_ids, *self._end_tokens))
        if self._config.data.chat_template is not None:
            template: str = self._template.tokenizer.chat_template
            (path / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
            shutil.rmtree(path / NAMED_TEMPLATES, ignore_errors=True)
            (path / PROCESSOR_TEMPLATE).unlink(missing_ok=True)


def _add_end_tokens(generation_config: Path, tokens: Iterable[int]) -> None:
    """Write ``tokens`` behind the end tokens of a generation config."""
    config = read_json(generation_config)
    own = config.get("eos_token_id")
    own = own if isinstance(own, list) else [] if own is None else [own]
    ends = list(dict.fromkeys([*own, *tokens]))
    if ends != own:
        write_json(generation_config, {**config, "eos_token_id": ends})
