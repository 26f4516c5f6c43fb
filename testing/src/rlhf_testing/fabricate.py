"""Made-up data with seeds: groups of trajectories, tokenised examples, batches and their columns.

The data has difficult shapes on purpose: several turns, rewritten contexts, truncated and empty answers, units of very
different length, and a temperature that changes between turns. Torch is imported only where tensors are made.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf.interfaces.tokens import Tokens
from rlhf.types import DataForm, Group, Head, RewardResult, RoleSpec, Row, Trajectory, Turn
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf.types.needs import GREEDY_REWARD
from rlhf.types.rows import Columns

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.heads import OutputHead
    from torch import Tensor

VOCABULARY = 29
"""Token ids of fabricated data lie in 1 .. VOCABULARY - 1; 0 is the end token of sampled turns."""
HIDDEN = 8
"""Size of fabricated hidden states."""
TOKENS = Tokens(
    lambda text: [1 + byte % (VOCABULARY - 1) for byte in text.encode()], lambda ids: "".join(chr(96 + i) for i in ids)
)
"""A tokenizer of the fabricated vocabulary: one token per byte."""


class NoColumn(KeyError):
    """A made-up row lacks a column. ``args``: the column's name, and the names of the row's columns."""


class MadeUpColumns(Columns):
    """The columns of a made-up row. They raise :class:`NoColumn`."""

    def __missing__(self, name: str) -> Any:
        raise NoColumn(name, list(self))


def row(columns: Mapping[str, Any] | None = None, index: int = 0) -> Row:
    """One data row; by default with a prompt and an answer."""
    return Row(MadeUpColumns(columns or _default_row(index)), "fabricated", index)


def _default_row(index: int) -> dict[str, Any]:
    return {"prompt": f"What is {index} + 2?", "answer": str(index + 2)}


def groups(
    seed: int = 0,
    *,
    count: int = 3,
    samples: int = 4,
    logprobs: bool = True,
    multi_turn: bool = True,
    equal_rewards: bool = False,
    scored: bool = True,
    greedy: bool = False,
    answers: int = 0,
    columns: Mapping[str, Any] | None = None,
) -> list[Group]:
    """Scored groups, as a controller passes them to ``Algorithm.assemble``.

    Sample 1 of a group ends truncated, sample 2 (with ``multi_turn``) has three sampled turns, of which the last starts
    on a rewritten context (``fresh``). No two trajectories have the same tokens.

    Args:
        logprobs: whether sampled turns carry log-probs (``Needs.generator_logprobs``).
        equal_rewards: every trajectory of a group gets the same reward.
        scored: False gives no rewards (``Needs.reward``).
        greedy: whether samples have the reward of a greedy answer (``Needs.greedy``).
        answers: number of samples of each group that are answers of the data (``Needs.demonstrations_per_group``).
        columns: further columns of every row.
    """
    rng = random.Random(seed)
    group_list = []
    for number in range(count):
        data = row(_default_row(number) | dict(columns or {}), number)
        shared = rng.uniform(-1, 1)
        trajectories = []
        for sample in range(samples):
            turns = _turns(rng, number, sample, logprobs, rounds=3 if multi_turn and sample % 4 == 2 else 1)
            if sample < answers:
                turns = [turns[0], replace(turns[1], logprobs=None, is_demonstration=True)]
            if sample % 4 == 1:
                turns[-1].finish = "length"
            reward = shared if equal_rewards else rng.uniform(-1, 1)
            trajectories.append(
                Trajectory(
                    data,
                    turns,
                    (number, sample),
                    "truncated" if sample % 4 == 1 else "ok",
                    {"fabricated": RewardResult(reward)} if scored else {},
                    reward if scored else None,
                    reward if scored else None,
                    info={GREEDY_REWARD: shared} if greedy else {},
                )
            )
        group_list.append(Group(data, number, trajectories))
    return group_list


def _turns(rng: random.Random, number: int, sample: int, logprobs: bool, rounds: int) -> list[Turn]:
    prompt_rng = random.Random(number)  # the samples of a group share their prompt
    prompt = [prompt_rng.randrange(1, VOCABULARY) for _ in range(2 + number % 3)]
    turns = [Turn(prompt, sampled=False, text="prompt")]
    for turn in range(rounds):
        if turn:
            context = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 4))]
            turns.append(Turn(context, sampled=False, text="observation", fresh=turn == 2))
        ids = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(2, 7))] + [0]
        temperature = (1.0, 0.7, 1.3)[turn]
        values = [-rng.uniform(0.5, 4.0) for _ in ids] if logprobs else None
        turns.append(
            Turn(ids, True, values, ((0, 0),), "stop", temperature, None, text=f"answer {sample}", fresh=False)
        )
    return turns


def text_group(
    columns: Mapping[str, Any] | None = None,
    answers: Sequence[str] = ("4", "the answer is 4", "", "5", "\N{SNOWMAN} " * 50),
    number: int = 0,
) -> Group:
    """An unscored group with the given answers, for rewards: tokens are the UTF-8 bytes of the texts."""
    data = row(columns, number)
    prompt = str(data.get("prompt", "prompt"))
    trajectories = []
    for sample, answer in enumerate(answers):
        ids = list(answer.encode())
        finish = "length" if len(ids) > 200 else "stop"
        turns = [
            Turn(list(prompt.encode()), sampled=False, text=prompt),
            Turn(ids, True, [-1.0] * len(ids), ((0, 0),), finish, text=answer),  # type: ignore[arg-type]
        ]
        trajectories.append(Trajectory(data, turns, (number, sample), "truncated" if finish == "length" else "ok"))
    return Group(data, number, trajectories)


def examples(
    form: DataForm, seed: int = 0, *, count: int = 6, columns: Mapping[str, Any] | None = None
) -> list[Example]:
    """Tokenised rows of an offline data form; every prompt has 1 to 5 tokens, every answer 1 to 8.

    Args:
        columns: further columns of every row; a pair's ``margin`` is in ``Example.values`` too, as ``data.margin`` puts
            it there.
    """
    rng, extra_columns = random.Random(seed), dict(columns or {})
    example_list = []
    for index in range(count):
        prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 5))]
        sequences = []
        for role in range(2 if form == "pairs" else 1):
            answer = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 8))]
            mask = [False] * len(prompt) + [True] * len(answer)
            sequences.append(TokenSequence(prompt + answer, mask, role))
        values: dict[str, Any] = {"label": index % 2 == 0} if form == "labels" else {}
        if form == "pairs":
            values = MadeUpColumns({"margin": float(extra_columns["margin"])} if "margin" in extra_columns else {})
        if form == "steps":
            values["steps"] = [(len(sequences[0].ids) - 1, float(index % 2))]
        example_list.append(Example(row(_default_row(index) | extra_columns, index), sequences, values))
    return example_list


def batch(
    seed: int = 0,
    *,
    form: DataForm = "prompts",
    units: int = 6,
    mask: str = "loss_mask",
    fresh: bool = True,
) -> Batch:
    """Units with the token columns ``loss_mask`` (and ``mask``) and ``temperature``. The last unit has no token under
    the mask.

    Args:
        form: ``pairs`` gives units of two sequences with roles 0 and 1, everything else trajectories.
        fresh: every third trajectory is two sequences of one role (a context rewritten half-way).
    """
    from rlhf.ops.packing import SequenceData, UnitData, pack

    rng = random.Random(seed)
    unit_data = []
    for u in range(units):
        blank = u == units - 1
        roles = [0, 1] if form == "pairs" else [0, 0] if fresh and u % 3 == 1 else [0]
        sequences = []
        for role in roles:
            mask_T: list[bool] = [False] * rng.randint(1, 4)
            for _ in range(rng.randint(1, 2)):
                mask_T += [not blank] * rng.randint(2, 6) + [False] * rng.randint(0, 2)
            ids = [rng.randrange(1, VOCABULARY) for _ in mask_T]
            tok = dict.fromkeys({"loss_mask", mask}, mask_T)
            sequences.append(
                SequenceData(ids, {**tok, "temperature": [rng.choice((0.7, 1.0, 1.3))] * len(mask_T)}, role)
            )
        columns = {"label": u % 2 == 0} if form == "labels" else {}
        unit_data.append(UnitData(sequences, columns))
    return pack(unit_data)


UNIT_COLUMNS = ("group", "greedy", "is_demonstration", "key", "own_tokens", "reward", "sample", "score", "truncated")
"""The columns of an online batch with one value per unit (:mod:`rlhf.ops.trajectories`)."""


def values(name: str, size: int, seed: int) -> Tensor:
    """[size] for a column or an output, by its name. Float32: log-probs lie in -4.5 .. -0.5, entropies in 0.5 .. 2.5,
    everything else is standard normal. ``is_demonstration`` and ``truncated`` are bool; ``group``, ``key``,
    ``own_tokens`` and ``sample`` are int64, 1 to 4. Equal names and seeds give equal values."""
    import torch
    from rlhf.seeds import derive_seed

    generator = torch.Generator().manual_seed(derive_seed(seed, f"fabricate/{name}"))
    if name in ("is_demonstration", "truncated"):
        return torch.rand(size, generator=generator) < 0.5
    if name in ("group", "key", "own_tokens", "sample"):
        return torch.randint(1, 5, (size,), generator=generator)
    if is_logprob(name):
        return -0.5 - 4 * torch.rand(size, generator=generator)
    if "entropy" in name:
        return 0.5 + 2 * torch.rand(size, generator=generator)
    return torch.randn(size, generator=generator)


def output_head(role: str, seed: int) -> OutputHead:
    """The output head of a role that lends it: [VOCABULARY, HIDDEN]. Equal names and seeds give equal values."""
    from rlhf.ops.heads import OutputHead

    flat = values(f"{role}/head", VOCABULARY * HIDDEN, seed)
    return OutputHead(flat.view(VOCABULARY, HIDDEN))


def read(
    role: RoleSpec, head: Head, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
) -> list[list[Any]]:
    """The values of a head at these positions, as ``RewardContext.read_role`` returns them. The stand-in model's
    outputs after a prefix are a fixed function of the role and the prefix: 256 logits of a language model, N of a head
    ``classes:N``."""
    import torch

    size = {"lm": 256, "scalar": 1}.get(role.head) or int(role.head.partition(":")[2])
    rows: list[list[Any]] = []
    for sequence, places in zip(ids, positions, strict=True):
        if list(places) != sorted(set(places)) or (places and not 0 <= places[0] <= places[-1] < len(sequence)):
            raise ValueError(
                f"positions {list(places)} are not valid: they must increase and lie in the sequence of "
                f"{len(sequence)} tokens"
            )
        prefixes = [list(sequence[: p + (head.position == "at")]) for p in places]
        outputs = [values(f"{role.name}/{prefix}", size, 0) for prefix in prefixes]
        ids_T = torch.tensor([sequence[p] for p in places])
        rows.append(head.fn(torch.stack(outputs), ids_T, {}, head.constants).tolist() if places else [])
    return rows


def is_logprob(name: str) -> bool:
    """Whether a column or output holds log-probs, by its name."""
    return "logprob" in name or name.startswith("lp")
