"""One phase of one role, done in this process: its peak above the process after import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from planned.cases import CACHE_GIB, MODELS
from planned.process import forget_peak, resident, weigh

Case = dict[str, Any]
Work = tuple[int, Callable[[], Any], int]
"""(bytes of the process before, what to do, how often)."""


def measure(case: Case, path: Path, rank: int = 0, port: int = 0) -> int:
    """Bytes: of the last time, or, where sampling follows training (``after``), the most of all times, as it finds
    more or less of the heap again. ``port``: where several ranks meet."""
    import torch

    torch.set_num_threads(1)
    kind = "ranks" if "ranks" in case and case["what"] != "load" else case["what"]
    work = {"engine": engine, "generate": generator, "load": maker}.get(kind, trainer)
    before, act, times = work(case, path, rank, port)
    peaks = []
    for _ in range(times):
        forget_peak()
        act()
        peaks.append(resident("VmHWM") - before)
    return max(peaks) if "after" in case else peaks[-1]


def spec_of(case: Case, path: Path, rank: int, port: int) -> Any:
    from rlhf.interfaces import ModelSpec
    from rlhf.types import RoleSpec

    name = case.get("role", "policy")
    scalar = name in ("critic", "reward_model") or case.get("loss") == "pairwise"
    trained = case["what"] in ("train", "load") or "after" in case
    ranks = case.get("ranks", 1)
    where = {"rank": rank, "world_size": ranks, "rendezvous": f"tcp://127.0.0.1:{port}"} if ranks > 1 else {}
    return ModelSpec(
        RoleSpec(name, "scalar" if scalar else "lm", trained),
        str(path),
        case["dtype"],
        gradient_checkpointing=case.get("checkpointing", False),
        total_updates=9,
        **where,
    )


def trainer(case: Case, path: Path, rank: int, port: int) -> Work:
    """A step of two micro-batches, or their annotation."""
    before, made = make_trainer(case, path, rank, port)
    from planned.batches import batch, loss_of

    micros = [batch(case, made.loaded.vocabulary, 2 * rank + seed) for seed in range(2)]
    if case["what"] == "train":
        return before, lambda: made.update(micros, loss_of(case), {}, {}), case["steps"]
    outputs = {"reward_model": "scores", "teacher": "hidden"}.get(case.get("role", ""), "logprobs")
    return before, lambda: made.forward(micros, [outputs]), 1


def make_trainer(case: Case, path: Path, rank: int, port: int) -> tuple[int, Any]:
    """(bytes of the process before, the trainer)."""
    before, make, _ = maker(case, path, rank, port)
    return before, make()


def maker(case: Case, path: Path, rank: int, port: int) -> Work:
    """A trainer is made."""
    options: dict[str, Any] = {"lr": 1e-6, "ema_decay": case.get("ema"), "kernels": case.get("kernels", "auto")}
    if "lora" in case:
        import peft  # noqa: F401
        from rlhf_modeling.adapters import LoraOptions

        options["lora"] = LoraOptions(**case["lora"])
    if "ranks" in case:
        import deepspeed  # noqa: F401
        from rlhf_plugin_deepspeed.trainer import DeepSpeedTrainer as Cls

        options |= {"stage": case["stage"], "device": "cpu", "offload_optimizer": case.get("offload", "none")}
        options["optimizer"] = case.get("optimizer", "adamw")
    else:
        from rlhf_plugin_local.trainer import TorchTrainer as Cls  # type: ignore[assignment]
    from planned import batches  # noqa: F401

    before = weigh()
    return before, lambda: Cls(Cls.Config(**options), spec_of(case, path, rank, port)), 1


def generator(case: Case, path: Path, rank: int, port: int) -> Work:
    from rlhf.interfaces import GeneratorSpec
    from rlhf_plugin_local.generator import TransformersGenerator

    before, made = make_trainer(case, path, rank, port)
    from planned.batches import batch, loss_of, requests

    sampler = TransformersGenerator(None, GeneratorSpec(eos_token_ids=(1,), decode=lambda ids: ""))
    sampler.load(made, 0)
    vocabulary = made.loaded.vocabulary

    def act() -> None:
        if "after" in case:
            made.update([batch(case, vocabulary, seed) for seed in range(2)], loss_of(case), {}, {})
            forget_peak()
        list(sampler.generate(requests(case, vocabulary)))

    return before, act, case.get("after", 1)


def engine(case: Case, path: Path, rank: int, port: int) -> Work:
    import vllm
    from planned.batches import requests
    from rlhf.interfaces import GeneratorSpec
    from rlhf_plugin_vllm.generator import VllmGenerator
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

    assert vllm.LLM is not None
    before = weigh()
    spec = GeneratorSpec((1,), lambda ids: "", str(path), case["dtype"], max_tokens=case["length"])
    made = VllmGenerator(VllmGenerator.Config(kv_cache_gib=CACHE_GIB), spec)
    _sync(made, path)
    return before, lambda: list(made.generate(requests(case, MODELS[case["model"]]["vocab_size"]))), 1


def _sync(made: Any, path: Path) -> None:
    """The model's own weights, so that the engine may sample."""
    from rlhf.weights.bucket import buckets
    from safetensors.torch import load_file

    made.begin_load(0)
    for bucket in buckets(iter(load_file(path / "model.safetensors").items()), 2**28, {}):
        made.take(bucket)
    made.end_load()
