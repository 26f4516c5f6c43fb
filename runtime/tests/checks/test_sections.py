"""Combinations that cannot work are refused before anything starts, each with what to do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import (
    GENERATOR,
    Advantage,
    Generator,
    GeneratorSpec,
    LendsHead,
    Loss,
    LowRankAdapters,
    ModelSpec,
    SendsWeights,
    TakesModule,
    TakesTensors,
    Trainer,
)
from rlhf.types import Lent, RoleSpec
from rlhf_runtime.checks.parts import check_base, with_adapters

from runtime.tests.checks.stub_run import StubAlgorithm, check

BASE = [("algorithm", "x"), ("policy.model", "m"), ("data.train", "a.jsonl"), ("reward", "math")]
OFFLINE = BASE[:3]


class Fake(StubAlgorithm):
    name = "leave_one_out"


class Demonstrations(Fake):
    name = "imitate"
    data = "demonstrations"


def messages(flags, algorithm=None, **options) -> str:
    with pytest.raises(ConfigError) as error:
        check(flags, algorithm or Fake(), **options)
    return str(error.value)


def test_valid_combinations_pass():
    check(BASE, Fake())
    check([*BASE[:3], ("env", "game")], Fake(), needs_env=True)
    check(OFFLINE, Demonstrations())
    roles = (RoleSpec("policy", trained=True), RoleSpec("critic"))
    check([*BASE, ("critic.model", "c")], Fake(roles=roles))
    check([*BASE, ("roles.judge.model", "j")], Fake(), reward_roles=[RoleSpec("judge", "scalar")])
    check([*OFFLINE, ("reward", "math"), ("data.eval", "b.jsonl")], Demonstrations())


class Shaped(Fake):
    """Refuses every shape, saying which it is."""

    def conflicts(self, shape):
        return [str(shape)]


@pytest.mark.parametrize(
    ("flags", "needs_env", "shape"),
    [
        ([], False, "trajectories=16, answer_tokens=256, most_tokens=2047"),
        ([("sampling.samples_per_prompt", "4"), ("data.batch_size", "8")], False, "trajectories=32, answer_tokens=256"),
        ([("env", "game"), ("env.max_turns", "3")], True, "answer_tokens=768, most_tokens=768"),
        ([("env", "game"), ("env.max_turns", "30")], True, "answer_tokens=2047, most_tokens=2047"),
    ],
)
def test_an_algorithms_conflicts_with_the_shape_of_the_run_are_reported(flags, needs_env, shape):
    assert shape in messages([*BASE, *flags], Shaped(), needs_env=needs_env)


@pytest.mark.parametrize("limit", [0, -1, 2.5])
def test_a_concurrency_with_which_no_sample_would_start_is_refused(limit):
    message = messages(BASE, limits=(limit, limit))
    for owner in ("rollout 'single_turn'", "reward 'math'"):
        assert f"{owner} has concurrency = {limit}; allowed: None, or an integer of at least 1" in message
    check(BASE, Fake(), limits=(1, 3))


def test_an_evaluation_of_equal_answers_is_refused():
    data = ("data.eval", "b.jsonl")
    assert "[eval] is set, but there is no data.eval" in messages([*BASE, ("eval.patience", "3")])
    message = messages([*BASE, data, ("eval.samples", "4")], generator=Generator)
    assert "eval.samples = 4 at eval.temperature = 0 gives the same answer 4 times" in message
    check([*BASE, data, ("eval.samples", "4"), ("eval.temperature", "1")], Fake())
    check([*BASE, data, ("eval.every", "4")], Fake())


def test_too_few_rows_a_step_are_refused():
    message = messages([*OFFLINE, ("data.batch_size", "1")], Demonstrations(rows_min=2))
    assert "needs at least 2 rows per step, got data.batch_size = 1; set --data.batch_size 2" in message


def test_an_algorithm_that_needs_no_reward():
    unscored = Fake(reward=False)
    check(OFFLINE, unscored)
    check([*BASE, ("stream.filter.low", "0"), ("data.eval", "b.jsonl")], unscored)
    check([*OFFLINE, ("data.eval", "b.jsonl"), ("eval.metric", "length")], unscored)
    filtered = messages([*OFFLINE, ("stream.filter.low", "0")], unscored)
    assert "stream.filter reads scores, but the run has no reward. Remove it, or set --reward NAME" in filtered
    evaluated = messages([*OFFLINE, ("data.eval", "b.jsonl")], unscored)
    assert "data.eval: nothing scores the answers" in evaluated
    assert "an online run needs a reward" in messages(OFFLINE)


def test_shared_heads_need_a_trainer_with_that_capability():
    class Lends(LendsHead, Trainer):
        name = "lends"

    class Keeps(Trainer):
        name = "keeps"

    roles = (RoleSpec("policy", trained=True), RoleSpec("teacher"))
    flags, algorithm = [*OFFLINE, ("roles.teacher.model", "t")], Demonstrations(roles=roles, loans=(Lent("teacher"),))
    check(flags, algorithm, trainer=Lends)
    message = messages(flags, algorithm, trainer=Keeps)
    assert "imitate lets a role compute with the output head of another role, which trainer 'keeps' does not" in message


def test_weights_in_bf16_need_a_trainer_with_that_capability():
    class Wide(Trainer):
        name = "wide"

    class Narrow(Trainer):
        name = "narrow"
        capabilities = frozenset({"storage:bf16"})

    roles = (RoleSpec("policy", trained=True), RoleSpec("teacher"))
    flags = [*OFFLINE, ("roles.teacher.model", "t"), ("roles.teacher.storage", "bf16")]
    algorithm = Demonstrations(roles=roles)
    check(flags, algorithm, trainer=Narrow)
    message = messages(flags, algorithm, trainer=Wide)
    assert "roles.teacher.storage = 'bf16': trainer 'wide' stores weights in fp32 only" in message


def test_settings_of_a_sync_that_never_happens_are_refused():
    class Holds(TakesTensors, Generator):
        name = "holds"
        capabilities = frozenset({"logprobs"})

    class Borrows(TakesModule, Generator):
        name = "borrows"
        capabilities = frozenset({"logprobs"})

    flags = [*BASE, ("sync.check", "warn")]
    check(flags, Fake(), generator=Holds)
    assert "[sync] is set, but generator 'borrows' holds no copy of the weights" in messages(flags, generator=Borrows)
    assert "[sync] is set, but this run has no generator" in messages(flags)


def test_group_size():
    message = messages([*BASE, ("sampling.samples_per_prompt", "1")], Fake(group_min=2))
    assert "leave_one_out needs at least 2 samples per prompt, got 1; set --sampling.samples_per_prompt 8" in message


@pytest.mark.parametrize(("key", "value"), [("top_p", "0.9"), ("top_k", "5"), ("min_p", "0.1")])
def test_truncated_sampling_needs_a_correction(key, value):
    flags = [*BASE, (f"sampling.{key}", value)]
    message = messages(flags)
    assert f"sampling.{key} = {value}: training samples would come from a different distribution" in message
    assert "set an importance correction: `rlhf explain algorithm.loss`" in message
    check(flags, Fake(features=("correction",)))


def test_samples_of_a_coarser_copy_of_the_policy_need_a_correction():
    class Coarse(TakesTensors, Generator):
        name = "coarse"

        @classmethod
        def approximation(cls, config):
            return "generator.bits = 8"

    message = messages(BASE, generator=Coarse)
    assert "generator.bits = 8: training samples come from a coarser copy of the policy" in message
    assert "Set an importance correction (`rlhf explain algorithm.loss` lists" in message
    check(BASE, Fake(features=("correction",)), generator=Coarse)


@pytest.mark.parametrize(
    ("flags", "options", "expected"),
    [
        ([], {"needs_env": True}, "rollout 'single_turn' needs an environment. Name one: --env.use NAME"),
        ([("env", "game")], {}, "env 'game' is set, but rollout 'single_turn' uses no environment"),
        (
            [("critic.model", "c")],
            {},
            "[critic] is set, but 'leave_one_out' configured like this has no role 'critic'",
        ),
        ([("roles.judge.model", "j")], {}, "[roles.judge]: no selected plugin declares this role"),
        ([("roles.policy.model", "j")], {}, "Write [policy]."),
        ([("sampling.max_new_tokens", "2048")], {}, "leaves no room for a prompt within data.max_tokens = 2048"),
        ([("stream.filter.max_rounds", "3")], {}, "neither low, high nor min_std is set"),
        ([("stream.filter.low", "0.9"), ("stream.filter.high", "0.1")], {}, "low = 0.9 must be below high = 0.1"),
        ([("stream.filter.min_std", "0.1")], {}, "one sample per prompt has no deviation"),
        (
            [("stream.round", "4"), ("stream.staleness", "1")],
            {},
            "stream.round = 4 and stream.staleness = 1: both define which weights generate a batch",
        ),
    ],
)
def test_online_combinations(flags, options, expected):
    assert expected in messages([*BASE, *flags], **options)


class Estimator(Advantage):
    """Return-to-go alone."""

    name = "to_go"

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        return R_NA, R_NA


class Compares(Estimator):
    name = "compares"

    def baseline(self, r_N, group_N):
        return r_N - r_N.mean()


def test_rewards_at_turns_need_an_estimator_that_reads_them_there():
    flags, env = [*BASE, ("env", "game"), ("env.credit", "step")], {"needs_env": True}
    reads, compares = Fake(), Fake()
    reads.parts, compares.parts = {"advantage": Estimator()}, {"advantage": Compares()}
    check(flags, reads, **env)
    assert "env.credit = 'step': advantage 'compares' compares sums of rewards" in messages(flags, compares, **env)
    assert "algorithm 'leave_one_out' compares sums of rewards" in messages(flags, **env)
    check([*BASE, ("env", "game")], compares, **env)
    offline = messages([*flags, ("data.eval", "b.jsonl")], Demonstrations())
    assert "env.credit = 'step' applies to training, but imitate learns from demonstrations" in offline


def test_a_recording_may_keep_the_environment_of_its_run():
    flags = [*BASE, ("env", "game"), ("env.max_turns", "3")]
    check(flags, Fake(), replays_env=True)
    shaped = messages(flags, Shaped(), replays_env=True)
    assert "answer_tokens=768, most_tokens=768" in shaped


def test_gradient_checkpointing_of_a_frozen_role_is_refused():
    """Of a policy that only answers a run file may say how it is trained."""
    policy, reference, judge = RoleSpec("policy"), RoleSpec("reference", like="policy"), RoleSpec("judge", model="j")
    roles = (policy, reference, judge)
    check([*BASE, ("policy.gradient_checkpointing", "true")], Fake(roles=roles))
    options = [("reference.gradient_checkpointing", "true"), ("roles.judge.gradient_checkpointing", "true")]
    message = messages([*BASE, *options], Fake(roles=roles))
    assert "reference.gradient_checkpointing = true: reference is not trained" in message
    assert "roles.judge.gradient_checkpointing = true: judge is not trained" in message


def test_all_missing_options_are_named_at_once():
    message = messages([("algorithm", "x")], Fake(group_min=2))
    assert "(4 problems)" in message
    assert "policy.model: no model is named. Set --model PATH" in message
    assert "data.train: no training data is named. Set --data FILE" in message
    assert "an online run needs a reward, or an environment that gives one. Set --reward NAME" in message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([("stream.staleness", "1")], "[stream] is set, but imitate learns from demonstrations and samples nothing"),
        ([("reward", "math")], "reward is set, but imitate learns from demonstrations"),
        ([("env", "game")], "env is set, but imitate learns from demonstrations"),
    ],
)
def test_options_that_an_offline_run_ignores_are_refused(flags, expected):
    assert expected in messages([*OFFLINE, *flags], Demonstrations())


def test_an_offline_run_that_evaluates_by_answers_is_checked_like_one_that_samples():
    class Borrows(TakesModule, Generator):
        name = "borrows"

    class Divides(SendsWeights, Trainer):
        name = "divides"

    evaluated = [*OFFLINE, ("data.eval", "b.jsonl"), ("reward", "math")]
    check(evaluated, Demonstrations())
    message = messages(evaluated, Demonstrations(), generator=Borrows, trainer=Divides)
    assert "generator 'borrows' (TakesModule) cannot take weights from trainer 'divides' (SendsWeights)" in message
    assert "rollout 'single_turn' needs an environment" in messages(evaluated, Demonstrations(), needs_env=True)
    assert "env 'game' is set, but rollout 'single_turn' uses no environment" in messages(
        [*evaluated, ("env", "game")], Demonstrations()
    )


def test_a_policy_without_an_output_for_tokens_answers_nothing():
    scores = Demonstrations(roles=(RoleSpec("policy", head="scalar", trained=True),))
    evaluated = [*OFFLINE, ("data.eval", "b.jsonl")]
    check(evaluated, scores)
    message = messages([*evaluated, ("reward", "math")], scores)
    assert (
        "the policy of imitate has a 'scalar' head and writes no answers; data.eval is scored by the loss. Remove it."
        in message
    )


def of_form(form, loss=None):
    algorithm = Demonstrations()
    algorithm.data, algorithm.parts = form, {} if loss is None else {"loss": loss}
    return algorithm


class WithMargin(Loss):
    name = "far"

    def outputs(self):
        return ("scores",)

    def columns(self):
        return ("margin",)

    def reduce(self):
        return {}

    def __call__(self, x):
        raise NotImplementedError


def test_loss_on_is_for_demonstrations_and_answers_of_several_turns():
    assert "data.loss_on = 'all' applies to demonstrations" in messages([*BASE, ("data.loss_on", "all")])
    every_answer = [*OFFLINE, ("data.loss_on", "assistant")]
    for form in ("demonstrations", "pairs", "labels"):  # what a pair that parts early is told to set must be possible
        check(every_answer, of_form(form))
    message = messages(every_answer, of_form("steps"))
    assert (
        "data.loss_on = 'assistant' applies to demonstrations and pairs and labels, but imitate learns from steps"
        in message
    )


@pytest.mark.parametrize(
    ("form", "field", "reader"),
    [
        ("demonstrations", "chosen", "pairs"),
        ("labels", "margin", "pairs"),
        ("pairs", "label", "labels"),
        ("demonstrations", "steps", "steps"),
        ("labels", "step_separator", "steps"),
        ("pairs", "messages", "demonstrations and labels and prompts"),
        ("steps", "response", "demonstrations and labels"),
    ],
)
def test_columns_that_no_row_of_this_form_has_are_refused(form, field, reader):
    message = messages([*OFFLINE, (f"data.{field}", "x")], of_form(form))
    assert f"data.{field}: used for {reader} only, but imitate learns from {form}. Remove what is not used." in message
    check([*OFFLINE, (f"data.{field}", "x")], of_form(reader.partition(" ")[0], WithMargin()))


def test_answer_columns_are_allowed_for_prompts_if_the_algorithm_learns_from_answers():
    answer = [*OFFLINE, ("data.response", "x"), ("data.add_eos", "false")]
    check(answer, Fake(reward=False, demonstration_share=0.5))
    message = messages(answer, Fake(reward=False))
    assert "data.response: used for demonstrations and labels only, but leave_one_out learns from prompts" in message
    assert "data.add_eos: used for demonstrations and pairs and labels only" in message


@pytest.mark.parametrize(
    "flag", ["samples_per_prompt=4", "temperature=0.5", "top_p=0.9", "top_k=5", "min_p=0.1", "ignore_eos=true"]
)
def test_sampling_options_are_refused_without_training_samples(flag):
    name, value = flag.split("=")
    options = [*OFFLINE, (f"sampling.{name}", value)]
    assert f"sampling.{name} = " in messages(options, Demonstrations())
    evaluated = [*options, ("data.eval", "b.jsonl"), ("reward", "math")]
    assert f"sampling.{name} = " in messages(evaluated, Demonstrations())


def test_stop_options_are_allowed_if_an_offline_run_is_evaluated_by_answers():
    limits = [*OFFLINE, ("sampling.max_new_tokens", "9"), ("sampling.stop", '["x"]')]
    check([*limits, ("data.eval", "b.jsonl"), ("reward", "math")], Demonstrations())
    message = messages(limits, Demonstrations())
    assert "sampling.max_new_tokens = 9: imitate learns from demonstrations" in message
    assert "sampling.stop = ('x',)" in message


def test_patience_needs_evaluations_to_count():
    flags = [*BASE, ("data.eval", "b.jsonl"), ("eval.patience", "3")]
    assert "eval.patience = 3 counts evaluations during training, but eval.every is not set" in messages(flags)
    check([*flags, ("eval.every", "4")], Fake())


def test_margins_that_no_loss_reads_are_refused():
    margins = [*OFFLINE, ("data.margin", "by")]
    check(margins, of_form("pairs", WithMargin()))
    assert "data.margin = 'by': the loss of imitate reads no margins. Remove it" in messages(margins, of_form("pairs"))


def test_capabilities():
    class Silent(TakesModule, Generator):
        name = "silent"

    class Remote(SendsWeights, Trainer):
        name = "remote"

    message = messages(BASE, Fake(generator_logprobs=True), generator=Silent, trainer=Remote)
    assert "needs the log-probs of the generator, which generator 'silent' does not report" in message
    assert "generator 'silent' (TakesModule) cannot take weights from trainer 'remote' (SendsWeights)" in message


@pytest.mark.parametrize("choice", ["merged", "alone"])
def test_adapters_go_alone_where_the_run_file_asks_for_it(choice):
    adapters = LowRankAdapters(4, 2.0, ("q_proj",))
    engine = with_adapters(run_with(adapters, choice), POLICY, GeneratorSpec((), str))
    assert engine.adapters == (adapters if choice == "alone" else None)


@pytest.mark.parametrize(
    ("adapters", "refusal", "reason"),
    [
        (None, "", r"the policy trains no adapters \(trainer\.lora\)"),
        (LowRankAdapters(4, 2.0, (), "trainer.lora.use_dora: the rows"), "", "trainer.lora.use_dora: the rows"),
        (LowRankAdapters(4, 2.0), "it has stages", "it has stages"),
    ],
)
def test_adapters_that_cannot_go_alone_are_refused_with_the_reason(adapters, refusal, reason):
    engine = GeneratorSpec((), str)
    with pytest.raises(CapabilityError, match=f"sync.adapters = 'alone': {reason}.*set it to 'merged'"):
        with_adapters(run_with(adapters, "alone", refusal), POLICY, engine)
    assert with_adapters(run_with(adapters, "merged", refusal), POLICY, engine) == engine
    answers = replace(POLICY, role=RoleSpec("policy"))  # a job with the section of the run that trained
    assert with_adapters(run_with(None, "alone"), answers, engine) == engine


@pytest.mark.parametrize(
    ("adapters", "choice", "abilities", "capabilities", "reason"),
    [
        (LowRankAdapters(4, 2.0), "alone", TakesTensors, {"base"}, ""),
        (LowRankAdapters(4, 2.0), "merged", TakesModule, {"base"}, ""),
        (None, "merged", TakesModule, {"base"}, r"trains no adapters\. Set --trainer\.lora\.rank 16"),
        (LowRankAdapters(4, 2.0), "alone", TakesTensors, set(), "lacks the capability 'base'"),
        (LowRankAdapters(4, 2.0), "merged", TakesTensors, {"base"}, r"Set --sync\.adapters alone"),
    ],
)
def test_a_rollout_samples_from_the_base_only_where_the_generator_can(
    adapters, choice, abilities, capabilities, reason, tmp_path
):
    (tmp_path / "adapter_config.json").write_text("{}")
    generator = type("Engine", (abilities, Generator), {"capabilities": capabilities, "name": "engine"})
    engine, continued = GeneratorSpec((), str), replace(POLICY, path=str(tmp_path))
    engine = replace(engine, adapters=adapters if choice == "alone" else None)
    run = run_with(adapters, choice)
    run.rollout, run.generator_class = SimpleNamespace(needs_base=True, name="against"), generator
    if reason:
        with pytest.raises(CapabilityError, match=rf"rollout 'against' samples from the base .*{reason}"):
            check_base(run, POLICY, engine)
        run.rollout.needs_base = False
        check_base(run, POLICY, engine)
        return
    check_base(run, POLICY, engine)
    with pytest.raises(CapabilityError, match="a job that trains nothing has no adapters"):
        check_base(run, replace(POLICY, role=RoleSpec("policy")), engine)
    if abilities is TakesModule:  # the trainer keeps the first adapters
        check_base(run, continued, engine)
        return
    with pytest.raises(
        CapabilityError, match=f"starts from the adapter {tmp_path}, .* rlhf merge {tmp_path} NEW_FOLDER"
    ):
        check_base(run, continued, engine)


POLICY = ModelSpec(RoleSpec("policy", trained=True), "m")


def run_with(adapters, choice, refusal=""):
    trainer = SimpleNamespace(adapters=lambda config, spec: adapters)
    generator = SimpleNamespace(refuses_adapters=lambda c, s: refusal)
    parts = {GENERATOR: SimpleNamespace(resolved=SimpleNamespace(cls=generator), config=None)}
    role = SimpleNamespace(resolved=SimpleNamespace(cls=trainer), config=None)
    sync = SimpleNamespace(adapters=choice)
    return SimpleNamespace(config=SimpleNamespace(sync=sync), parts=parts, trainer=lambda name: role)
