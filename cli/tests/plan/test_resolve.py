"""Layouts from run files: the run's plugins, roles and places, without loading anything."""

from __future__ import annotations

import json
import os
import re

import pytest
from rlhf.control_groups import MachineMemory
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import GENERATOR
from rlhf.plugins import Plugins
from rlhf_cli.plan.command import target
from rlhf_cli.plan.from_run_file import layout_of, planned_run, work_of
from rlhf_cli.plan.layout import Machine
from rlhf_cli.plan.nearest_change import nearest
from rlhf_cli.plan.phases import make_plan
from rlhf_cli.plan.report import as_json, assumptions, describe
from rlhf_cli.plan.row_lengths import limits, read_lengths
from rlhf_runtime.checks.run import run_plugins
from rlhf_runtime.config.load import load
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.tokenizer import load_tokenizer
from rlhf_testing.chat_templates import HERMES
from rlhf_testing.tiny import tiny_model
from transformers import AutoTokenizer

from tests.forks import Place

GIB = 2**30
ONLINE = {"algorithm.use": "ppo", "reward": "math", "data.train": "absent.jsonl", "data.max_tokens": "1024"}
CLUSTER = {
    "launcher.use": "ray", "trainer.use": "deepspeed", "generator.use": "vllm", "placement.policy.ranks": "4",
    "placement.critic.ranks": "4", "placement.critic.share": "policy", "placement.generator.ranks": "2",
    "placement.generator.devices": "2", "placement.generator.share": "policy", "generator.tensor_parallel": "2",
    "generator.memory_share": "0.5",
}  # fmt: skip


@pytest.fixture(scope="module")
def plugins():
    return Plugins.discover()


def flags(published, *changes, model="0.6B"):
    merged = {**ONLINE, "policy.model": published(model)}
    for extra in changes:
        merged |= extra
    return list(merged.items())


def resolve(config, plugins, machine, lengths=None):
    return layout_of(planned_run(config, plugins, machine.device), machine, lengths)


@pytest.fixture
def layout(published, plugins):
    """layout(*options): of a run with these options in addition, on GPUs of 80 GiB if ``machine`` is not given."""

    def make(*changes, model="0.6B", machine=None):
        return resolve(
            load(None, flags(published, *changes, model=model)), plugins, machine or Machine("cuda", 80 * GIB)
        )

    return make


def test_a_folder_with_nothing_but_a_config_is_enough(layout):
    outcome = layout({"policy.dtype": "fp32"}, machine=Machine("cpu", 64 * GIB))
    assert [(r.name, r.trained, r.annotates) for r in outcome.roles] == [
        ("policy", True, False),
        ("critic", True, True),
    ]
    policy, critic = outcome.roles
    assert policy.size.parameters == 596_049_920
    assert critic.size.parameters == policy.size.parameters + 1024
    assert (policy.memory.micro_tokens, policy.longest) == (2048, 1024)
    assert not outcome.machine.processes
    assert outcome.devices == 1
    assert make_plan(outcome).fits


def test_a_lent_head_is_whole_where_roles_have_processes_of_their_own(published, plugins):
    """The head of the 8B is 128256 x 4096 in fp32, on each rank of the student. Hidden states are no logits."""
    changes = {
        "algorithm.use": "distill", "data.train": "absent.jsonl", "data.max_tokens": "1024",
        "policy.model": published("0.6B"), "roles.teacher.model": published("8B"), "policy.dtype": "fp32",
    }  # fmt: skip
    run = load(None, list(changes.items()))
    policy, teacher = resolve(run, plugins, Machine("cpu", 64 * GIB)).roles
    assert (policy.borrowed, teacher.borrowed, teacher.annotates) == (0, 0, True)
    assert (
        "logits" not in teacher.memory.phases["forward"].device
        or teacher.memory.phases["forward"].device["logits"] < 2**27
    )
    ray = load(None, list({**changes, "launcher.use": "ray"}.items()))
    outcome = resolve(ray, plugins, Machine("cpu", 64 * GIB))
    assert [r.borrowed for r in outcome.roles] == [128_256 * 4096 * 4, 0]


def test_options_change_the_layout(layout):
    outcome = layout({"policy.gradient_checkpointing": "true", "policy.micro_tokens": "512", "policy.dtype": "bf16",
         "trainer.ema_decay": "0.99", "trainer.logits_chunk": "1000000", "policy.trainer.lora.rank": "8",
         "generator.max_batch": "7"},
    )  # fmt: skip
    policy, critic = outcome.roles
    assert policy.gradient_checkpointing
    assert not critic.gradient_checkpointing
    assert policy.memory.micro_tokens == 1024, "a sequence may be longer than the budget"
    assert policy.memory.bf16
    assert policy.memory.arithmetic["logits"].startswith("chunks of at most 1000000 logits")
    assert policy.memory.trained == policy.size.adapter_parameters(8)
    assert critic.memory.trained == critic.size.parameters
    assert critic.memory.phases["rest"].device["optimizer"] == 12 * critic.size.parameters, "with the average"
    assert outcome.engines.memory.arithmetic["cache"].startswith("7 samples x 1024 tokens")


def test_the_work_of_a_role_comes_from_the_run_file(published, plugins):
    group = {"algorithm.use": "grpo", "sampling.samples_per_prompt": "8", "sampling.max_new_tokens": "512"}
    short = {**group, "data.max_prompt_tokens": "256"}
    outcome, bounded = (run_plugins(load(None, flags(published, options)), plugins) for options in (group, short))
    work, bounded_work = (work_of(parts, "policy", set(), 1, limits(parts, "")) for parts in (outcome, bounded))
    assert (work.longest, work.prompt, work.siblings, work.outputs) == (1024, 512, 8, ("logprobs",))
    assert work.units == 8 * outcome.config.data.batch_size
    assert (bounded_work.longest, bounded_work.prompt) == (768, 256)
    rows = [(k, v) for k, v in flags(published, {"algorithm.use": "dpo"}) if k != "reward"]
    parts = run_plugins(load(None, rows), plugins)
    pairs = work_of(parts, "policy", set(), 1, limits(parts, ""))
    assert (pairs.unit, pairs.longest, pairs.prompt, pairs.siblings) == (2048, 1024, 512, 2)


def measured(tmp_path, plugins, algorithm, *rows, chat_template=None, **options):
    """The lengths of these rows, and the run's plugins."""
    model = tiny_model(tmp_path / "model", chat_template=chat_template)
    for name, selection in (("train", rows), ("held_out", rows[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in selection))
    settings = {"algorithm.use": algorithm, "policy.model": str(model), "data.train": str(tmp_path / "train.jsonl")}
    parts = run_plugins(load(None, list((settings | options).items())), plugins)
    return read_lengths(parts), parts


def test_prompts_of_the_rollout_tools_have_the_descriptions_of_the_tools(tmp_path, plugins):
    """Those of a column `tools` are not shown beside them."""
    (tmp_path / "tool.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "10+10?", "answer": "20"}]
    options = {
        "reward": "math",
        "sampling.samples_per_prompt": "4",
        "rollout.use": "tools",
        "rollout.functions": f'["file:{tmp_path}/tool.py:add"]',
        "data.eval": str(tmp_path / "held_out.jsonl"),
    }
    lengths, parts = measured(tmp_path, plugins, "grpo", *rows, chat_template=HERMES, **options)
    tokenizer, tools = AutoTokenizer.from_pretrained(tmp_path / "model"), parts.rollout.tools()

    def tokens(row):
        messages = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert lengths.prompt == tokens(rows[1])
    assert lengths.held_out_prompt == tokens(rows[0])
    assert lengths.longest == parts.config.data.max_tokens, "turns of several calls"
    assert "of tools" in lengths.source
    with_column = [row | {"tools": tools} for row in rows]
    assert measured(tmp_path, plugins, "grpo", *with_column, chat_template=HERMES, **options)[0] == lengths


def test_lengths_are_those_of_the_tokenised_rows(tmp_path, plugins):
    """The tiny tokenizer has a token for each character, and an end token."""
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "10+10=", "answer": "20"}]
    held_out = {"data.eval": str(tmp_path / "held_out.jsonl"), "eval.max_new_tokens": "90"}
    online = {
        "reward": "math",
        "data.batch_size": "8",
        "sampling.max_new_tokens": "30",
        "sampling.samples_per_prompt": "4",
    } | held_out
    lengths, parts = measured(tmp_path, plugins, "grpo", *rows, **online)
    assert lengths.measured
    assert (lengths.prompt, lengths.answer, lengths.longest, lengths.unit) == (6, 30, 36, 36)
    assert (lengths.held_out, lengths.held_out_prompt, lengths.held_out_longest) == (1, 4, 94)
    assert lengths.source == "prompts of 6 tokens, the longest of 2 rows"
    outcome = resolve(parts.config, plugins, Machine("cpu", 64 * GIB))
    assert outcome.lengths == lengths
    assert outcome.role("policy").memory.micro_tokens == 8 * 6 + 32 * 30, "each of 8 prompts once, 32 answers"
    assert outcome.engines.memory.arithmetic["cache"].startswith("32 samples x 94 tokens")
    of_two = {f"data.eval.{n}.path": str(tmp_path / f"{name}.jsonl") for n, name in enumerate(("train", "held_out"))}
    del online["data.eval"]
    lengths, _ = measured(tmp_path, plugins, "grpo", *rows, **online, **of_two, **{"eval.max_rows": "1"})
    assert (lengths.held_out, lengths.held_out_prompt) == (2, 4), "the first row of each source"


def test_lengths_of_given_rows_are_those_of_prompt_and_answer(tmp_path, plugins):
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "33333"}, {"prompt": "1=", "chosen": "1", "rejected": "2"}]
    lengths, parts = measured(tmp_path, plugins, "dpo", *pairs)
    assert (lengths.prompt, lengths.longest, lengths.unit) == (4, 4 + 6, 4 + 2 + 4 + 6)
    assert lengths.source == "rows of 10 tokens, the longest of 2 rows"
    assert lengths.step == (16 - 4) + (8 - 2), "the prompt of a pair once"
    assert resolve(parts.config, plugins, Machine("cpu", 64 * GIB)).role("policy").memory.micro_tokens == lengths.step


@pytest.mark.parametrize(
    ("change", "rows_text"),
    [
        ({"run.steps": "1"}, "the 2 rows of the run's steps"),
        ({"run.steps": "9"}, "4 rows"),
        ({"run.steps": "1", "stream.filter.low": "0.1"}, "4 rows"),
    ],
    ids=["one step", "more steps than rows", "other rows in place of those that a filter rejects"],
)
def test_rows_that_no_step_takes_do_not_count(tmp_path, plugins, change, rows_text):
    rows = [{"prompt": "1" * n, "answer": "2"} for n in (2, 3, 4, 30)]
    group = {"reward": "math", "sampling.samples_per_prompt": "2", "data.batch_size": "2", "data.shuffle": "false"}
    lengths, _ = measured(tmp_path, plugins, "grpo", *rows, **group | change)
    assert lengths.prompt == (3 if "steps" in rows_text else 30)
    assert lengths.source.endswith(f"the longest of {rows_text}")


def test_rows_that_are_left_out_do_not_count(tmp_path, plugins):
    rows = [{"prompt": "1" * n, "answer": "2"} for n in (2, 30, 5)]
    group = {"reward": "math", "sampling.samples_per_prompt": "2", "data.shuffle": "false"}
    dropped = {"data.too_long": "drop", "data.max_prompt_tokens": "10"}
    lengths, _ = measured(tmp_path, plugins, "grpo", *rows, **group | dropped)
    assert lengths.prompt == 5
    assert lengths.source.endswith("the longest of 2 rows")


@pytest.mark.parametrize(
    ("data", "run", "steps"),
    [('too_long = "drop"\nmax_prompt_tokens = 25', "steps = 3", 3), ("", "epochs = 4.0", 44)],
    ids=["the next row of its source replaces a row", "a pass lacks rows of a later pass"],
)
def test_with_probabilities_the_rows_are_those_of_the_steps(tmp_path, plugins, data, run, steps):
    model = tiny_model(tmp_path / "model")
    for name, lengths in (("a", (3, 30, 4, 31, 5, 32)), ("b", (6, 33, 7, 34, *range(8, 20)))):
        rows = [{"prompt": "1" * n, "answer": "2"} for n in lengths]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed in range(4):
        (tmp_path / "run.toml").write_text(
            f"""
            [algorithm]
            use = "grpo"
            [policy]
            model = "{model}"
            [data]
            batch_size = 2
            {data}
            [[data.train]]
            path = "{tmp_path / "a.jsonl"}"
            probability = 0.8
            [[data.train]]
            path = "{tmp_path / "b.jsonl"}"
            probability = 0.2
            [sampling]
            samples_per_prompt = 2
            [[reward]]
            use = "math"
            [run]
            seed = {seed}
            {run}
            """
        )
        parts = run_plugins(load(tmp_path / "run.toml", []), plugins)
        train_data = TrainData(parts.config.data, load_tokenizer(str(model)), "prompts", seed)
        taken_rows = [row for _ in range(steps) for row in train_data.take(2)]
        lengths = read_lengths(parts)
        assert lengths.prompt == max(len(row.columns["prompt"]) for row in taken_rows)
        assert lengths.source.endswith(f"the longest of the {2 * steps} rows of the run's steps")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data.train": "absent.jsonl"}, "absent.jsonl is not a file on this machine"),
        ({"data.max_prompt_tokens": "3"}, "no row is usable"),
        ({"data.prompt": "question"}, "they cannot be read (.*question"),
    ],
)
def test_where_rows_cannot_be_read_the_limits_count(tmp_path, plugins, change, reason):
    row = {"prompt": "1+1=", "answer": "2"}
    group = {"reward": "math", "sampling.samples_per_prompt": "2", "data.too_long": "drop"}
    lengths, _ = measured(tmp_path, plugins, "grpo", row, **group | change)
    assert not lengths.measured
    assert re.search(reason.replace("(", r"\("), lengths.source), lengths.source
    assert "data.max_tokens = 2048" in lengths.source


def test_a_plan_says_what_its_assumptions_cost(tmp_path, published, plugins):
    settings = {"algorithm.use": "grpo", "sampling.max_new_tokens": "512", "sampling.samples_per_prompt": "2"}
    settings["policy.dtype"] = "fp32"  # whatever this machine's processor computes in
    config = load(None, flags(published, settings))
    machine = Machine("cpu", 64 * GIB)
    plan = make_plan(resolve(config, plugins, machine))
    rows, answers = assumptions(plan, lambda lengths: make_plan(resolve(config, plugins, machine, lengths)))
    assert re.match(r"assumes rows as long as data.max_tokens = 1024 allows, because absent.jsonl is not", rows)
    assert re.search(r"if they are half as long, the peak is [\d.]+ [GM]iB lower$", rows)
    assert re.match(r"assumes answers of 512 tokens, the most that the run file allows: if they are half", answers)
    smaller = make_plan(resolve(load(None, flags(published, settings | {"data.max_tokens": "600"})), plugins, machine))
    assert [
        text.endswith("the peak is not lower if they are half as long") for text in assumptions(smaller, lambda _: plan)
    ] == [True, True]


def test_entropy_and_reference_cost_what_they_need(layout):
    outcome = layout({"algorithm.kl.coef": "0.1", "algorithm.loss.entropy_coef": "0.01"})
    reference, policy = outcome.role("reference"), outcome.role("policy")
    assert (reference.trained, reference.annotates) == (False, True)
    plain = layout({"algorithm.kl.coef": "0.1"}).role("policy")
    logits = [role.memory.phases["train"].device["logits"] for role in (plain, policy)]
    assert logits[1] > logits[0], "six copies of the logits instead of four"


LORA = {"algorithm.kl.coef": "0.1", "trainer.lora.rank": "8"}


def test_a_reference_that_is_the_policy_without_its_adapters_is_no_second_model(layout):
    on_cpu = Machine("cpu", 64 * GIB)
    view = layout(LORA, machine=on_cpu)
    model = layout(LORA, {"reference.micro_tokens": "1024"}, machine=on_cpu)
    assert [r.name for r in view.roles] == ["policy", "critic"]
    assert [r.name for r in model.roles] == ["policy", "reference", "critic"], "what is said of it is not ignored"
    assert view.views["reference"].base_role == "policy"
    assert view.role("policy").annotates
    assert model.role("reference").annotates
    view_moments, model_moments = (make_plan(outcome).groups[0].moments for outcome in (view, model))
    assert "forward" in view_moments
    assert "reference" not in view_moments["forward"].rows
    assert model_moments["train"].total - view_moments["train"].total == 4 * view.role("policy").size.parameters


@pytest.mark.parametrize(
    "changes",
    [
        {"placement.reference.ranks": "1"},
        {"placement.reference.share": "policy", "placement.reference.ranks": "1"},
        {"reference.dtype": "fp32"},
        {"trainer.lora.rank": None},
    ],
)
def test_a_reference_that_the_run_loads_is_planned(layout, changes):
    settings = {**CLUSTER, **LORA, **changes}
    outcome = layout({k: v for k, v in settings.items() if v is not None})
    assert {r.name for r in outcome.roles} == {"policy", "critic", "reference"}
    assert not outcome.views


def test_adapters_beside_no_layer_are_refused(layout):
    targets = {**LORA, "trainer.lora.targets": '["qkv"]'}
    with pytest.raises(ConfigError, match=r"no linear layer is called qkv; allowed: down_proj, gate_proj"):
        layout(targets)
    with pytest.raises(ConfigError, match=r"trainer\.lora: GPT2LMHeadModel has no linear layer"):
        layout(LORA, model="gpt2")


def test_a_view_shares_devices_or_leaves_its_own_idle(layout):
    separate, shared = (
        layout(CLUSTER, LORA, {"placement.reference.share": "policy"} if share else {}) for share in (False, True)
    )
    assert (separate.devices, shared.devices) == (5, 4)
    for outcome in (separate, shared):
        [group] = make_plan(outcome).groups
        assert dict(group.group.holds) == {"policy": 1, "critic": 1, GENERATOR: 1}
    texts = [describe(outcome, "reference") for outcome in (separate, shared)]
    assert texts[0] == "policy's model without adapters; 1 device of its own idle: share those of policy"
    assert texts[1] == "policy's model without adapters"
    [line] = [p for p in as_json(make_plan(shared), None)["placement"] if p["name"] == "reference"]
    assert (line["model_of"], line["parameters"]) == ("policy", 0)


def test_a_reference_that_follows_the_policy_is_a_model(published, plugins):
    """TR-DPO overwrites it."""
    rows = {"algorithm.use": "dpo", "trainer.lora.rank": "8"}
    for change, views in (({}, ["reference"]), ({"algorithm.snapshot_every": "4"}, [])):
        plain = [(k, v) for k, v in flags(published, rows, change) if k != "reward"]
        assert list(resolve(load(None, plain), plugins, Machine("cpu", 64 * GIB)).views) == views


def test_ranks_of_a_cluster_divide_the_weights(layout):
    outcome = layout(CLUSTER, {"trainer.stage": "3"}, model="8B")
    assert outcome.machine.processes
    assert outcome.devices == 4
    policy = outcome.role("policy")
    assert policy.memory.phases["rest"].device["weights"] == policy.size.parameters, "4 bytes over 4 ranks"
    assert outcome.engines.devices == 2
    [group] = make_plan(outcome).groups
    assert dict(group.group.holds) == {"policy": 1, "critic": 1, GENERATOR: 1}


def test_ranks_of_a_cluster_can_divide_layers(layout):
    """Four ranks are two replicas: twice the micro-batch's share, a part of every layer, the optimizer over two."""
    changes = {**CLUSTER, "trainer.stage": "2", "policy.micro_tokens": "1000000"}
    plain = layout(changes, model="8B").role("policy")
    outcome = layout({**changes, "trainer.tensor_parallel": "2"}, model="8B")
    policy = outcome.role("policy")
    assert policy.memory.micro_tokens == 2 * plain.memory.micro_tokens
    resting, full = (role.memory.phases["rest"].device for role in (policy, plain))
    assert full["weights"] == 4 * plain.size.parameters
    assert resting["weights"] < 0.6 * full["weights"]
    assert "of layers in 2 parts x 8 bytes / 2 ranks" in policy.memory.arithmetic["optimizer"]
    with pytest.raises(CapabilityError, match="tensor_parallel = 3 does not divide the 4 ranks of role 'policy'"):
        layout({**changes, "trainer.tensor_parallel": "3"}, model="8B")


def test_ranks_of_a_cluster_can_divide_rows(layout):
    """Four ranks are two groups: twice the micro-batch's share, half of its tokens on each rank, the same weights."""
    changes = {**CLUSTER, "trainer.stage": "2", "policy.micro_tokens": "1000000"}
    plain = layout(changes, model="8B").role("policy").memory
    outcome = layout({**changes, "trainer.sequence_parallel": "2"}, model="8B").role("policy").memory
    assert outcome.micro_tokens == 2 * plain.micro_tokens
    assert outcome.phases["train"].device["activations"] == plain.phases["train"].device["activations"]
    assert outcome.phases["rest"].device["weights"] == plain.phases["rest"].device["weights"]
    full = layout({**changes, "policy.micro_tokens": "1"}, model="8B").role("policy").memory
    budget = {"policy.micro_tokens": "1", "trainer.sequence_parallel": "2"}
    half = layout({**changes, **budget}, model="8B").role("policy").memory
    assert half.phases["train"].device["activations"] == pytest.approx(full.phases["train"].device["activations"] / 2)


def test_a_reward_model_scores_while_samples_are_drawn_and_not_after(layout, published):
    outcome = layout(CLUSTER, {"reward": f"model:{published('0.6B')}"})
    assert not outcome.role("reward_model").annotates
    busy = {phase: moment.busy for g in make_plan(outcome).groups for phase, moment in g.moments.items()
            if "reward_model" in moment.busy}  # fmt: skip
    assert set(busy) == {"load", "generate"}


def test_a_precomputed_role_reads_several_batches_at_once(published, plugins):
    """Two pairs of 64 tokens a step, whose prompt of 32 is computed once; eight steps' pairs when they are read
    before."""
    rows = {"algorithm.use": "dpo", "data.batch_size": "2", "data.max_tokens": "64", "reference.dtype": "fp32"}
    plain = [(k, v) for k, v in flags(published, rows) if k != "reward"]
    sizes = [
        resolve(load(None, [*plain, ("reference.precompute", early)]), plugins, Machine("cpu", GIB)).role("reference")
        for early in ("false", "true")
    ]
    assert [role.memory.micro_tokens for role in sizes] == [2 * 96, 8 * 2 * 96]


def test_an_engine_and_its_devices_must_agree(layout):
    with pytest.raises(ConfigError, match=r"'vllm' divides an engine over .* = 4 x 1 = 4 workers.* has devices = 2\."):
        layout(CLUSTER, {"generator.tensor_parallel": "4"})
    with pytest.raises(ConfigError, match=r"devices = 2 GPUs but only 1 workers .*, so 1 GPUs would be idle"):
        layout(CLUSTER, {"generator.tensor_parallel": "1"})
    cores = {"generator.memory_share": "0.5", "generator.tensor_parallel": "1"}
    on_cpus = layout(CLUSTER, cores, machine=Machine("cpu", 64 * GIB))
    assert on_cpus.engines.place.workers == 1, "its second core is a thread"
    assert layout(CLUSTER).engines.place.workers == 2
    settings = {"generator.use": "vllm", "generator.tensor_parallel": "2"}
    assert layout(settings).engines.place.workers is None, "the devices that this process sees"


def test_a_cache_without_an_option_gets_what_is_free_beside_the_roles(layout):
    """vLLM would refuse to start where nine tenths of a device are not free."""
    shared = {key: value for key, value in CLUSTER.items() if key != "generator.memory_share"}
    separate = {key: value for key, value in shared.items() if key != "placement.generator.share"}
    outcome = layout(shared, model="8B")
    group = make_plan(outcome).groups[0]
    start = group.moments["start"]
    engine = start.rows[GENERATOR]["weights"] + start.rows[GENERATOR]["cache"]
    assert engine == pytest.approx(0.9 * (80 * GIB - (start.total - engine)), abs=2)
    assert start.total < 80 * GIB
    usage = layout(separate, model="8B").engines.memory.phases["generate"].device
    assert sum(usage.values()) == pytest.approx(0.9 * 80 * GIB, abs=2), "of a device of its own, its nine tenths"


def test_planning_starts_and_loads_nothing(published, tmp_path, forks):
    """The process of the forks has imported neither vLLM nor DeepSpeed, or the test fails."""
    code = (
        "import sys\nfrom rlhf_cli.main import main\n"
        f"code = main({['plan', *[w for k, v in flags(published, CLUSTER) for w in (f'--{k}', v)]]!r}"
        " + ['--device-memory', '80GiB', '--json'])\n"
        "assert code in (0, 1), code\n"
        "heavy = {'vllm', 'deepspeed'} & set(sys.modules)\nassert not heavy, heavy\n"
        "import torch\nassert not torch.cuda.is_initialized()\n"
        "assert 'ray' not in sys.modules or not sys.modules['ray'].is_initialized()\n"
    )
    code = code.replace("'--algorithm.use', 'ppo'", "'--algo', 'ppo'")
    program = tmp_path / "program.py"
    program.write_text(code)
    process = forks.start([str(program)], place=Place("python", str(tmp_path), {**os.environ}))
    assert process.wait() == 0, process.output


# ------------------------------------------------------------------------------- the nearest change


@pytest.fixture
def found(published, plugins):
    """found(machine, *options): the nearest change for a run that does not fit on the machine."""

    def make(machine, *changes, model="8B"):
        options = flags(published, *changes, model=model)
        plan = make_plan(resolve(load(None, options), plugins, machine))
        assert plan.fits is False
        return nearest(plan, plugins, lambda extra: load(None, options + list(extra.items())))

    return make


def test_smaller_micro_batches_are_tried_first(layout, found):
    """Those of both roles are reduced: they compute in turns in one process, and either may need more memory."""
    outcome = layout({"policy.dtype": "fp32"}, machine=Machine("cpu", 10**15))
    big, small = (
        make_plan(layout({"policy.dtype": "fp32", **settings}, machine=Machine("cpu", 10**15)))
        for settings in ({}, {"policy.micro_tokens": "1024", "critic.micro_tokens": "1024"})
    )
    assert outcome.role("policy").memory.micro_tokens == 2048
    between = (big.groups[0].peak.total + small.groups[0].peak.total) // 2
    change = found(Machine("cpu", between), {"policy.dtype": "fp32"}, model="0.6B")
    assert change.plan.fits
    assert dict(change.flags) == {"policy.micro_tokens": "1024", "critic.micro_tokens": "1024"}
    assert change.command == "--policy.micro_tokens 1024 --critic.micro_tokens 1024"


def test_zero_3_is_found_where_zero_2_does_not_fit(layout, found):
    change = found(Machine("cuda", 80 * GIB), CLUSTER)
    assert change.plan.fits
    assert change.flags["trainer.stage"] == "3"
    outcome = layout(CLUSTER, change.flags, model="8B")
    assert make_plan(outcome).fits, "the flags themselves make it fit"
    for key in change.flags:
        fewer = {k: v for k, v in change.flags.items() if k != key}
        try:
            assert not make_plan(layout(CLUSTER, fewer, model="8B")).fits, f"{key} is not needed"
        except ConfigError:
            continue


def test_more_ranks_are_the_last_resort(found):
    settings = {k: v for k, v in CLUSTER.items() if not k.startswith(("placement", "generator.tensor"))}
    settings |= {"placement.policy.ranks": "2", "placement.critic.ranks": "2", "trainer.stage": "3"}
    change = found(Machine("cuda", 24 * GIB), settings)
    assert change.plan.layout.devices > 5 or not change.plan.fits
    assert any(key.endswith(".ranks") or "offload" in key for key in change.flags)


# --------------------------------------------------------------------------------------- the target


def test_the_machine_is_given_by_flags_or_detected(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_cli.plan.command.gpu_memory", lambda: None)
    monkeypatch.setattr("rlhf_cli.plan.command.cpu_memory", lambda: 7 * GIB)
    assert (target().device, target().memory) == ("cpu", 7 * GIB)
    machine = target(memory="80GiB", host_memory="1TiB", devices_per_node=4)
    assert (machine.device, machine.memory, machine.host_memory, machine.devices_per_node) == (
        "cuda",
        80 * GIB,
        2**40,
        4,
    )
    assert target("cpu", "3GB").memory == 3 * 10**9
    assert target("cuda").memory is None
    monkeypatch.setattr("rlhf_cli.plan.command.gpu_memory", lambda: 40 * GIB)
    assert (target().device, target().memory) == ("cuda", 40 * GIB)
    for wrong in ("80 monkeys", "", "-1GiB", "0GiB", "GiB", "80"):
        with pytest.raises(ConfigError, match=r"--device-memory is .*give a number and a unit, e\.g\. 80GiB"):
            target(memory=wrong)
    with pytest.raises(ConfigError, match="--host-memory applies to nodes with GPUs"):
        target("cpu", host_memory="1TiB")
    with pytest.raises(ConfigError, match="--devices-per-node 0"):
        target(devices_per_node=0)


@pytest.mark.parametrize(("limit", "memory"), [(None, 8 * GIB), (3 * GIB, 3 * GIB)])
def test_a_control_group_limits_the_host_memory(monkeypatch, limit, memory):
    monkeypatch.setattr("rlhf_cli.plan.command.machine_memory", lambda: MachineMemory(8 * GIB, 6 * GIB, limit))
    assert target("cpu").memory == memory
