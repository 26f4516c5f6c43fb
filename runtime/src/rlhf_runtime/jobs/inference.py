"""Inference with the rollouts, rewards, losses and data of training, without training: `rlhf eval`, `rlhf generate` and
`rlhf chat`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Generator
from rlhf.plugins import Plugins
from rlhf.seeds import derive_seed
from rlhf.types import GenerationRequest, Group, Needs, RoleSpec, Sampling
from rlhf_hub.hub import Commits

from rlhf_runtime.checkpoint.saved_groups import TellPrompt, write_lines
from rlhf_runtime.checks.order import ANSWERS, check
from rlhf_runtime.checks.run import Job, job_plugins, run_plugins
from rlhf_runtime.checks.sections import READ_OF, SECTIONS_OF_ANSWERS
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.config.load import load
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import ROLES, EvalSection, ModelSection, section_path
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.prompts import Prompts
from rlhf_runtime.loop.evaluate import evaluate_loss, evaluate_rollouts
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.observe.progress import phase
from rlhf_runtime.observe.sample_lines import printable
from rlhf_runtime.observe.sample_metrics import source_metrics
from rlhf_runtime.samples.rollout_settings import evaluation_sampling, evaluation_settings
from rlhf_runtime.samples.rollouts import Sampler
from rlhf_runtime.setup.launch import launch_roles, launch_sampler
from rlhf_runtime.setup.prepare import Prepared, last_start, prepare_run

PARTS = ("launcher", "trainer", "rollout", GENERATOR, "env")
"""The plugins of a job in addition to the rewards."""


class AnswerJob(Job):
    """Answers prompts. Its only role is the policy."""

    name = "answer"

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy"),))


@contextmanager
def answers(config: RunFile, plugins: Plugins) -> Iterator[tuple[Prepared, Sampler]]:
    """Load the policy (and reward models) of a run file with any algorithm, ready to answer evaluation rows."""
    scored, commits = bool(config.reward) or config.env is not None, Commits(last_start(config).get("hub"))
    run = job_plugins(_rows_to_answer(config), plugins, AnswerJob(), PARTS, scored, commits)
    check(run, ANSWERS)
    prepared = prepare_run(run, plugins)
    for note in prepared.data.eval_notes:
        _say(note)
    launcher = prepared.parts["launcher"].build()
    with ExitStack() as resources:
        resources.callback(launcher.shutdown)
        roles = launch_roles(prepared, launcher)
        sampler = launch_sampler(prepared, roles, launcher, _say, resources)
        with phase("first sync of weights to the generator"):
            sampler.weights.push(0)
        yield prepared, sampler


def _rows_to_answer(config: RunFile) -> RunFile:
    """The run file with the rows to answer as its only rows. They are read as prompts without answers."""
    rows = tuple(s.model_copy(update={"probability": None}) for s in config.data.eval or config.data.train)
    unread = [name for name, forms in READ_OF.items() if "prompts" not in forms]
    data = {"train": rows, "eval": rows, "loss_on": "completion"}
    data |= {name: DataSection.model_fields[name].default for name in unread}
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def _say(note: str) -> None:
    print(printable(f"note: {note}"), file=sys.stderr)  # noqa: T201


def evaluate_model(
    config: RunFile,
    plugins: Plugins,
    save: Path | None = None,
) -> tuple[Metrics, list[Group], TellPrompt]:
    """Answer and score every evaluation row. ``save``: a file for answers. Returns the metrics, with
    ``reward/SOURCE/mean`` if there are several rewards, the groups, and the function that returns the prompt of a
    sample."""
    with answers(config, plugins) as (prepared, sampler):
        rows, prompt_of = prepared.data.eval_rows(config.eval.max_rows), prepared.data.template.prompt_of
        settings = evaluation_settings(config, _say)
        with phase("answering prompts") as count:
            metrics, groups = evaluate_rollouts(sampler.rollouts, rows, settings, prepared.evaluation, count=count)
        if save is not None:
            write_lines(save, groups, prompt_of)
        means = {name: mean for name, mean in source_metrics(groups).items() if name.endswith("/mean")}
        metrics |= {f"eval/{name}": mean for name, mean in means.items() if len(means) > 1}
        return _with_left_out(metrics, prepared.data), groups, prompt_of


def evaluate_rows(config: RunFile, plugins: Plugins) -> Metrics:
    """The losses of the run file's algorithm on every evaluation row, and their metrics.

    Raises ConfigError if the algorithm learns from prompts, compares the model with itself, or needs a head that the
    model does not have.
    """
    name = config.algorithm.use
    if plugins.resolve("algorithm", name).cls.data == "prompts":
        raise ConfigError(
            f"--algo {name}: this algorithm learns from prompts and has no losses on rows. Omit --algo to score the "
            "model's answers."
        )
    run = run_plugins(_rows_to_evaluate(config, plugins), plugins, scored=False)
    sections = {
        section: {name: value for name, value in getattr(run.config, section).items() if name in run.roles}
        for section in ("roles", "placement")
    }
    run = replace(run, config=run.config.model_copy(update=sections))
    check(run)
    for role in run.roles.values():
        if role.like == "policy" and role.model is None and run.section(role.name).model is None:
            raise ConfigError(
                f"--algo {name}: the role {role.name!r} would use the model that is evaluated. Name the model that the "
                f"role used in training: --{section_path(role.name)}.model PATH."
            )
    prepared = prepare_run(run, plugins)
    for note in prepared.data.eval_notes:
        _say(note)
    held_out = prepared.data.eval_rows(config.eval.max_rows)
    launcher = prepared.parts["launcher"].build()
    with ExitStack() as resources:
        resources.callback(launcher.shutdown)
        roles = launch_roles(prepared, launcher)
        for model in roles.values():
            if model.facts.random_head:
                raise ConfigError(
                    f"--algo {name}: the model {model.spec.path!r} has no {model.spec.role.head!r} head, so its losses "
                    "would be random. Name a model that the algorithm trained."
                )
        with phase("evaluating"):
            metrics = evaluate_loss(prepared.algorithm, roles, prepared.data.examples(held_out))
    return _with_left_out(metrics, prepared.data)


def _rows_to_evaluate(config: RunFile, plugins: Plugins) -> RunFile:
    """The run file with the rows to evaluate as its only rows, without what only answers or updates need. Its run may
    be longer than these rows, and may evaluate by answers."""
    rows = tuple(s.model_copy(update={"probability": None}) for s in config.data.eval or config.data.train)
    data = config.data.model_copy(update={"train": rows, "eval": rows})
    training: Collection[str] = plugins.resolve("trainer", config.trainer.use).cls.training_options

    def untrained(options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name not in training}

    def of_role(section: ModelSection) -> ModelSection:
        return section.model_copy(update={"trainer": untrained(section.trainer)})

    trainer = config.trainer.model_copy(update={"options": untrained(config.trainer.options)})
    sections = {name: of_role(getattr(config, name)) for name in ROLES}
    roles = {name: of_role(section) for name, section in config.roles.items()}
    unread = {"reward": (), "env": None, "curriculum": None, "observer": ()}
    unread |= {name: RunFile.model_fields[name].get_default(call_default_factory=True) for name in SECTIONS_OF_ANSWERS}
    rest = {"data": data, "trainer": trainer, "roles": roles, "eval": EvalSection(max_rows=config.eval.max_rows)}
    return config.model_copy(update={**unread, **sections, **rest})


def _with_left_out(metrics: Metrics, data: TrainData) -> Metrics:
    """The metrics of an evaluation without the prefix ``eval/``. If rows were left out, ``left_out`` is their
    number."""
    if left_out := data.eval_dropped + data.eval_bad_rows:
        metrics["eval/left_out"] = float(left_out)
    return {name.removeprefix("eval/"): value for name, value in metrics.items()}


class Conversation:
    """A conversation with one model. The messages are rendered by the chat template, as in a run. For a model without a
    chat template, the texts are concatenated."""

    def __init__(self, generator: Generator, template: Prompts, sampling: Sampling, seed: int) -> None:
        self._generator, self._template, self._sampling, self._seed = generator, template, sampling, seed
        self._count = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        system = self._template.section.system
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.prompt = ""
        """The model's last input, as text."""

    def answer(self, text: str) -> Iterator[str]:
        """The answer to ``text``, in pieces. The exchange is added to the conversation when the answer has ended.

        Raises ConfigError or DataError if the model cannot read the conversation, for example because it is too long.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        chat, tokens = self._template.chat, self._template.tokens
        if chat is None:
            self.prompt = "".join(message["content"] for message in messages)
        else:
            self.prompt = chat.text(messages, answer=True)
        ids = tokens.ids(self.prompt)
        if chat is None:
            ids = [*tokens.begin(ids), *ids]
        self._require_room(len(ids))
        self._count += 1
        request = GenerationRequest(ids, derive_seed(self._seed, "chat", self._count), self._sampling)
        answer_ids: list[int] = []
        prefix = ""
        for piece in self._generator.stream(request):
            answer_ids += piece
            full_text = self._template.decode(answer_ids)
            if len(full_text) > len(prefix) and not full_text.endswith("\ufffd"):  # the rest of a character follows
                yield full_text[len(prefix) :]
                prefix = full_text
        full_text = self._template.decode(answer_ids)
        if len(full_text) > len(prefix):
            yield full_text[len(prefix) :]
        self._messages = [*messages, {"role": "assistant", "content": full_text}]

    def _require_room(self, tokens: int) -> None:
        longest = self._template.section.max_tokens
        if tokens + self._sampling.max_new_tokens > longest:
            raise ConfigError(
                f"the conversation has {tokens} tokens. With an answer of {self._sampling.max_new_tokens} tokens it "
                f"exceeds the limit of {longest}. Start again with /reset, or set --data.max_tokens or --max-tokens."
            )


@contextmanager
def conversation(flags: list[tuple[str, str | None]]) -> Iterator[Conversation]:
    """A conversation with the model that ``flags`` of a run file name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text(json.dumps({"prompt": "Hello"}) + "\n")  # an AnswerJob checks its rows
        config = load(None, [*flags, ("data.eval", str(file))], algorithm="answer")
        with answers(config, Plugins.discover()) as (prepared, sampler):
            config = prepared.config
            template, sampling = prepared.data.template, evaluation_sampling(config)
            yield Conversation(sampler.rollouts.generator, template, sampling, config.run.seed)
