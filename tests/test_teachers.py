"""Whole runs with a teacher's credit: a server, a teacher for each data source, the policy with a column of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rlhf.errors import ConfigError
from rlhf.interfaces import RewardContext
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_plugin_http import TeacherReward
from rlhf_runtime.data.tokenizer import load_tokenizer, tokens_of
from rlhf_testing.tiny import tiny_model, tiny_tokenizer

from tests.runs import PROMPTS, Finished, Workshop, merged
from tests.support.teacher_server import TeacherServer, model_score

DISTILLATION = {"algorithm": {"teacher": {"coef": 1.0, "task": False}}, "reward": None}
CONTEXT = [{**row, "privileged_context": f"It is {row['answer']}."} for row in PROMPTS]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=5, std=0.1, tied=False)


def alone(teacher: Path, **changes: Any) -> dict[str, Any]:
    """A run whose only credit is from a role."""
    return merged({**DISTILLATION, "roles": {"teacher": {"model": str(teacher), "dtype": "fp32"}}}, changes)


def served(server: TeacherServer, **changes: Any) -> dict[str, Any]:
    """A run whose only credit is from a server."""
    return merged({**DISTILLATION, "reward": [{"use": "teacher", "urls": [server.url]}]}, changes)


def refused(run: Finished, *words: str) -> None:
    assert run.code != 0
    for word in words:
        assert word in run.said
    assert not (run.path / "metrics.jsonl").exists()


def assert_near(a: Finished, b: Finished, *names: str) -> None:
    for line, expected in zip(a.lines(), b.lines(), strict=True):
        assert {name: line[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-4)


def test_a_server_teaches_as_a_role_does(shop: Workshop, teacher: Path) -> None:
    """Held-out rows are not scored, so `rlhf eval` needs no server."""
    held_out = {"data": {"eval": [{"path": str(shop.data), "name": "held_out"}]}, "eval": {"metric": "length"}}
    role = shop.train("reinforce_pp", "role", **alone(teacher, **held_out))
    with TeacherServer.of_model(teacher) as server:
        run = shop.train("reinforce_pp", "run", **served(server, **held_out))
        prompts = sum(len(question["prompt"]) for question in server.asked if isinstance(question["prompt"], list))
    assert prompts == 1 + 3 * 4 * 3  # the probe, and the samples of three steps
    assert_near(run, role, "teacher/kl", "policy/loss", "policy/grad_norm")
    assert all(line["teacher/left_out"] == 0 for line in run.lines())
    assert len(next(run.samples())["rewards"]["teacher"]["steps"]) > 0
    done = shop.command("eval", str(run.path / "config.toml"))
    assert (done.code, "length" in done.out) == (0, True), done.said


def test_a_server_teaches_beside_a_reward_without_being_part_of_it(shop: Workshop, teacher: Path) -> None:
    rewards = shop.config("grpo", "x")["reward"]
    by_role = alone(teacher, algorithm={"teacher": {"coef": 0.5, "task": True}})
    by_role["reward"] = rewards
    role = shop.train("grpo", "role", **by_role)
    with TeacherServer.of_model(teacher) as server:
        by_server = served(server, algorithm={"teacher": {"coef": 0.5, "task": True}})
        by_server["reward"] = [*rewards, *by_server["reward"]]
        run = shop.train("grpo", "run", **by_server)
    assert_near(run, role, "teacher/kl", "reward/mean", "policy/loss", "policy/grad_norm")
    rows = shop.data
    scores = shop.command(
        "score", str(run.path / "config.toml"), "--data", str(rows), "-o", str(shop.folder / "scored")
    )
    assert scores.code == 0, scores.said
    words = ("score", "--reward", "teacher", "--reward.teacher.urls", '["http://127.0.0.1:9/v1"]', "--data", str(rows))
    none = shop.command(*words, "--model", str(shop.model), "-o", str(shop.folder / "none"))
    assert (none.code, "a teacher gives no reward" in none.said) == (2, True), none.said


def test_samples_that_a_server_does_not_score_have_failed(shop: Workshop, teacher: Path) -> None:
    with TeacherServer.of_model(teacher) as server:
        answers = iter(range(100))

        def cut_one(choices: list[dict[str, Any]]) -> None:
            if next(answers) == 2:
                choices[0]["prompt_logprobs"].pop()

        server.change = cut_one
        run = shop.train("reinforce_pp", "run", **served(server), stream={"on_failed_sample": "drop_sample"})
    assert sum(line["stream/failed_samples"] for line in run.lines()) == 3
    assert "log-probs for" in run.said


def test_a_served_teacher_that_does_not_fit_is_refused(shop: Workshop, teacher: Path, tmp_path: Path) -> None:
    with TeacherServer.of_model(teacher) as server:

        def run(algo: str, **changes: Any) -> Finished:
            return shop.run(algo, "run", **served(server, **changes))

        refused(run("reinforce_pp", sampling={"temperature": 0.5}), "sampling.temperature = 0.5", "temperature 1")
        refused(run("reinforce_pp", algorithm={"teacher": {"task": True}}), "needs a reward")
        refused(run("reinforce_pp", algorithm={"teacher": None}), "reward 'teacher'", "does not read")
        refused(run("distill_on_policy", algorithm={"teacher": None}), "reward 'teacher'", "does not read")
        weights = {"teacher": {"weights": "base"}}
        refused(run("reinforce_pp", algorithm=weights), "algorithm.teacher.weights", "gives the log-probs of a teacher")
        duplicates = [{"use": "teacher", "urls": [server.url], "name": name} for name in ("one", "two")]
        refused(run("reinforce_pp", reward=duplicates), "have several teachers: one, two")
        weighted = [{"use": "teacher", "urls": [server.url], "weight": 0.5}]
        refused(run("reinforce_pp", reward=weighted), "weight = 0.5", "would have no effect")
        other_source = [{"use": "teacher", "urls": [server.url], "sources": ["other"]}]
        refused(run("reinforce_pp", reward=other_source), "the rows of 'data' have no teacher")
        assert not server.asked
    other = tiny_model(tiny_tokenizer(tmp_path / "other", chars="0123456789+= abc"), seed=5)
    with TeacherServer.of_model(other) as server:
        refused(shop.run("reinforce_pp", "run", **served(server)), "a different vocabulary from the policy's")


def two_sources(shop: Workshop) -> dict[str, Any]:
    paths = [shop.rows(f"{name}.jsonl", rows) for name, rows in (("easy", PROMPTS[:6]), ("hard", PROMPTS[6:]))]
    return {"train": [{"path": str(path), "name": path.stem} for path in paths]}


def test_each_data_source_has_its_teacher(shop: Workshop, teacher: Path) -> None:
    """Roles and servers agree, and where all of them are one model they are the one teacher of all sources."""
    data = two_sources(shop)
    other = tiny_model(shop.folder / "other", seed=9, std=0.1)
    roles = {"easy": "teacher", "hard": "hard_teacher"}
    single = shop.train("reinforce_pp", "one", **alone(teacher, data=data))
    names = ("teacher/kl", "policy/loss", "policy/grad_norm")
    for second in (teacher, other):
        changes = alone(
            teacher,
            data=data,
            algorithm={"teacher": {"roles": roles}},
            roles={"hard_teacher": {"model": str(second), "dtype": "fp32"}},
        )
        run = shop.train("reinforce_pp", f"run-{second.name}", **changes)
        if second == teacher:
            assert_near(run, single, *names)
    with TeacherServer.of_model(teacher) as easy, TeacherServer.of_model(other) as hard:
        rewards = [
            {"use": "teacher", "name": name, "urls": [server.url], "sources": [name]}
            for name, server in (("easy", easy), ("hard", hard))
        ]
        by_servers = shop.train("reinforce_pp", "servers", **served(easy, data=data, reward=rewards))
    assert_near(by_servers, run, *names)
    assert run.lines()[0]["teacher/kl"] != pytest.approx(single.lines()[0]["teacher/kl"], rel=1e-3)


def test_teachers_of_sources_that_do_not_fit_are_refused(shop: Workshop, teacher: Path) -> None:
    def run(**roles: str) -> Finished:
        changes = alone(teacher, data=two_sources(shop), algorithm={"teacher": {"roles": roles}})
        return shop.run("reinforce_pp", "run", **changes)

    refused(run(esy="teacher"), "'esy' is not a source of data.train", "'easy', 'hard'")
    refused(run(easy="teacher"), "the rows of 'hard' have no teacher")
    refused(run(easy="teacher", hard="reference"), "reference already has a task")
    refused(run(easy="teacher", hard="second"), "no model is named for the role 'second'")


def with_context(shop: Workshop, rows: list[dict[str, Any]] = CONTEXT, **teacher: Any) -> dict[str, Any]:
    path = shop.rows("context.jsonl", rows)
    options = {"weights": "live", "context": "privileged_context", **teacher}
    return merged(DISTILLATION, {"data": {"train": str(path)}, "algorithm": {"teacher": options}})


@pytest.mark.parametrize(("weights", "chat"), [("live", False), ("role", True)])
def test_the_policy_that_reads_the_context_is_the_teacher(shop: Workshop, weights: str, chat: bool) -> None:
    """A plain statement of the first step, in fp64, from the samples that it recorded."""
    policy = tiny_model(shop.folder / "policy", seed=2, std=0.2, chat_template="default" if chat else None)
    template = "Hint: {context}"
    changes = with_context(shop, weights=weights, template=template)
    changes["policy"] = {"model": str(policy)}
    if weights == "role":
        changes["roles"] = {"teacher": {"model": str(policy), "dtype": "fp32"}}
    run = shop.train("reinforce_pp", "run", **changes)
    from transformers import AutoTokenizer

    tokenizer, score = AutoTokenizer.from_pretrained(str(policy)), model_score(policy)
    gaps: list[float] = []
    for sample in run.samples_of(min(run.rollouts())):
        row = CONTEXT[sample["row"]["index"]]
        prompt, answer = (turn["ids"] for turn in sample["turns"])
        text = f"{row['prompt']}\n\nHint: {row['privileged_context']}"
        if chat:
            text = f"<|user|>{text}<eos><|assistant|>"
        taught = tokenizer(text, add_special_tokens=False)["input_ids"]
        student_scores, teacher_scores = (
            score([*prompt, *answer])[-len(answer) :],
            score([*taught, *answer])[-len(answer) :],
        )
        gaps += [a - b for a, b in zip(student_scores, teacher_scores, strict=True)]
    first, *later_lines = run.lines()
    assert first["teacher/kl"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert first["teacher/left_out"] == 0
    assert all(line["policy/grad_norm"] > 0 for line in [first, *later_lines])


def test_base_live_and_averaged_weights_differ_after_the_first_step(shop: Workshop) -> None:
    lines = {}
    for weights, share in (("base", None), ("live", None), ("averaged", 0.05), ("averaged", 1.0)):
        options = {"weights": weights} | ({} if share is None else {"share": share})
        run = shop.train("reinforce_pp", f"{weights}-{share}", **with_context(shop, **options), trainer={"lr": 1e-2})
        lines[weights, share] = [line["teacher/kl"] for line in run.lines()]
    live = lines["live", None]
    assert lines["averaged", 1.0] == pytest.approx(live, rel=1e-5)  # a copy of the policy after each step
    assert lines["base", None][0] == pytest.approx(live[0], rel=1e-5)
    assert lines["averaged", 0.05][0] == pytest.approx(live[0], rel=1e-5)
    assert len({round(values[-1], 6) for values in lines.values()}) == 3


def test_rows_without_a_context_and_long_ones_get_no_credit(shop: Workshop) -> None:
    """With the task's reward they are trained on as without a teacher."""
    rows = [{**row, "privileged_context": "" if n % 2 else "It is so."} for n, row in enumerate(CONTEXT)]
    run = shop.train("reinforce_pp", "some", **with_context(shop, rows))
    assert sum(line["teacher/left_out"] for line in run.lines()) == pytest.approx(1.5)  # 12 rows in three steps
    long = [{**row, "privileged_context": "so " * 40} for row in CONTEXT]
    changes = with_context(shop, long, task=True)
    changes["reward"] = rewards = shop.config("grpo", "x")["reward"]
    none = shop.train("reinforce_pp", "none", **changes)
    plain = shop.train("reinforce_pp", "plain", data=changes["data"], reward=rewards)
    assert [line["teacher/left_out"] for line in none.lines()] == [1.0] * 3
    assert_near(none, plain, "policy/loss", "reward/mean")


def test_contexts_that_do_not_fit_are_refused(shop: Workshop) -> None:
    def run(rows: list[dict[str, Any]] = CONTEXT, **teacher: Any) -> Finished:
        return shop.run("reinforce_pp", "run", **with_context(shop, rows, **teacher))

    refused(run(PROMPTS), "no column 'privileged_context'")
    refused(run(context=None), "the teacher would be the policy itself")


def test_members_read_a_server_and_no_context(shop: Workshop, teacher: Path) -> None:
    data, rewards = two_sources(shop), shop.config("grpo", "x")["reward"]
    members = {name: {"use": "reinforce_pp", "sources": [name], "teacher": {"coef": 1.0}} for name in ("easy", "hard")}
    with TeacherServer.of_model(teacher) as server:
        rewards = [*rewards, {"use": "teacher", "urls": [server.url]}]
        run = shop.train("per_source", "run", data=data, reward=rewards, algorithm={"members": members})
    assert {"easy/teacher/kl", "hard/teacher/kl"} <= {name for line in run.lines() for name in line}
    members["easy"]["teacher"] |= {"weights": "live", "context": "answer"}
    refused(shop.run("per_source", "other", data=data, algorithm={"members": members}), "per_source cannot join it")


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """vLLM's own server on this machine; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"model": model, "dtype": "float32", "host": "127.0.0.1", "port": port, "max-model-len": 256}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager"]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as file, subprocess.Popen(program, stdout=file, stderr=file, env=variables) as process:
        try:
            deadline = time.monotonic() + 280
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            else:
                raise AssertionError(log.read_text()[-3000:])
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


@pytest.mark.full
@pytest.mark.cluster
def test_vllm_teaches(tmp_path: Path) -> None:
    """Its log-probs are those of the model in fp64, and a policy with another tokenizer is refused."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    model = tiny_model(tmp_path / "model", seed=3, hidden=64, heads=2)
    prompt, answers = [5, 6, 7], ([8, 9, 10, 11], [12])
    row = Row({}, "unit", 0)
    samples = [Trajectory(row, [Turn(prompt, False), Turn(a, True)], (0, n)) for n, a in enumerate(answers)]
    other = tiny_tokenizer(tmp_path / "other", chars="0123456789+= abc")
    with vllm_server(model, tmp_path / "log") as url:

        async def score(tokenizer: Path) -> list[Any]:
            reward = TeacherReward(TeacherReward.Config(urls=(url,)))
            await reward.setup(RewardContext(tokens=tokens_of(load_tokenizer(str(tokenizer)))))
            return await reward.score(Group(row, 0, samples))

        results = asyncio.run(score(model))
        with pytest.raises(ConfigError, match="a different vocabulary from the policy's"):
            asyncio.run(score(other))
    plain = model_score(model)
    for result, answer in zip(results, answers, strict=True):
        expected = plain([*prompt, *answer])[-len(answer) :]
        assert [step[:2] for step in result.steps] == [(1, n) for n in range(len(answer))]
        assert [step[2] for step in result.steps] == pytest.approx(expected, abs=1e-4)
