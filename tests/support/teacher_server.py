"""A server on this machine that scores tokens as vLLM does: ``prompt_logprobs`` of ``/v1/completions``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.loopback_server import Answer, LoopbackServer

Score = Callable[[Sequence[int]], list[float]]
"""The log-prob of every token after the first."""


def model_score(path: Path) -> Score:
    """In fp64, from the logits of the whole sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    model, lock = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float64).eval(), threading.Lock()

    @torch.no_grad()
    def score(ids: Sequence[int]) -> list[float]:
        ids_T = torch.tensor(list(ids))
        with lock:
            logprobs_TV = model(ids_T[None]).logits[0].log_softmax(-1)
        return logprobs_TV[:-1].gather(1, ids_T[1:, None])[:, 0].tolist()

    return score


class TeacherServer(LoopbackServer):
    """``asked`` has the questions so far; ``change`` may change the choices of an answer, and ``status`` its status."""

    def __init__(self, encode: Callable[[str], list[int]], score: Score) -> None:
        super().__init__()
        self.encode, self.score, self.url = encode, score, f"{self.address}/v1"
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.change: Callable[[list[dict[str, Any]]], Any] = lambda choices: None
        self.status = 200

    @classmethod
    def of_model(cls, path: Path) -> TeacherServer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(path))
        return cls(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], model_score(path))

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        assert path == "/v1/completions"
        assert (body["prompt_logprobs"], body["max_tokens"]) == (0, 1)
        self.asked.append(body)
        self.headers.append(dict(headers))
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [self.encode(body["prompt"])]
        choices: list[dict[str, Any]] = []
        for n, ids in enumerate(prompts):
            values = zip(ids[1:], self.score(ids), strict=True)
            places = [{str(i): {"logprob": value, "rank": 1, "decoded_token": "?"}} for i, value in values]
            choices.append({"index": n, "text": "x", "prompt_logprobs": [None, *places]})
        if isinstance(body["prompt"], list):
            self.change(choices)
        return self.status, json.dumps({"object": "text_completion", "choices": choices[::-1]}).encode(), {}
