"""`rlhf doctor RUN`: causes of a gap between generator and trainer are planted in runs and recordings, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.ops.batch import Batch
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_modeling.packed_model import PackedModel
from rlhf_runtime.checkpoint.saved_groups import read_groups, write_groups
from rlhf_runtime.jobs.mismatch import _Samples
from rlhf_runtime.jobs.mismatch_causes import (
    ADAPTERS,
    ARITHMETIC,
    CAUSES,
    CUT,
    ENDS,
    ROUTING,
    STALE,
    TEMPERATURE,
    TEMPLATE,
)
from rlhf_runtime.output.folder_lock import FolderLock
from rlhf_testing.models import model_path
from rlhf_testing.tiny import CHAT_TEMPLATE, tiny_model
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.runs import Workshop, merged

STEPS = 3
LAST = f"rollouts/step-{STEPS:06d}.arrow"
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every": 1, "keep": STEPS},
    "trainer": {"lr": 0.02},
    "sampling": {"stop": list("abcdefghijklm"), "max_new_tokens": 8},
}
OF_RUNS: dict[str, dict[str, Any]] = {
    STALE: {"stream": {"staleness": 1}},
    ARITHMETIC: {"generator": {"dtype": "bf16"}},
    CUT: {"sampling": {"top_p": 0.7}, "algorithm": {"loss": {"correction": {"preset": "tis"}}}},
}
"""Causes that options of a run make."""
LORA: dict[str, Any] = {"trainer": {"lora": {"rank": 2}}}
REPLAY: dict[str, Any] = {"trainer": {"router_replay": True}}
IN_EVERY_RUN = {(STALE, ADAPTERS), (CUT, TEMPERATURE)}
"""Pairs in ``make test``: the adapters of older weights are merged in another way."""
PAIRS = [pytest.param(p, marks=() if p in IN_EVERY_RUN else pytest.mark.full) for p in combinations(CAUSES, 2)]
FROZEN: dict[str, Any] = {"trainer": {"lr": 0, "lora": None}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Workshop) -> Callable[..., Path]:
    """Makes runs with the causes that options make; each once."""
    shop = Workshop(tmp_path_factory.mktemp("runs"), tiny.model, tiny.data)

    @cache
    def make(*causes: str) -> Path:
        return shop.train("grpo", "-".join(["run", *causes]), **options(shop, causes)).path

    return make


def options(shop: Workshop, causes: tuple[str, ...]) -> dict[str, Any]:
    """Of a run whose trainer computes what it should."""
    changes = merged(SHORT, {"policy": {"model": str(base(shop, ROUTING in causes))}})
    for cause in causes:
        changes = merged(changes, OF_RUNS.get(cause, LORA if cause == ADAPTERS else {}))
    return changes


def base(shop: Workshop, mixture: bool) -> Path:
    """A model whose weights bf16 holds."""
    folder = shop.folder / f"base-{mixture}"
    if not folder.exists():
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        shutil.copytree(model_path("qwen3_moe", **sizes) if mixture else shop.model, folder)
        change_weights(folder, lambda name, tensor: tensor.bfloat16().float())
    return folder


def change_weights(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({n: change(n, t) for n, t in load_file(file).items()}, file, metadata={"format": "pt"})


def planted(trained: Callable[..., Path], shop: Workshop, *causes: str) -> Path:
    """A copy of a run, whose last step has the causes. Where the engine is to compute with other weights or experts
    than the trainer, its samples are those of a second run, which starts from these weights and does not learn."""
    of_run = tuple(cause for cause in causes if cause in (*OF_RUNS, ADAPTERS, ROUTING))
    run, folder = trained(*of_run), shop.folder / "run"
    shutil.copytree(run, folder)
    if ADAPTERS in causes or ROUTING in causes:
        changes = merged(options(shop, of_run), merged(FROZEN, REPLAY if ROUTING in causes else {}))
        changes["policy"] = {"model": str(engine_model(shop, run, causes))}
        with other_experts() if ROUTING in causes else nullcontext():
            shutil.copy(shop.train("grpo", "engine", **changes).path / LAST, folder / LAST)
    edit(folder / LAST, causes)
    return folder


def engine_model(shop: Workshop, run: Path, causes: tuple[str, ...]) -> Path:
    """The weights of the engine: with adapters merged in bf16, without adapters, or those that the run trained."""
    folder = shop.folder / "engine-model"
    if ADAPTERS in causes and STALE not in causes:
        return base(shop, ROUTING in causes)
    step = STEPS - 1 - (STALE in causes)
    assert shop.command("export", str(run), "--step", str(step), "--output", str(folder)).code == 0
    if ADAPTERS in causes:
        change_weights(folder, lambda name, tensor: tensor.bfloat16().float())
    return folder


@contextmanager
def other_experts() -> Iterator[None]:
    """Inside, routers prefer experts of larger numbers, and weigh them as before."""

    def forward(router: Qwen3MoeTopKRouter, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
        shares = logits.softmax(-1)
        chosen = (shares * torch.arange(1, 5)).topk(router.top_k).indices
        return logits, shares.gather(-1, chosen), chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3MoeTopKRouter, "forward", forward)
        yield


def edit(file: Path, causes: tuple[str, ...]) -> None:
    """Plant the causes that a recording alone can have: tokens, log-probs or a temperature that were not the
    generator's."""

    def edited(turn: Turn) -> Turn:
        if not turn.sampled:
            return replace(turn, ids=[*turn.ids[:1], *turn.ids]) if TEMPLATE in causes else turn
        logprobs = list(turn.logprobs or ())
        if ENDS in causes and turn.finish == "stop":
            logprobs[-1] = 0.0
        return replace(turn, logprobs=logprobs, temperature=0.5 if TEMPERATURE in causes else turn.temperature)

    edit_turns(file, edited)


def edit_turns(file: Path, edited: Callable[[Turn], Turn]) -> None:
    groups = read_groups(file, lambda source, index: Row({}, source, index))
    prompts = {t.index: t.prompt_text for group in groups for t in group.trajectories}
    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.turns = [edited(turn) for turn in trajectory.turns]
    write_groups(file, groups, lambda trajectory: prompts[trajectory.index])


def result(shop: Workshop, run: Path, *flags: str) -> dict[str, Any]:
    answer = shop.command("doctor", str(run), "--json", *flags)
    assert answer.code == 0, answer.said
    return json.loads(answer.out)


@pytest.mark.parametrize("causes", [*((cause,) for cause in CAUSES), *PAIRS], ids=" + ".join)
def test_planted_causes_are_named(shop: Workshop, trained: Callable[..., Path], causes: tuple[str, ...]) -> None:
    answer = result(shop, planted(trained, shop, *causes))
    assert set(answer["causes"]) == set(causes), answer
    assert all(cause in answer["verdict"] for cause in causes)
    assert ADAPTERS not in causes or answer["ways"][ADAPTERS] == ("merged in bf16" if STALE in causes else "absent")
    assert answer["left"] < answer["gap"] / 2 or causes == (ARITHMETIC,)
    assert answer["left"] <= 3 * answer["rounding"] if ARITHMETIC in causes else answer["left"] < 1e-5


@pytest.mark.parametrize(
    ("cause", "causes"), [pytest.param(STALE, (STALE,), marks=pytest.mark.full), (ADAPTERS, (STALE, ADAPTERS))]
)
def test_weights_that_are_older_than_recorded(
    shop: Workshop, trained: Callable[..., Path], cause: str, causes: tuple[str, ...]
) -> None:
    folder = shop.folder / "run"
    shutil.copytree(trained(*causes), folder)
    edit_turns(
        folder / LAST,
        lambda turn: replace(turn, versions=tuple((position, STEPS - 1) for position, _ in turn.versions)),
    )
    answer = result(shop, folder)
    assert (answer["causes"], answer["ways"]) == ([cause], {cause: "1 version older than recorded"})
    assert answer["left"] < 1e-5 < answer["gap"]
    assert "missed a sync" in answer["verdict"]


def test_records_of_other_experts_than_those_that_sampled(shop: Workshop) -> None:
    changes = merged(SHORT, {"policy": {"model": str(base(shop, True))}, **REPLAY})
    run = shop.train("grpo", "run", **changes).path
    assert result(shop, run)["causes"] == []
    edit_turns(
        run / LAST,
        lambda turn: replace(
            turn, experts=turn.experts and replace(turn.experts, choices=bytes(3 - c for c in turn.experts.choices))
        ),
    )
    answer = result(shop, run)
    assert answer["causes"] == [ROUTING]
    assert answer["left"] < 1e-5 < answer["gap"]


def test_a_trainer_that_computes_packed_sequences_otherwise(
    shop: Workshop, trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's own probe of packing would find this when the model is loaded; here it is behind the probe."""
    run, hidden_states = trained(), PackedModel.hidden_states

    def wrong(model: PackedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_MH, place_N = hidden_states(model, batch)
        return hidden_MH * (1.0 if batch.sequences == 1 else 0.5), place_N

    monkeypatch.setattr(PackedModel, "hidden_states", wrong)
    answer = result(shop, run)
    assert (answer["causes"], answer["ways"]) == ([ARITHMETIC], {ARITHMETIC: "batch composition"})
    assert answer["left"] < 1e-5 < answer["gap"]
    assert "packed sequences" in answer["verdict"]


@pytest.mark.cluster  # the generator vllm
@pytest.mark.full
def test_runs_that_sampled_with_vllm_in_bf16_and_fp8(shop: Workshop) -> None:
    pytest.importorskip("vllm")
    model = tiny_model(shop.folder / "wide", hidden=64, heads=2, kv_heads=1)
    changes = {"policy": {"model": str(model)}, "trainer": {"lora": {"rank": 2}}}
    generator = {"use": "vllm", "kv_cache_gib": 0.0625, "max_sequences": 16, "dtype": "bf16"}
    run = shop.train("grpo", "run", **merged(SHORT, {**changes, "generator": generator})).path
    answer = result(shop, run)
    assert answer["causes"] == [ARITHMETIC], answer
    assert 1e-5 < answer["gap"] <= 3 * answer["rounding"]
    coarse = {**generator, "quantization": "fp8_per_channel"}
    changes |= {"generator": coarse, "algorithm": {"loss": {"correction": {"preset": "tis"}}}}
    answer = result(shop, shop.train("grpo", "coarse", **merged(SHORT, changes)).path)
    assert answer["causes"] == [], answer
    assert answer["gap"] > 3 * answer["rounding"]
    assert "generator.quantization = 'fp8_per_channel' makes the engine compute less precisely" in answer["verdict"]


def test_a_run_without_a_gap(shop: Workshop, trained: Callable[..., Path]) -> None:
    run = trained()
    answer = result(shop, run)
    assert (answer["step"], answer["causes"], answer["dtype"]) == (STEPS, [], "fp32")
    assert answer["gap"] < 1e-5
    assert "agree" in answer["verdict"]
    first = result(shop, run, "--step", "1", "--samples", "2")
    assert (first["step"], first["samples"], first["causes"]) == (1, 2, [])
    text = shop.command("doctor", str(run))
    assert text.code == 0
    assert all(words in text.out for words in ("0 to 15", "gap left", "agree"))


def test_the_files_of_a_killed_doctor_are_deleted(shop: Workshop, trained: Callable[..., Path]) -> None:
    run = shop.folder / "run"
    shutil.copytree(trained(ADAPTERS), run)
    for name in ("killed", "alive"):
        (run / f".doctor-{name}" / "1").mkdir(parents=True)
        lock = FolderLock(run / f".doctor-{name}")
        if name == "killed":
            lock.release()
    result(shop, run)
    assert [folder.name for folder in run.glob(".doctor-*")] == [".doctor-alive"]
    assert (run / ".doctor-alive" / "1").is_dir()
    lock.release()


def test_adapters_a_chat_template_and_log_probs_that_the_run_recorded(shop: Workshop) -> None:
    model = tiny_model(shop.folder / "chat", hidden=16, heads=2, kv_heads=1, chat_template="default")
    changes = {"policy": {"model": str(model)}, "algorithm": {"epochs": 2}}
    changes["trainer"] = {"lora": {"rank": 2}, "lr": 0.02}
    run = shop.train("grpo", "run", **merged(SHORT, changes)).path
    answer = result(shop, run)
    assert answer["gap"] < 1e-5
    assert answer["reproduced"] < 1e-5
    other = shop.file("other.jinja", CHAT_TEMPLATE.replace("<eos>", "<eos>\n"))
    answer = result(shop, run, "--data.chat_template", str(other))
    notes = {experiment["cause"]: experiment for experiment in answer["experiments"]}
    assert "12 of 12 prompts differ" in notes[TEMPLATE]["note"]
    assert notes[TEMPLATE]["gap"] > answer["gap"]
    assert answer["causes"] == []


def test_old_weights_that_are_not_kept_are_not_examined(shop: Workshop) -> None:
    """The checkpoints of steps 4 and 5 are kept; the samples of step 5 are of version 2."""
    changes = {"stream": {"staleness": 2}, "run": {"steps": 5}, "checkpoint": {"keep": 2}}
    run = shop.train("grpo", "run", **merged(SHORT, changes)).path
    answer = result(shop, run)
    stale = next(e for e in answer["experiments"] if e["cause"] == STALE)
    assert (stale["gap"], answer["causes"]) == (None, [])
    assert "not kept" in stale["note"]
    assert "stale" not in answer["verdict"]
    assert "--checkpoint.keep" in answer["verdict"]
    early = shop.command("doctor", str(run), "--step", "3")
    assert early.code == 2
    assert all(words in early.said for words in ("not kept", "--step 1, 5", "--checkpoint.every 1"))


def test_a_sampled_turn_without_tokens_needs_no_version(tmp_path: Path) -> None:
    turns = [Turn([5], False), Turn([6], True, [-1.0], ((0, 3),), "stop"), Turn([8], False), Turn([], True, [])]
    row = Row({}, "unit", 0)
    write_groups(tmp_path / "step.arrow", [Group(row, 0, [Trajectory(row, turns, (0, 0))])])
    samples = _Samples.read(tmp_path / "step.arrow", max_samples=1)
    assert (samples.version_A.tolist(), samples.end_A.tolist()) == ([3], [True])


def test_what_cannot_be_examined_is_refused(shop: Workshop, trained: Callable[..., Path]) -> None:
    def refused(*words: object, code: int = 2) -> str:
        answer = shop.command("doctor", *map(str, words))
        assert answer.code == code, answer.said
        return answer.said

    (shop.folder / "empty").mkdir()
    assert "holds no run" in refused(shop.folder / "empty")
    offline = shop.train("sft", "offline", run={"steps": 1}).path
    assert "samples nothing" in refused(offline)
    run = planted(trained, shop)
    assert "--step 7" in refused(run, "--step", 7)
    assert "--samples 0" in refused(run, "--samples", 0)
    assert "--start" in refused(run, "--start")
    assert "folder of a run" in refused("--step", 1)
    edit_turns(run / LAST, lambda turn: replace(turn, logprobs=None))
    assert "log-probs of the generator" in refused(run)
    (run / LAST).write_bytes((run / LAST).read_bytes()[:200])
    assert LAST in refused(run, code=1)
    (run / "config.toml").unlink()
    assert "config.toml" in refused(run)
