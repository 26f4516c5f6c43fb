"""Calls rewards on answers of the data or recorded answers, and on answers that try to cheat, as `rlhf score` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.errors import DataError
from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.checkpoint.saved_groups import read_groups
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.dataset_answers import DatasetAnswers
from rlhf_runtime.data.sources import Source
from rlhf_runtime.jobs.scoring import start_scorer
from rlhf_runtime.observe.progress import phase
from rlhf_runtime.rewards.scoring import ActiveReward, RewardCall

from rlhf_cli.jobs.score_answers import first_rows, prepare, score_groups

EMPTY, REPEATED, FORMAT, BURIED = "empty", "the prompt repeated", "format alone", "right answer buried in others"
FRAME = "<think>\n</think>\n<answer>\n\\boxed{}\n</answer>\n####"
"""All forms that rewards of this project search for, without content."""
BURYING = 6
"""Number of answers of other rows around the right answer."""
TRUTHS = ("answer", "solution", "ground_truth", "reward_model.ground_truth", "label")
"""Columns of the right answer, if no reward states which column it needs."""


@dataclass(slots=True)
class Trial:
    """The results of rewards, and the arguments of their calls."""

    rewards: dict[str, ActiveReward]
    groups: list[Group]
    calls: list[RewardCall]
    probes: list[tuple[Group, list[str]]] = field(default_factory=list)
    """Groups of answers that try to cheat, and the name of each answer."""
    left_out: Counter[str] = field(default_factory=Counter)
    truth: str = ""
    """The column of the right answer; empty: unknown."""


def try_rewards(
    config: RunFile,
    plugins: Plugins,
    columns: Sequence[str],
    file: Path | None,
    probes: int,
    note: Callable[[str], None],
) -> Trial:
    """Score every answer, and the probes of some rows.

    Args:
        columns: columns of the answers; if empty, they are found by name.
        file: recorded samples, instead of answers in columns of the data.
        probes: number of rows for which answers that try to cheat are scored.

    Raises ConfigError, PluginError, DataError, CheckpointError or ModelError, which say what to change. A failed call
    of a reward is part of the trial.
    """
    plugins_of_run, data = prepare(config, plugins)
    for text in data.eval_notes:
        note(text)
    sources, left_out = data.sources["eval"], Counter[str]()
    if file is None:
        answers = DatasetAnswers(sources, columns, data.template, plugins_of_run.config.data)
        groups = [answers.group(number, left_out) for number in first_rows(sources, config.eval.max_rows)]
    else:
        groups = read_groups(file, _finder(sources))
        for trajectory in (t for group in groups for t in group.trajectories):
            trajectory.status, trajectory.error = "truncated" if trajectory.truncated else "ok", ""
            trajectory.reward = trajectory.score = None  # an answer that has a reward is not scored
    groups = [group for group in groups if group.trajectories]
    if not groups:
        raise DataError(f"there is no answer to score{': ' + str(dict(left_out)) if left_out else ''}.")
    truth = _truth_column(plugins_of_run.rewards, groups)
    probed = _probes(data, groups, probes, truth)
    calls: list[RewardCall] = []
    with ExitStack() as closing:
        main = MainThread()
        closing.callback(main.close)
        scorer = start_scorer(plugins_of_run, main, closing)
        scorer.calls = calls
        count = closing.enter_context(phase("scoring answers"))
        all_groups = [*groups, *(group for group, _ in probed)]
        numbers = iter(range(1, len(all_groups) + 1))
        main.run(score_groups(scorer, all_groups, lambda: count(next(numbers), len(all_groups))))
    rewards = {reward.name: reward for reward in plugins_of_run.rewards}
    return Trial(rewards, groups, calls, probed, left_out, truth)


def _finder(sources: Sequence[Source]) -> Callable[[str, int], Row]:
    by_name = {source.name: source for source in sources}

    def find(source: str, index: int) -> Row:
        if source not in by_name:
            raise DataError(f"its row is from the source {source!r}, but the data has {', '.join(by_name)}")
        return by_name[source][index]

    return find


def _probes(data: TrainData, groups: Sequence[Group], rows: int, column: str) -> list[tuple[Group, list[str]]]:
    """For each of the first rows, a group of answers that try to cheat. Answers that the template or the data refuses
    are left out."""
    truths = [_text(group.row, column) for group in groups]
    different = list(dict.fromkeys(truth for truth in truths if truth))
    probes: list[tuple[Group, list[str]]] = []
    for group, truth in zip(groups[:rows], truths, strict=False):
        texts = {EMPTY: "", REPEATED: _prompt(data, group), FORMAT: FRAME}
        wrong_answers = [other for other in different if other != truth][:BURYING]
        if truth and wrong_answers:
            middle = (len(wrong_answers) + 1) // 2
            texts[BURIED] = "\n".join([*wrong_answers[:middle], truth, *wrong_answers[middle:]])
        probe, names = Group(group.row, len(groups) + len(probes), []), list[str]()
        for name, text in texts.items():
            try:
                turns = data.template.encode_answer(group.row, text or FRAME)
            except DataError:
                continue
            turns[1].text = text
            if not text:
                turns[1].ids = turns[1].ids[-1:]  # the end token
            probe.trajectories.append(Trajectory(group.row, turns, (probe.number, len(names))))
            names.append(name)
        if names:
            probes.append((probe, names))
    return probes


def _truth_column(rewards: Sequence[ActiveReward], groups: Sequence[Group]) -> str:
    """The first column with texts or numbers that a reward needs, else of :data:`TRUTHS`; empty if there is none."""
    needed = [column for reward in rewards for column in reward.instance.columns() if column != "prompt"]
    return next((c for c in (*needed, *TRUTHS) if any(_text(group.row, c) for group in groups)), "")


def _text(row: Row, column: str) -> str:
    """The text or number in a column; empty if it holds neither."""
    value = row.get(column)
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _prompt(data: TrainData, group: Group) -> str:
    """The text of the prompt, or of its last message."""
    prompt = data.template.prompt_of(group.trajectories[0])
    content = prompt[-1].get("content") if isinstance(prompt, list) and isinstance(prompt[-1], Mapping) else prompt
    return content if isinstance(content, str) else group.trajectories[0].prompt_text
