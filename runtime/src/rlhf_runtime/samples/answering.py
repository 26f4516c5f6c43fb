"""The generator, the rewards and the environment put together: what turns rows into scored groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.errors import RolloutError
from rlhf.interfaces import ComponentConfig, Generator, GeneratorSpec, Launcher, ReadRole, ScoreWithRole
from rlhf.types import GenerationRequest, Turn

from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.tokenizer import Decoder, tokens_of
from rlhf_runtime.models.shared_devices import Phases
from rlhf_runtime.models.weight_sync import HOLDS_NOTHING, WeightSync
from rlhf_runtime.rewards.reward_models import read_role, score_with_role
from rlhf_runtime.rewards.scoring import Scorer
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.rollouts import Rollouts, RolloutSettings
from rlhf_runtime.samples.sampling import evaluation_sampling, training_sampling
from rlhf_runtime.workers.main_thread import MainThread

if TYPE_CHECKING:
    from rlhf_runtime.models.roles import Role
    from rlhf_runtime.setup.prepare import Prepared


@dataclass
class Answering:
    """Answers prompts with the policy of now."""

    generator: Generator
    sync: WeightSync
    rollouts: Rollouts
    phases: Phases | None
    closers: list[Callable[[], None]]
    """In the order in which they must be called."""


def answering(
    prepared: Prepared, roles: Mapping[str, Role], launcher: Launcher, note: Callable[[str], None]
) -> Answering:
    """Build it from the parts that :func:`rlhf_runtime.setup.prepare.prepare` selected."""
    policy, config, template = roles["policy"], prepared.config, prepared.data.template
    spec = GeneratorSpec(
        tuple(dict.fromkeys((*policy.facts.eos_token_ids, *template.end_token_ids))),
        Decoder(policy.spec.path, policy.spec.trust_remote_code),
        policy.spec.path,
        policy.facts.dtype,
        policy.spec.trust_remote_code,
        config.data.max_tokens,
        config.run.seed,
        config.sync.timeout,
    )
    selected = prepared.parts.get("generator")
    generator: Generator = NoGenerator(None, spec)
    if selected is not None:
        generator = launcher.launch_generator(selected.resolved.cls, selected.config, spec)
        launcher.link(policy.group, generator, config.sync.timeout)
    main = MainThread()
    scorer = scorer_of(prepared, score_with_role(roles, main), read_role(roles, main))
    episodes = prepared.episodes
    closers = [scorer.close, main.close]
    if episodes is not None:
        closers.insert(0, episodes.close)
    main.run(scorer.setup())
    assert prepared.rollout is not None
    phases = Phases(generator, roles, prepared.places) if selected is not None else None
    rollouts = Rollouts(
        prepared.rollout,
        generator,
        template,
        scorer,
        main,
        episodes.open if episodes is not None else None,
        episodes.limit if episodes is not None else None,
        phases,
    )
    sync = WeightSync(policy, generator, config.sync, config.run.seed, note, config.data.max_tokens)
    return Answering(generator, sync, rollouts, phases, [*closers, generator.close])


def scorer_of(prepared: Prepared, score: ScoreWithRole, read: ReadRole) -> Scorer:
    """The run's rewards.

    Args:
        score, read: how they ask the models that the run holds for them (:mod:`rlhf_runtime.rewards.reward_models`).
    """
    return Scorer(
        prepared.rewards,
        score_with_role=score,
        read_role=read,
        tokens=tokens_of(prepared.tokenizer),
        seed=prepared.config.run.seed,
        turn_credit=prepared.config.env.credit if prepared.config.env is not None else "outcome",
    )


class NoGenerator(Generator):
    """Where the rollout draws nothing (``Rollout.needs_generator`` is false): follows versions, holds no weights."""

    name = "none"
    capabilities = frozenset({HOLDS_NOTHING})

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config = ComponentConfig()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        raise RolloutError("the rollout asked for tokens, but declares needs_generator = False: set it to True")


def training_settings(config: RunFile, note: Callable[[str], None], given: float = 0.0) -> RolloutSettings:
    """How training samples are drawn: ``[sampling]`` and ``[stream]``.

    Args:
        note: says the first failed sample.
        given: ``Needs.given`` of the algorithm.
    """
    s, policy = config.sampling, config.stream.on_failed_sample
    then = f'leaves {"its group" if policy == "drop_group" else "the batch"} (stream.on_failed_sample = "{policy}")'
    return RolloutSettings(
        training_sampling(config),
        s.samples_per_prompt,
        "sample",
        config.run.seed,
        config.data.max_tokens,
        config.stream.rollout_deadline,
        policy == "abort",
        given,
        Failures(config.stream.max_failed, note, then=then),
    )


def evaluation_settings(config: RunFile, note: Callable[[str], None]) -> RolloutSettings:
    """How held-out rows are answered: ``[eval]``, with the stop strings and the token budget of ``[sampling]``.

    Args:
        note: says the first failed sample.
    """
    return RolloutSettings(
        evaluation_sampling(config),
        config.eval.samples,
        "eval",
        config.run.seed,
        config.data.max_tokens,
        config.stream.rollout_deadline,
        abort_on_failure=False,
        failures=Failures(config.stream.max_failed, note, "evaluation sample", "has no reward"),
    )
