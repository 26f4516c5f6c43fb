"""The data that flows through a run: rows, turns, trajectories, groups, and the declarations that plugins make.

Nothing here imports torch, so rewards, environments and the command line stay light. Operations on these
objects live in :mod:`rlhf.ops`; tensors first appear in :class:`rlhf.ops.batch.Batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rlhf.data.layouts import Layout

# ---------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class Row:
    """One data row with all its columns, as read; rewards and environments see every column."""

    columns: Mapping[str, Any]
    source: str
    """Name of the source in the run file; per-source metrics use it."""
    index: int
    """Position in that source, from 0; ``(source, index)`` identifies the row across a resume."""
    layout: Layout | None = field(default=None, compare=False, repr=False)
    """How its source's columns are read, where they are not those that the run file names."""

    def __getitem__(self, name: str) -> Any:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; columns present: {', '.join(self.columns)}") from None

    def get(self, name: str, default: Any = None) -> Any:
        return self.columns.get(name, default)


Finish = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Turn:
    """A run of tokens of one origin: the context given to the policy, what it sampled, or what it observed.

    Text that is trained on is never tokenised again: ``ids`` are the tokens the model saw or chose.
    """

    ids: list[int]
    sampled: bool
    """True where the policy chose these tokens, or they stand for its choice (:attr:`given`); False for prompt,
    environment and tool tokens."""
    logprobs: list[float] | None = None
    """Per token, of the sampling distribution, as the generator reports it; sampled turns only."""
    versions: tuple[tuple[int, int], ...] = ()
    """((first token, weight version), ...): which weights chose the tokens from there on."""
    finish: Finish | None = None
    """Why sampling ended: ``stop`` (end token or stop string), ``length`` (budget used up), ``abort``."""
    temperature: float = 1.0
    reward: float | None = None
    """Reward an environment gave for this (sampled) turn."""
    text: str = ""
    """Decoded, special tokens left out; rewards and environments read this."""
    fresh: bool = False
    """The context was rewritten here (compaction, stripped thinking): a new sequence, same trajectory."""
    given: bool = False
    """A sampled turn that nobody sampled: an answer that the data gives, which stands where the policy's would."""


@dataclass(slots=True)
class RewardResult:
    """What one reward source says about one trajectory. ``value=None`` means not applicable: the source is
    left out of this trajectory's sum, and a trajectory without any value leaves its group's baseline."""

    value: float | None
    score: float | None = None
    """Used by the dynamic filter before any penalty; ``value`` where absent."""
    steps: tuple[tuple[int, int, float], ...] = ()
    """((turn, token in turn, value), ...): process rewards."""
    info: dict[str, Any] = field(default_factory=dict)


Status = Literal["ok", "truncated", "failed"]


@dataclass(slots=True)
class Trajectory:
    """One sample: its data row and its turns in order."""

    row: Row
    turns: list[Turn]
    index: tuple[int, int]
    """(group number in the run, sample in the group). Every seed is ``derive_seed(run_seed, purpose, *index)``."""
    status: Status = "ok"
    rewards: dict[str, RewardResult] = field(default_factory=dict)
    """By the name of the reward source."""
    reward: float | None = None
    """Weighted sum of the sources' values and the environment's turn rewards, before shaping."""
    score: float | None = None
    """What the dynamic filter reads: the weighted ``score`` of the sources, their ``value`` where one gave none."""
    error: str = ""
    """First cause, where ``status`` is ``failed``."""

    @property
    def prompt_text(self) -> str:
        """Text of everything before the first sampled turn."""
        parts = []
        for turn in self.turns:
            if turn.sampled:
                break
            parts.append(turn.text)
        return "".join(parts)

    @property
    def completion(self) -> str:
        """Text of everything after the prompt, observations included."""
        seen, parts = False, []
        for turn in self.turns:
            seen = seen or turn.sampled
            if seen:
                parts.append(turn.text)
        return "".join(parts)

    @property
    def answer(self) -> str:
        """Text of the last sampled turn."""
        return next((t.text for t in reversed(self.turns) if t.sampled), "")

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy itself chose: the only length that penalties count."""
        return sum(len(t.ids) for t in self.turns if t.sampled)

    @property
    def given(self) -> bool:
        """Its answer is the data's (:attr:`Turn.given`)."""
        return any(turn.given for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """The last sampled turn ended because its token budget was used up."""
        last = next((t for t in reversed(self.turns) if t.sampled), None)
        return self.status == "truncated" or (last is not None and last.finish == "length")


@dataclass(slots=True)
class Group:
    """The samples of one prompt, in sample order."""

    row: Row
    number: int
    trajectories: list[Trajectory]


# -------------------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Log-probs are of the distribution they are drawn from: after ``temperature`` and, where
    ``top_p``, ``top_k`` or ``min_p`` leave tokens out, renormalised over those that are left."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Sample on to ``max_new_tokens``; benchmarks only."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to draw. Equal ``ids`` in one call share their prefill."""

    ids: tuple[int, ...]
    seed: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class EnvStep:
    """What an environment answers to one action."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    sampling: Sampling | None = None
    """Replaces the sampling parameters from the next turn on. In training it may change ``max_new_tokens``,
    ``temperature`` (above 0) and what ends a turn; tokens that ``[sampling]`` allows stay allowed."""
    info: Mapping[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------- declarations of an algorithm


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A model that a run holds: the policy, a critic, a reference, a reward model."""

    name: str
    head: str = "lm"
    """``lm`` | ``scalar`` | ``classes:N``."""
    trained: bool = False
    like: str | None = None
    """Start from this role's model where the run file names none."""
    model: str | None = None
    """Path or hub name, where the declaring plugin knows it (a reward plugin's own option)."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Role ``to`` computes with the output head of role ``role`` (:attr:`Head.lent`), a language model that is not
    trained. It is handed over once, after the models are loaded."""

    role: str
    to: str = "policy"


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm cannot do without, as a function of its config."""

    roles: tuple[RoleSpec, ...]
    group_min: int = 1
    generator_logprobs: bool = False
    features: tuple[str, ...] = ()
    rows_min: int = 1
    """Smallest ``data.batch_size``."""
    reward: bool = True
    """Data form ``prompts``: False where it learns from samples that nobody scored; they reach ``assemble`` with
    ``Trajectory.reward = None``."""
    given: float = 0.0
    """Data form ``prompts``, without a reward: share of the rows, from 0 to below 1, whose group is one trajectory with
    the row's own answer (:attr:`Turn.given`) in place of samples. Which rows is a function of the run's seed and the
    group's number. They are neither scored nor filtered."""
    lent: tuple[Lent, ...] = ()


@dataclass(frozen=True, slots=True)
class OnlineShape:
    """How large batches and answers of an online run can get."""

    trajectories: int
    """Of a whole batch: ``data.batch_size`` times ``sampling.samples_per_prompt``."""
    answer_tokens: int
    """Own tokens that an answer can have: ``sampling.max_new_tokens``, times the turns in an environment, within
    ``data.max_tokens``."""
    most_tokens: int
    """Own tokens that no answer exceeds, whatever the rollout does."""


How = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant", "seq_mean", "unit_mean"]


@dataclass(frozen=True, slots=True)
class Reduce:
    """How the values of one loss term become one number. The driver turns this into a weight per token,
    sequence or unit over the whole optimizer batch (all micro-batches, all ranks); ranks only add.

    ========================  ==========  ===========================================================
    how                       values      weight
    ========================  ==========  ===========================================================
    token_mean                [A]         m / N
    seq_mean_token_mean       [A]         m / (T_seq S)
    seq_mean_token_sum        [A]         m / S
    seq_sum_constant          [A]         m / (S constant)
    seq_mean                  [S]         1 / S
    unit_mean                 [U]         1 / U
    ========================  ==========  ===========================================================

    N tokens under the mask, S sequences (tokens of one unit and one role) with at least one such token,
    U units with at least one such token.
    """

    how: How = "token_mean"
    over: str = "loss_mask"
    roles: tuple[int, ...] | None = None
    """Only sequences of these roles in their unit (0 = chosen, 1 = rejected, ...)."""
    coef: float = 1.0
    constant: float = 1.0


@dataclass(frozen=True, slots=True)
class Head:
    """Something read off the model at the tokens of a mask, chunk by chunk; no [T, V] tensor exists.

    ``fn(logits_CV, ids_C, columns, constants) -> [C, ...]`` gets tempered fp32 logits (for scalar and classes
    heads: the head's fp32 outputs, not tempered), the chunk's token ids, and the chunk's slice of each column
    in ``columns``. It is recomputed in the backward pass. ``constants[role]`` of each role in ``lent`` is its
    :class:`rlhf.ops.heads.OutputHead`.
    """

    name: str
    fn: Callable[..., Any]
    over: str = "loss_mask"
    at: Literal["before", "at"] = "before"
    """``before``: the outputs that predict token t (log-probs, entropy, values), at the temperature token t was drawn
    at. ``at``: read off after token t, from which nothing was drawn yet: never tempered."""
    columns: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    reads: Literal["logits", "hidden"] = "logits"
    """``hidden``: the fp32 hidden states [C, H] that the output head would read, in place of the logits."""
    lent: tuple[str, ...] = ()
    """Roles whose output heads it computes with (:class:`Lent`)."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """``column := role's output on the batch``, computed without gradient before the update."""

    role: str
    output: str | Head
    column: str
    view: str = "live"
    per_row: bool = True
    """Each sequence is a function of one data row; False where the algorithm puts rows together."""


@dataclass(frozen=True, slots=True)
class Update:
    """Train ``role`` with the loss in slot ``loss``: epochs x minibatches optimizer steps."""

    role: str
    loss: str
    epochs: int = 1
    minibatches: int = 1
    coef: Mapping[str, float] = field(default_factory=dict)
    """Coefficients that change over the run (adaptive KL); a loss reads them as ``x.coef[name]``."""
    live: Mapping[str, str] = field(default_factory=dict)
    """{column: output}: where the column is not in the batch, it is the detached live output. Refused unless
    the update has exactly one optimizer step, where both are equal by definition."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``role := share source + (1 - share) role``, of the weights (reference := policy, where ``share`` is 1)."""

    role: str
    source: str
    share: float = 1.0
    """Above 0, at most 1. Mixed in fp32 and rounded to the precision in which ``role`` holds its weights."""


Level = Literal["token", "sequence", "unit"]


@dataclass(slots=True)
class LossOutput:
    """Values per token [A], sequence [S] or unit [U] for each declared term; no masks, denominators or sums."""

    terms: dict[str, Any]
    metrics: Mapping[str, tuple[Level, Any] | tuple[Level, Any, Any]] = field(default_factory=dict)
    """{name: (level, values)}: reported as the mean over all tokens, sequences or units of the optimizer batch; {name:
    (level, values, where)}: over those where the bool ``where`` is True, and left out where none is."""


DataForm = Literal["prompts", "demonstrations", "pairs", "labels", "steps"]
