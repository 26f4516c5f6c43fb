"""Scores answers in the data with the rewards of a run file: `rlhf score`. No policy is loaded."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, RewardError
from rlhf.interfaces import GENERATOR, Algorithm
from rlhf.ops.batch import Batch
from rlhf.plugins import Plugins
from rlhf.types import Group, Needs, RoleSpec
from rlhf_hub.hub import Commits
from rlhf_runtime.checkpoint.partial_file import PartialFile
from rlhf_runtime.checkpoint.saved_groups import group_lines
from rlhf_runtime.config.components import resolved_run
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import Choice, ModelSection, SamplingSection, StreamSection, SyncSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.given_answers import GivenAnswers
from rlhf_runtime.data.tokenizer import load_tokenizer
from rlhf_runtime.data.vocabulary import check_vocabularies
from rlhf_runtime.loop.schedule import Schedule
from rlhf_runtime.rewards.reward_models import read_role, score_with_role, together
from rlhf_runtime.rewards.scoring import Scorer
from rlhf_runtime.setup.launch import launch_roles, make_scorer
from rlhf_runtime.setup.plugins import active_reward, device_here, model_of, run_plugins
from rlhf_runtime.setup.preflight import check_parts
from rlhf_runtime.setup.prepare import Prepared, on_processor
from rlhf_runtime.workers.main_thread import MainThread

_AT_ONCE = 64
"""Rows whose answers are scored together. They are written to the disk before the next rows."""


class Score(Algorithm):
    """Learns nothing and holds no policy."""

    name = "score"
    data = "demonstrations"

    def needs(self) -> Needs:
        return Needs(())

    def assemble(self, examples: Sequence[object]) -> tuple[Batch | None, dict[str, float]]:
        return None, {}

    def updates(self, step: int, batch: Batch | None = None) -> list:
        return []


@dataclass(slots=True)
class Scores:
    """Counts and sums of the scored answers."""

    rows: int = 0
    answers: int = 0
    sums: dict[str, list[float]] = field(default_factory=dict)
    """{reward source, or ``reward`` for the weighted sum of all: [sum, answers to which it applied]}."""
    left_out: Counter[str] = field(default_factory=Counter)

    def mean(self, name: str) -> float | None:
        total, count = self.sums.get(name, [0.0, 0])
        return total / count if count else None

    def add(self, groups: Sequence[Group]) -> None:
        self.rows += len(groups)
        for trajectory in (t for group in groups for t in group.trajectories):
            self.answers += 1
            given = {n: (r.value or 0.0) + sum(v for _, _, v in r.steps) for n, r in trajectory.rewards.items()
                     if r.value is not None or r.steps}  # fmt: skip
            if trajectory.reward is not None:
                given["reward"] = trajectory.reward
            for name, value in given.items():
                held = self.sums.setdefault(name, [0.0, 0])
                self.sums[name] = [held[0] + value, held[1] + 1]


def score_answers(
    config: RunFile,
    plugins: Plugins,
    columns: Sequence[str],
    output: Path,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> Scores:
    """Score every answer of ``data.eval`` and write one line per answer to ``output``, in the format of
    `rlhf eval --save`.

    After a failure ``output`` does not exist (or is unchanged). The scores so far are kept in a file beside it, and the
    same call continues from there.

    Args:
        columns: columns of the answers; if empty, they are found by name.
        force: replace ``output``, and start again.

    Raises ConfigError, PluginError, DataError, ModelError or RewardError saying what to change.
    """
    prepared = _prepare(config, plugins)
    for text in prepared.data.notes:
        note(text)
    sources = prepared.data.sources["eval"]
    answers = GivenAnswers(sources, columns, prepared.data.template, prepared.config.data)
    total = min(len(answers), config.eval.max_rows or len(answers))
    file = PartialFile(output, _about(prepared, answers.columns))
    if force:
        file.discard()
    scores = Scores()
    for part in file.resume():
        scores = Scores(part["rows"], part["answers"], part["sums"], Counter(part["left_out"]))
    if scores.rows:
        note(f"continuing after {scores.rows} of {total} rows, from {file.partial}")
    with ExitStack() as closing:
        numbers = iter(range(scores.rows, total))
        if scores.rows < total:
            scorer, main = _scorer(prepared, closing)
        while chunk := list(islice(numbers, _AT_ONCE)):
            groups = [answers.group(number, scores.left_out) for number in chunk]
            main.run(_score(scorer, groups))
            _check(groups, file)
            scores.add(groups)
            lines = list(group_lines((g for g in groups if g.trajectories), prepared.data.template.prompt_of))
            counts = {"rows": scores.rows, "answers": scores.answers, "sums": scores.sums}
            file.add({**counts, "left_out": dict(scores.left_out), "lines": lines})
            progress(scores.rows, total)
    file.publish("lines")
    return scores


async def _score(scorer: Scorer, groups: Sequence[Group]) -> None:
    """Score all groups at once: a server or worker processes get all of them, and a model reads them together. The time
    in which a reward waits for a model does not count towards its deadline."""
    await asyncio.gather(*map(scorer.score, groups))


def _check(groups: Sequence[Group], file: PartialFile) -> None:
    """Raises RewardError for the first answer that could not be scored."""
    for trajectory in (t for group in groups for t in group.trajectories if t.status == "failed"):
        raise RewardError(
            f"answer {trajectory.index[1]} of row {trajectory.row.index} of {trajectory.row.source!r} could not be "
            f"scored: {trajectory.error}\nEarlier scores are kept in {file.partial}; the same call continues them."
        )


def _scorer(prepared: Prepared, closing: ExitStack) -> tuple[Scorer, MainThread]:
    launcher = prepared.parts["launcher"].build()
    closing.callback(launcher.shutdown)
    roles = launch_roles(prepared, launcher)
    main = MainThread()
    closing.callback(main.close)
    scorer = make_scorer(prepared, *together(score_with_role(roles, main), read_role(roles, main)))
    closing.callback(scorer.close)
    main.run(scorer.setup())
    return scorer, main


def _about(prepared: Prepared, columns: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The facts that must be equal for a second call to continue the file of the first."""
    config = prepared.config.model_dump(mode="json")
    data = {k: v for k, v in config["data"].items() if k not in ("train", "batch_size", "shuffle")}
    return {
        "data": data | {"fingerprints": [s.fingerprint for s in prepared.data.sources["eval"]]},
        "answers": {name: list(found) for name, found in columns.items()},
        "rewards": [{k: v for k, v in r.items() if k not in ("deadline", "retries")} for r in config["reward"]],
        "models": {name: [spec.path, spec.dtype] for name, spec in prepared.specs.items()},
        "tokenizer": config["policy"]["model"],
        "plugins": [r.resolved.manifest() for r in prepared.rewards],
        "seed": config["run"]["seed"],
    }


def _prepare(config: RunFile, plugins: Plugins) -> Prepared:
    """Check everything that needs no model. The roles are those of the rewards."""
    if config.env is not None:
        raise ConfigError(f"env {config.env.use!r} is set, but given answers use no environment. Remove [env].")
    plugins = plugins.extended("algorithm", Score)
    commits = Commits()
    update: dict[str, Any] = {
        "algorithm": Choice(use=Score.name),
        "data": config.data.model_copy(update={"train": config.data.eval, "loss_on": "completion"}),
        "reward": tuple(r.model_copy(update={"credit": "outcome"}) for r in config.reward),
        "observer": (),
        "sampling": SamplingSection(),
        "stream": StreamSection(),
        "sync": SyncSection(),
        "critic": ModelSection(),
        "reference": ModelSection(),
    }
    config = resolved_run(plugins, config.model_copy(update=update))
    rewards = [active_reward(plugins, config, number) for number in range(len(config.reward))]
    held = {role.name: role for reward in rewards for role in reward.instance.roles()}
    model = config.policy.model or next((model_of(config, held, name, commits) for name in held), None)
    if model is None:
        raise ConfigError(
            "no tokenizer is named, and no reward has a model: prompts and answers become tokens as in a run. Set "
            "--model PATH (a folder or a hub name); of it only the tokenizer is loaded."
        )
    config = config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"model": model}),
            "placement": {name: place for name, place in config.placement.items() if name in held},
            "roles": {name: section for name, section in config.roles.items() if name in held},
        }
    )
    made = run_plugins(config, plugins, commits=commits)
    parts = {kind: part for kind, part in made.parts.items() if kind not in (GENERATOR, "rollout")}
    made = replace(made, parts=parts, rollout=None)
    tokenizer = load_tokenizer(model, config.policy.trust_remote_code)
    data = TrainData(made.config.data, tokenizer, "prompts", config.run.seed, commits=commits)
    places = made.places_on(device_here())
    specs = {name: made.spec(name, ranks=places[name].ranks) for name in made.roles}
    specs = on_processor(specs, made.trainer_class)
    policy = replace(made, roles={"policy": RoleSpec("policy")}).spec("policy")
    check_parts(made, places, specs, here=True)
    check_vocabularies(policy, tokenizer, specs.values())
    used = [*(s.resolved for s in parts.values()), *(r.resolved for r in made.rewards)]
    return Prepared(
        **vars(made),
        data=data,
        tokenizer=tokenizer,
        total_steps=0,
        specs=specs,
        schedule=Schedule(),
        episodes=None,
        curriculum=None,
        observers={},
        plugins=list({(r.kind, r.ref): r for r in used}.values()),
        places=places,
        resolve=functools.partial(resolved_run, plugins),
    )
