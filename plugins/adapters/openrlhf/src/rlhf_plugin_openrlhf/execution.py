"""Base classes that agent files inherit from, for machines without OpenRLHF. An executor of a file may call the
``execute()`` that it inherits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any

from rlhf_plugin_openrlhf.values import logs, scalar


class AgentInstanceBase(ABC):
    """One episode."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...


class AgentExecutorBase(ABC):
    """Makes a sample with an engine that takes and gives tokens."""

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]: ...


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One prompt, one answer, and no reward."""

    def __init__(self, remote_rm_url: Any = None) -> None:
        if remote_rm_url:
            raise ValueError("remote_rm_url: set [[reward]] in the run file instead")

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        tokens = _tokens(hf_tokenizer, prompt)
        output = (await llm_engine.generate(tokens, deepcopy(sampling_params))).outputs[0]
        whole = tokens + list(output.token_ids)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": whole,
            "action_ranges": [(len(tokens), len(whole))],
            "truncated": output.finish_reason == "length",
            "reward": None,
            "scores": None,
            "extra_logs": {},
        }


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Episodes of instances. A file that does not define ``execute`` becomes an environment instead."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        from rlhf_plugin_openrlhf.executors import built

        instance = await built(self.agent_instance_cls)
        text = (await instance.reset({"observation": prompt, "label": label}))["observation"]
        tokens, ranges, total, last, done = _tokens(hf_tokenizer, text), [], 0.0, {}, False
        while not done and len(tokens) < max_length:
            sampling_params.max_tokens = max_length - len(tokens)
            output = (await llm_engine.generate(list(tokens), deepcopy(sampling_params))).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            states = {"observation_text": text, "action_text": output.text, "label": label}
            last = await instance.step(states | {"sampling_params": sampling_params})
            total += scalar(last["rewards"], "rewards") or 0.0
            feedback, done = last.get("environment_feedback") or "", bool(last["done"])
            text += output.text + feedback
            tokens += [*output.token_ids, *_tokens(hf_tokenizer, feedback)]
            sampling_params = last.get("sampling_params") or sampling_params
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "truncated": not done,
            "reward": total,
            "scores": last.get("scores", total),
            "extra_logs": logs(last.get("extra_logs"), "extra_logs"),
        }


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text=text, add_special_tokens=False)["input_ids"])
