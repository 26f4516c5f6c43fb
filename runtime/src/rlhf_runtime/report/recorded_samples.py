"""Reads the samples that a run recorded, and selects some of them."""

from __future__ import annotations

import random
from base64 import b64decode
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, ConfigError, DataError, brief, did_you_mean
from rlhf.ops.sample_values import ENV
from rlhf.types import RewardResult

from rlhf_runtime.checkpoint.sample_table import SUFFIX
from rlhf_runtime.checkpoint.saved_groups import agent_of, recorded
from rlhf_runtime.data.image_files import image_size
from rlhf_runtime.data.recorded_answers import RECORDED
from rlhf_runtime.output.metrics import as_number
from rlhf_runtime.output.run_directory import RunDirectory, step_files
from rlhf_runtime.report.run_record import RunRecord

LENGTH = "length"


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """Consecutive tokens after the prompt, from the policy or from the environment."""

    speaker: str
    """``policy``, or ``environment``."""
    text: str
    tokens: int
    reward: float | None
    """The environment's reward for it."""
    score: float | None = None
    """The environment's score for it, if it gives one."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """The messages in the text, if a chat template wrote it."""


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One recorded sample, as text."""

    step: int | None
    """None if no training step wrote the file."""
    group: int
    sample: int
    source: str
    row: int
    prompt: Any
    """Text, or messages if a chat template was used."""
    turns: list[RecordedTurn]
    reward: float | None
    rewards: dict[str, float | None]
    """{name of the reward: value with its process rewards, before its weight}; None if the reward did not apply.
    ``env``: rewards of an environment."""
    status: str
    error: str
    length: int
    """Tokens that the policy sampled, or of the data's answer."""
    info: dict[str, float] = field(default_factory=dict)
    """{name of the metric: number} for the sample."""
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{name of the reward: further information that it returned}."""
    group_mean: float | None = None
    """The mean reward of the samples with the same prompt and agent."""
    agent: str = ""
    """The agent, if the policy plays several agents."""
    is_demonstration: bool = False
    """Whether the answer comes from the data."""

    @property
    def completion(self) -> str:
        """The whole text after the prompt, including observations."""
        return "".join(turn.text for turn in self.turns)

    def value(self, name: str | None) -> float | None:
        """The value by which samples are sorted: the reward of that name, the length, or for None the total reward."""
        if name is None:
            return self.reward
        return self.rewards.get(name) if name in self.rewards or name != LENGTH else float(self.length)


def recorded_steps(run: Path) -> list[int]:
    """The steps with recorded samples."""
    return [step for step, path in step_files(run / "rollouts") if path.suffix == SUFFIX]


def samples_file(run: Path, step: int | None) -> tuple[Path, int | None]:
    """The file of samples, and its step. If there is none, raises ConfigError that names the steps with samples."""
    if run.is_file():
        if step is not None:
            raise ConfigError(f"--step {step}: {run} is a single file of samples, without steps. Omit --step.")
        return run, None
    record = RunRecord.read(run)
    steps = recorded_steps(run)
    if not steps:
        raise ConfigError(f"{run} holds no samples. {_why_no_samples(record)}")
    if step is not None and step not in steps:
        is_range = steps[-1] - steps[0] + 1 == len(steps) and len(steps) > 1
        listing = f"{steps[0]} to {steps[-1]}" if is_range else ", ".join(map(str, steps))
        word = "step" if len(steps) == 1 else "steps"
        raise ConfigError(f"--step {step}: {run} holds no samples of this step. It holds samples of {word} {listing}.")
    step = steps[-1] if step is None else step
    return RunDirectory.rollouts_of(run, step), step


def _why_no_samples(record: RunRecord) -> str:
    if not record.lines:
        return "The run has finished no step."
    if "stream/version" not in record.last:  # every step that trained on samples has it
        return f"The algorithm {record.algorithm or 'of the run'} learns from data and samples nothing."
    if record.option("checkpoint.save_rollouts") is False:
        return "The run does not write them (checkpoint.save_rollouts = false)."
    return "They were deleted: the run sampled, but its folder rollouts/ has no files."


def read_samples(path: Path, step: int | None) -> list[RecordedSample]:
    """The samples in a file. Raises DataError naming a line that is not a sample."""
    return _with_group_means([sample for sample, _ in samples_with_values(path, step)])


def samples_with_values(
    path: Path, step: int | None, rows: Collection[int] | None = None
) -> Iterator[tuple[RecordedSample, Mapping[str, Any]]]:
    """(sample, all its recorded values) for each row of a file, or only for ``rows``, counted from 0.

    Raises DataError naming a line that is not a sample.
    """
    location = str(path)
    try:
        for place, line in recorded(path, rows):
            location = place
            if line["sample"] is not None:  # null for a group without samples
                yield _sample(line, step), line
    except CheckpointError as cause:
        raise DataError(f"{cause}. {RECORDED}") from cause
    except (KeyError, TypeError, AttributeError) as cause:
        reason = f"it has no {cause}" if isinstance(cause, KeyError) else str(cause)
        raise DataError(f"{location} is not a recorded sample: {reason}. {RECORDED}") from cause


def select(samples: Sequence[RecordedSample], source: str | None, group: int | None) -> list[RecordedSample]:
    """The samples of one data source and one group. Raises ConfigError if there are none."""
    for name, choice in (("source", source), ("group", group)):
        if choice is not None:
            choices = sorted({getattr(sample, name) for sample in samples})
            samples = [sample for sample in samples if getattr(sample, name) == choice]
            if not samples:
                raise ConfigError(f"--{name} {choice}: no sample has this value; the {name}s are {_listing(choices)}.")
    return list(samples)


def check_sort(samples: Sequence[RecordedSample], name: str | None) -> None:
    """Raises ConfigError if no sample has a reward of that name."""
    names = sorted({reward for sample in samples for reward in sample.rewards} | {LENGTH})
    if name is not None and name not in names:
        raise ConfigError(f"--sort-by {name}: allowed: {', '.join(names)}.{did_you_mean(name, names)}")


def extreme(samples: Sequence[RecordedSample], count: int, by: str | None, best: bool) -> list[RecordedSample]:
    """The ``count`` best or worst samples among those that have the value. Equal samples keep the order of the file."""
    valued = [(value, sample) for sample in samples if (value := sample.value(by)) is not None]
    return [sample for _, sample in sorted(valued, key=lambda pair: -pair[0] if best else pair[0])[:count]]


def draw_samples(samples: Sequence[RecordedSample], count: int, seed: int) -> list[RecordedSample]:
    """``count`` samples drawn without replacement, in the order of the file. The same seed draws the same samples."""
    numbers = random.Random(seed).sample(range(len(samples)), min(count, len(samples)))
    return [samples[number] for number in sorted(numbers)]


def _sample(line: Mapping[str, Any], step: int | None) -> RecordedSample:
    turns = line["turns"]
    first = next((number for number, turn in enumerate(turns) if turn["sampled"]), len(turns))
    prompt = line.get("prompt")
    if prompt is None:  # an environment added something to the row's own prompt
        messages = [message for turn in turns[:first] for message in _messages(turn)]
        prompt = messages or "".join(_text(turn) for turn in turns[:first])
    elif isinstance(prompt, list):
        prompt = _with_sizes(prompt, [size for turn in turns[:first] for size in _sizes(turn)])
    else:
        prompt = "".join(_sizes(turns[0])) + prompt if turns else prompt
    return RecordedSample(
        step=step,
        group=line["group"],
        sample=line["sample"],
        source=line["row"]["source"],
        row=line["row"]["index"],
        prompt=prompt,
        turns=[
            RecordedTurn(
                "policy" if turn["sampled"] else "environment",
                _text(turn),
                len(turn["ids"]),
                _reward(turn.get("reward")),
                _reward(turn.get("score")),
                _messages(turn),
            )
            for turn in turns[first:]
        ],
        reward=_reward(line["reward"]),
        rewards={name: _total(result) for name, result in line["rewards"].items()} | _of_environment(turns),
        status=line["status"],
        error=line["error"],
        length=sum(len(turn["ids"]) for turn in turns if turn["sampled"]),
        info={name: float(value) for name, value in line["info"].items()},
        agent=agent_of(turns),
        is_demonstration=any(turn.get("is_demonstration") for turn in turns),
        findings={name: dict(result["info"]) for name, result in line["rewards"].items() if result.get("info")},
    )


def _total(result: Mapping[str, Any]) -> float | None:
    """:attr:`rlhf.types.RewardResult.total` of a recorded result."""
    return RewardResult(_reward(result["value"]), steps=tuple(result.get("steps") or ())).total


def _of_environment(turns: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """{"env": sum of the rewards of the turns}, as in the metric reward/env/mean; empty if there are none. With
    ``env.credit = "step"`` the reward of the sample does not include it."""
    rewards = [reward for turn in turns if (reward := _reward(turn.get("reward"))) is not None]
    return {ENV: sum(rewards)} if rewards else {}


def message_text(content: Any) -> str:
    """Text, or messages with the role before each."""
    if isinstance(content, str):
        return content
    return "\n".join(f"[{message.get('role', '?')}] {message.get('content', '')}" for message in content)


def _text(turn: Mapping[str, Any]) -> str:
    """The text of a turn after its images: ``[image 64x64]``."""
    return "".join([*_sizes(turn), turn["text"]])


def _messages(turn: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a turn; its images come first."""
    messages = [{"role": role, "content": text} for role, text in turn.get("messages") or ()]
    if messages and (sizes := "".join(_sizes(turn))):
        messages[0]["content"] = sizes + messages[0]["content"]
    return messages


def _sizes(turn: Mapping[str, Any]) -> list[str]:
    """``[image 64x64]`` for each image of a turn."""
    sizes = (image_size(b64decode(image["data"])) for image in turn.get("images") or ())
    return [f"[image {width}x{height}]" for width, height in sizes]


def _with_sizes(messages: Sequence[Mapping[str, Any]], sizes: Sequence[str]) -> list[Mapping[str, Any]]:
    """Messages with text content, in which each image is replaced by one of ``sizes``."""
    rest = iter(sizes)

    def text(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return "".join(next(rest, "[image]") if part.get("type") == "image" else part["text"] for part in content)

    return [{**message, "content": text(message.get("content"))} for message in messages]


def _reward(value: Any) -> float | None:
    """The reward as a float or None. Raises TypeError if it is neither a number nor null."""
    number = as_number(value)
    if number is None and value is not None:
        raise TypeError(f"a reward is {brief(value)}, not a number")
    return number


def _with_group_means(samples: Sequence[RecordedSample]) -> list[RecordedSample]:
    rewards: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            rewards[sample.group, sample.agent].append(sample.reward)
    means = {group: sum(values) / len(values) for group, values in rewards.items()}
    return [replace(sample, group_mean=means.get((sample.group, sample.agent))) for sample in samples]


def _listing(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values)) if len(values) <= 12 else f"{values[0]} to {values[-1]}"
