"""The result of ``rlhf.train``: how the run ended, its metrics, its model."""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from rlhf.errors import ConfigError, RolloutError, brief
from rlhf.plugins import Plugins

from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.config.problems import describe
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import Choice, EvalSection, StreamSection, SyncSection
from rlhf_runtime.jobs.inference import evaluate_model
from rlhf_runtime.observe.progress import shown_metrics
from rlhf_runtime.report.recorded_samples import RecordedSample, read_samples, samples_file

SHOWN_ROWS = 20
"""Maximum number of rows in a notebook's table."""
PROMPT_FIELDS = ("template", "chat_template", "template_kwargs", "system", "max_prompt_tokens", "max_tokens")
"""Fields of ``[data]`` that say how a prompt becomes tokens."""


class MetricRows(list[dict[str, Any]]):
    """The lines of ``metrics.jsonl``: one dict per step, with ``step`` and every metric. A notebook shows a table."""

    def _repr_html_(self) -> str:
        columns = ["step", *shown_metrics({name: None for row in self for name in row})]
        shown_rows = min(len(self), SHOWN_ROWS)
        rows = [self[i * (len(self) - 1) // max(1, shown_rows - 1)] for i in range(shown_rows)]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in columns)}</tr>" for row in rows)
        caption = f"{len(rows)} of {len(self)} steps, {len(columns) - 1} of the metrics"
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    status: Literal["finished", "stopped"]
    """``stopped``: the run ended before its last step and saved a checkpoint. A failed run raises its error instead."""
    reason: str
    """The reason why the run stopped: the signal, an observer's reason, or evaluations without improvement. Empty if it
    finished."""
    output: Path
    """The run's folder: ``config.toml``, ``manifest.json``, ``metrics.jsonl``, checkpoints, samples and the model."""
    model_path: Path
    """Folder of the trained model with its tokenizer, in the format of transformers."""
    metrics: MetricRows = field(repr=False)
    """One dict per step, as in ``metrics.jsonl``."""
    config: RunFile = field(repr=False)
    """The resolved run file."""

    def samples(self, step: int | None = None) -> list[RecordedSample]:
        """The samples that a step was trained on, each with ``prompt``, ``completion``, ``reward``, ``rewards`` by name
        and more.

        Args:
            step: None: the last step that has samples.

        Raises ConfigError: the step has none, or the algorithm samples nothing.
        """
        return read_samples(*samples_file(self.output, step))

    def generate(
        self,
        prompts: Sequence[str | list[dict[str, Any]]],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> list[str]:
        """Answers of the trained model, one for each prompt.

        Each call loads the model from :attr:`model_path` with the run's own generator and unloads it afterwards.

        Args:
            prompts: texts, or conversations as lists of ``{role, content}``. The template and the system message of
                the run are applied to them. ``data.input_template`` is not applied, because it needs columns.
            max_new_tokens: maximum tokens of each answer; None: as in training.
            temperature: 0 always takes the most likely token.

        Raises ConfigError, DataError or RolloutError.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
            raise ConfigError(f"generate(): prompts must be a list of texts or conversations, got {brief(prompts)}")
        for number, prompt in enumerate(prompts):
            if not prompt or not isinstance(prompt, str | list):
                raise ConfigError(
                    f"generate(): prompt {number} is {brief(prompt)}; allowed: a text or a list of messages, not empty"
                )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prompts.jsonl"
            file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
            config = self._answering(file, max_new_tokens, temperature)
            groups = evaluate_model(config, Plugins.discover())[1]
        answers = [group.trajectories[0] for group in groups]
        if failed := next((t for t in answers if t.status == "failed"), None):
            raise RolloutError(f"generate(): prompt {failed.row.index}: {failed.error}")
        return [t.completion for t in answers]

    def _answering(self, file: Path, max_new_tokens: int | None, temperature: float) -> RunFile:
        """The run file, changed to answer the prompts in ``file`` with the trained model."""
        config = self.config
        data = DataSection(
            eval=(SourceSection(path=str(file)),), **{name: getattr(config.data, name) for name in PROMPT_FIELDS}
        )
        tokens = config.eval.max_new_tokens if max_new_tokens is None else max_new_tokens
        try:
            section = EvalSection(temperature=temperature, max_new_tokens=tokens)
        except ValidationError as error:
            raise ConfigError(f"generate(): {'; '.join(describe(error, EvalSection, '', {}))}") from None
        return config.model_copy(
            update={
                "data": data,
                "eval": section,
                "policy": config.policy.model_copy(update={"model": str(self.model_path)}),
                "reward": (),
                "env": None,
                "rollout": Choice(use="single_turn"),
                "stream": StreamSection(),
                "sync": SyncSection(),
                "run": config.run.model_copy(update={"resume": False}),
            }
        )


def _cell(value: Any) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value))
