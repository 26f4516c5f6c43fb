"""Refusals of runs that sample: sampling, rewards, filter, environment, ``[stream]``, capabilities of the generator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.interfaces import (
    GENERATOR,
    Advantage,
    Algorithm,
    AnswersRequests,
    Launcher,
    SendsWeights,
    SharesModule,
    TakesModule,
    TakesTensors,
    abilities,
)
from rlhf.types import Needs, OnlineShape

from rlhf_runtime.calls.algorithm_calls import ask
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import GROUP
from rlhf_runtime.samples.episodes import agents_played

if TYPE_CHECKING:
    from rlhf_runtime.checks.run import RunPlugins

CORRECTION = "correction"
"""Value in ``Needs.features``: the loss corrects for samples from another distribution than the policy's."""
TEACHERS = "teachers"
"""Value in ``Needs.features``: the algorithm reads the log-probs of ``RunOptions.teachers``."""


def sampling(run: RunPlugins) -> list[str]:
    """Problems of sampling, scoring and filtering."""
    if not run.online:
        return []
    config, algorithm, needs = run.config, run.algorithm, run.algorithm.needs()
    problems, s, name = [], config.sampling, algorithm.name
    if s.samples_per_prompt < needs.group_min:
        problems.append(
            f"{name} needs at least {needs.group_min} samples per prompt, got {s.samples_per_prompt}; set "
            f"--sampling.samples_per_prompt {max(GROUP, needs.group_min)}, or remove it: this is the default"
        )
    cut = [
        f"{key} = {value}"
        for key, value, default in (("top_p", s.top_p, 1), ("top_k", s.top_k, 0), ("min_p", s.min_p, 0))
        if value != default
    ]
    if cut and CORRECTION not in needs.features:
        problems.append(
            f"sampling.{', sampling.'.join(cut)}: training samples would come from a different distribution than the "
            "one whose log-probs are trained on. Leave it at its default, or set an importance correction: "
            "`rlhf explain algorithm.loss` lists the loss's options for it."
        )
    coarse = run.generator_class.approximation(run.parts[GENERATOR].config) if run.generator_class is not None else ""
    if coarse and CORRECTION not in needs.features:
        problems.append(
            f"{coarse}: training samples come from a coarser copy of the policy, and {name} configured like this "
            "trains on them as if they were the policy's own. Set an importance correction (`rlhf explain "
            "algorithm.loss` lists the loss's options for it), or remove it."
        )
    problems += ask(algorithm, "conflicts", _shape(run))
    problems += _teachers(run, needs)
    problems += _turn_credit(config, algorithm)
    unscored = run.scored and not run.has_rewards and config.env is None
    if unscored and needs.reward:
        problems.append("reward: an online run needs a reward, or an environment that gives one. Set --reward NAME.")
    if unscored and not needs.reward and config.data.eval and config.eval.metric is None:
        problems.append(
            "data.eval: nothing scores the answers, so no best model can be chosen. Set --reward NAME, or "
            "--eval.metric length, or remove it."
        )
    problems += _demonstrations(run, needs) + _greedy(run, needs)
    if config.stream.round > 1 and config.stream.staleness > 0:
        problems.append(
            f"stream.round = {config.stream.round} and stream.staleness = {config.stream.staleness}: both define which "
            "weights generate a batch. Set --stream.staleness 0 for rounds, or --stream.round 1."
        )
    problems += _filtering(config, unscored=unscored and not needs.reward)
    return problems


def _demonstrations(run: RunPlugins, needs: Needs) -> list[str]:
    """Problems of mixing answers of the data with the policy's answers."""
    problems, config, name = [], run.config, run.algorithm.name
    share, per_group = needs.demonstration_share, needs.demonstrations_per_group
    if share and (needs.reward or not 0 < share < 1):
        problems.append(
            f"{name} declares demonstration_share = {share:g} and reward = {needs.reward}: answers of the data are not "
            "scored, so demonstration_share needs reward = False and a value from 0 to below 1. Report this to its "
            "author."
        )
    if per_group and not needs.reward:
        problems.append(
            f"{name} declares demonstrations_per_group = {per_group} and reward = False: these answers of the data are "
            "scored with the samples. Report this to its author."
        )
    if per_group >= config.sampling.samples_per_prompt:
        problems.append(
            f"{name} takes {per_group} samples of each group from the data, and the policy samples the others, but "
            f"sampling.samples_per_prompt = {config.sampling.samples_per_prompt}; set "
            f"--sampling.samples_per_prompt {per_group + 1} or more."
        )
    if per_group and needs.generator_logprobs:
        problems.append(
            f"{name} configured like this takes samples from the data, for which the generator reports no log-probs, "
            "but reads the generator's log-probs. Remove the option that reads them, such as "
            "--algorithm.loss.correction.preset."
        )
    if needs.answered and config.env is not None:
        sources = ", ".join(map(repr, needs.demonstration_sources))
        rows = f"the rows of {sources}" if sources else "all rows"
        if share:
            rows = f"a share of {share:.3g} of the rows"
        problems.append(
            f"{name} configured like this learns from the answers of {rows}. These answers reply to the row's prompt, "
            f"not to an environment, but env {config.env.use!r} is set. Remove it, or let the policy sample all "
            "answers."
        )
    return problems


def _greedy(run: RunPlugins, needs: Needs) -> list[str]:
    """Greedy answers that nothing reads, or that nothing samples."""
    problems, name = [], run.algorithm.name
    if needs.greedy and not needs.reward:
        problems.append(
            f"{name} declares greedy = True and reward = False: nothing reads a greedy answer without a reward. Report "
            "this to its author."
        )
    if needs.greedy and run.rollout is not None and not run.rollout.needs_generator:
        problems.append(
            f"{name} configured like this compares samples with a greedy answer to the same prompt, but rollout "
            f"{run.config.rollout.use!r} generates nothing, so there is no greedy answer. Use another --rollout.use or "
            "--algorithm.advantage.use; `rlhf replay RUN` repeats a run with its greedy answers."
        )
    return problems


def _teachers(run: RunPlugins, needs: Needs) -> list[str]:
    """Log-probs of a teacher that nothing reads."""
    return [
        f"reward {reward.name!r} gives log-probs of a teacher, which {run.algorithm.name} configured like this does "
        "not read. Remove it, or let the algorithm learn from a teacher (`rlhf explain algorithm.teacher`)."
        for reward in run.rewards
        if reward.instance.is_teacher and TEACHERS not in needs.features
    ]


def room(run: RunPlugins) -> list[str]:
    """Answer lengths that leave no room for a prompt."""
    answer, longest = run.config.sampling.max_new_tokens, run.config.data.max_tokens
    if not run.online or answer < longest:
        return []
    return [
        f"sampling.max_new_tokens = {answer} leaves no room for a prompt within data.max_tokens = {longest}. Set "
        f"--data.max_tokens to the longest prompt plus {answer}."
    ]


def _turn_credit(run: RunFile, algorithm: Algorithm) -> list[str]:
    """Rewards at single turns need an estimator that supports them."""
    if run.env is None or run.env.credit == "outcome":
        return []
    estimators = [part for part in algorithm.parts.values() if isinstance(part, Advantage)]
    if estimators and all(part.token_rewards for part in estimators):
        return []
    label = f"advantage {estimators[0].name!r}" if estimators else f"algorithm {algorithm.name!r}"
    return [
        f"env.credit = 'step': {label} compares sums of rewards over whole trajectories, which would not contain the "
        "rewards at single turns. Set --env.credit outcome, or use an advantage without a baseline over groups."
    ]


def environment(run: RunPlugins) -> list[str]:
    """Problems of the rollout with the environment, in training or in evaluation."""
    config, rollout = run.config, run.rollout
    if rollout is None:
        return []
    if rollout.needs_env and config.env is None:
        return [f"rollout {config.rollout.use!r} needs an environment. Name one: --env.use NAME."]
    if config.env is not None and not rollout.needs_env and not rollout.replays_env:
        return [
            f"env {config.env.use!r} is set, but rollout {config.rollout.use!r} uses no environment. Set --rollout.use "
            "to a rollout that does (e.g. multi_turn), or remove [env]."
        ]
    return _agents(run)


def concurrency(run: RunPlugins) -> list[str]:
    """Numbers of concurrent samples or calls with which a rollout or a reward would wait forever."""
    limits = {f"reward {reward.name!r}": reward.instance.concurrency for reward in run.rewards}
    if run.rollout is not None:
        limits[f"rollout {run.config.rollout.use!r}"] = run.rollout.concurrency
    return [
        f"{owner} has concurrency = {limit!r}; allowed: None, or an integer of at least 1. Report this to its author."
        for owner, limit in limits.items()
        if limit is not None and (not isinstance(limit, int) or limit < 1)
    ]


def _agents(run: RunPlugins) -> list[str]:
    """Problems of an environment in which the policy plays several agents."""
    agents, rollout, needs = played(run), run.rollout, run.algorithm.needs()
    if not agents or run.config.env is None or rollout is None:
        return []
    game = f"env {run.config.env.use!r}: the policy plays {' and '.join(map(repr, agents))}"
    problems = []
    if not rollout.plays_agents:
        problems.append(
            f"{game}, but rollout {run.config.rollout.use!r} plays only one agent. Set --rollout.use to a rollout that "
            "plays several (e.g. multi_turn)."
        )
    if needs.greedy:
        problems.append(
            f"{game}. {run.algorithm.name} configured like this compares samples with a greedy answer to the same "
            "prompt, which is not sampled in such games. Use another --algorithm.advantage.use, such as rae."
        )
    curriculum = run.parts["curriculum"].resolved.cls if "curriculum" in run.parts else None
    if curriculum is not None and curriculum.min_scores:
        problems.append(
            f"{game}, and curriculum {curriculum.name!r} chooses rows by the scores of a prompt's samples, which "
            "belong to different agents. Remove [curriculum], or use one that reads no scores."
        )
    return problems


def played(run: RunPlugins) -> tuple[str, ...]:
    """The agents that the policy plays in the environment of the run; empty if it plays one agent without a name."""
    env = run.parts.get("env")
    return () if env is None else agents_played(env.resolved, env.config)


def _in_environment(run: RunPlugins) -> bool:
    """Whether samples are made in an environment, or were made in one if a rollout replays them."""
    rollout = run.rollout
    return rollout is not None and (rollout.needs_env or (rollout.replays_env and run.config.env is not None))


def _filtering(run: RunFile, unscored: bool) -> list[str]:
    """Problems of ``stream.filter``. ``unscored``: answers have no scores and need none."""
    problems, f = [], run.stream.filter
    if f is None:
        return []
    if unscored:
        problems.append("stream.filter reads scores, but the run has no reward. Remove it, or set --reward NAME.")
    if f.low is None and f.high is None and f.min_std is None:
        problems.append("stream.filter: neither low, high nor min_std is set, so it would filter nothing.")
    if f.low is not None and f.high is not None and f.low >= f.high:
        problems.append(f"stream.filter: low = {f.low:g} must be below high = {f.high:g}.")
    if f.min_std is not None and run.sampling.samples_per_prompt < 2:
        problems.append(
            "stream.filter.min_std: one sample per prompt has no deviation; set --sampling.samples_per_prompt 2."
        )
    return problems


def _shape(run: RunPlugins) -> OnlineShape:
    """The shape of the run. The number of turns of an answer is known only in an environment."""
    config, in_environment = run.config, _in_environment(run)
    # A prompt has at least one token.
    s, limit = config.sampling, config.data.max_tokens - 1
    turns = config.env.max_turns if in_environment and config.env is not None else 1
    answer = min(s.max_new_tokens * turns, limit)
    trajectories = config.data.batch_size * s.samples_per_prompt * max(1, len(played(run)))
    observes = run.rollout is not None and run.rollout.observes and not (in_environment and turns == 1)
    rewarded = in_environment or (run.rollout is not None and run.rollout.gives_rewards)
    return OnlineShape(trajectories, answer, answer if in_environment else limit, observes, s.temperature, rewarded)


def generator_capabilities(run: RunPlugins) -> list[str]:
    """Missing capabilities of the generator: log-probs for the algorithm, or weights from the trainer."""
    problems, algorithm, generator, trainer = [], run.algorithm, run.generator_class, run.trainer_class
    if generator is None:
        return []
    if algorithm.needs().generator_logprobs and "logprobs" not in generator.capabilities:
        problems.append(
            f"{algorithm.name} configured like this needs the log-probs of the generator, which generator "
            f"{generator.name!r} does not report (its capabilities: "
            f"{', '.join(sorted(generator.capabilities)) or 'nothing'})."
        )
    pairs = ((TakesModule, SharesModule), (TakesTensors, SendsWeights))
    if not any(issubclass(generator, takes) and issubclass(trainer, gives) for takes, gives in pairs):
        problems.append(
            f"generator {generator.name!r} ({', '.join(abilities(generator)) or 'no abilities'}) cannot take "
            f"weights from trainer {trainer.name!r} ({', '.join(abilities(trainer)) or 'no abilities'}). A "
            "TakesModule needs a SharesModule, a TakesTensors needs a SendsWeights."
        )
    return problems


ANSWERS = "answers"
"""Capability of launchers: single requests are answered during other work."""

KEEPS_KEYS = "keep:keys"
"""Capability of generators: ``GeneratorSpec.keys``."""


def stream(run: RunPlugins) -> list[str]:
    """Problems of the options by which batches are made."""
    if not run.online or run.config.stream.replay is not None:  # they describe how the recorded samples were drawn
        return []
    return _waves(run.config) if run.config.stream.mode == "waves" else _continuous(run)


def _waves(config: RunFile) -> list[str]:
    section, sync, problems = config.stream, config.sync, []
    if section.order != "submission":
        reason = "batches that are generated as a whole are in submission order"
        problems.append(f"stream.order = {section.order!r}: {reason}")
    if section.oversample is not None:
        reason = "batches are generated as a whole, and no others are started meanwhile"
        problems.append(f"stream.oversample = {section.oversample:g}: {reason}")
    if sync.in_flight != "continue":
        problems.append(f"sync.in_flight = {sync.in_flight!r}: no answer is unfinished when weights are sent")
    if sync.keys != "recompute":
        problems.append(f"sync.keys = {sync.keys!r}: no answer is unfinished when weights are sent")
    return [f"{problem}. Remove it, or set --stream.mode continuous." for problem in problems]


def _continuous(run: RunPlugins) -> list[str]:
    config, section, generator = run.config, run.config.stream, run.generator_class
    launcher: type[Launcher] = run.parts["launcher"].resolved.cls
    problems: list[str] = []
    if config.sync.keys == "keep" and config.sync.in_flight != "continue":
        problems.append(
            f"sync.keys = 'keep': with sync.in_flight = {config.sync.in_flight!r} no answer continues with new "
            "weights. Remove one of them."
        )
    elif config.sync.keys == "keep" and generator is not None and KEEPS_KEYS not in generator.capabilities:
        problems.append(
            f"sync.keys = 'keep': generator {generator.name!r} does not keep keys and values when it receives new "
            "weights. Remove it, or use another --generator.use."
        )
    if ANSWERS not in launcher.capabilities:
        problems.append(
            f"stream.mode = 'continuous': launcher {launcher.name!r} alternates between generation and training, so "
            "samples cannot continue while the policy learns. Remove it, or use a launcher with the capability "
            f"{ANSWERS!r}: `rlhf plugins list launcher`, `rlhf plugins show NAME`."
        )
    elif generator is not None and not issubclass(generator, AnswersRequests):
        problems.append(
            f"stream.mode = 'continuous': generator {generator.name!r} does not answer single requests. Remove it, or "
            "use a generator that does (--generator.use): `rlhf plugins list generator`, `rlhf plugins show NAME`."
        )
    if section.round > 1:
        problems.append(
            f"stream.round = {section.round} generates whole rounds before the first of their steps, but stream.mode = "
            "'continuous' generates all the time. Remove one of them; --stream.staleness allows older samples."
        )
    if section.oversample is not None and section.oversample > section.staleness + 1:
        problems.append(
            f"stream.oversample = {section.oversample:g}: with stream.staleness = {section.staleness} at most "
            f"{section.staleness + 1} batches may be started. Lower it, or raise --stream.staleness."
        )
    shared = config.placement.get(GENERATOR)
    if shared is not None and shared.share is not None:
        problems.append(
            f"stream.mode = 'continuous': [placement.generator] shares the devices of {shared.share!r}, which learns "
            "while samples are generated. Give the engines devices of their own, or remove stream.mode."
        )
    return problems
