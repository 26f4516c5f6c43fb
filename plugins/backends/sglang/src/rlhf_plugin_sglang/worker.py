"""The part of this plugin in SGLang's servers: workers that receive weights, and prove that they arrived.

SGLang loads :func:`register` through its entry points ``sglang.srt.plugins``, in each of its processes. Calls come as
actions of ``POST /weights_checker``, which SGLang passes to every worker between two batches. Buckets are files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.errors import RlhfError, SyncError
from rlhf.process_memory import peak_memory
from rlhf_engines.weight_files import PROTOCOL, digest, read_bucket
from torch import Tensor, distributed

from rlhf_plugin_sglang.loading import ModelLoad, differing

PREFIX = "rlhf_"
"""Prefix of the actions that are calls to this plugin."""
VERSIONS = ("0.5.23",)
"""Versions of SGLang with which the tests were run. The functions that are called here are not public."""
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class ServedModel:
    """The model of one worker.

    Args:
        manager: SGLang's ``SchedulerWeightUpdaterManager``.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._load: ModelLoad | None = None
        self._name = ""
        """Name of the load whose weights the worker has; empty if it has its initial weights."""
        self._last_tensors: dict[str, Tensor] | None = None
        """The tensors of the last load, in host memory, if differences from them may follow."""

    @property
    def runner(self) -> Any:
        return self.manager.tp_worker.model_runner

    def facts(self, path: str) -> dict[str, Any]:
        """Facts of the server that a generator needs, and the digest of the file at ``path``. Raises SyncError for
        another version of SGLang."""
        import sglang

        if sglang.__version__ not in VERSIONS:
            raise SyncError(
                f"it runs SGLang {sglang.__version__}; allowed: {' or '.join(VERSIONS)}. Install one of these there"
            )
        model, arguments = self.runner.model_config, self.runner.server_args
        return {
            "protocol": PROTOCOL,
            "digest": digest(Path(path)),
            "dtype": str(self.runner.dtype).removeprefix("torch."),
            "formats": sorted({str(p.dtype).removeprefix("torch.") for p in self.runner.model.parameters()}),
            "length": self.manager.scheduler.max_req_len - 1,  # the limit at which it cuts max_new_tokens
            "vocabulary": model.vocab_size,
            "eos_token_ids": sorted(self._eos_token_ids()),
            "quantization": model.quantization,
            "speculative": arguments.speculative_algorithm is not None,
            "deterministic": arguments.enable_deterministic_inference,
            "incremental": arguments.incremental_streaming_output,
            "mask": arguments.sampling_mask_max_tokens,
            "shared": arguments.weight_cache_mode != "off",
            "data_parallel": arguments.dp_size,
            "pipeline_parallel": arguments.pp_size,
        }

    def _eos_token_ids(self) -> set[int]:
        """Tokens at which SGLang ends a sample, unless they are ignored."""
        tokenizer = self.manager.scheduler.tokenizer
        ids = {*(self.runner.model_config.hf_eos_token_id or ())}
        if tokenizer is not None:
            ids |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())} - {None}
        return ids

    def start(self, base: str | None) -> bool:
        """Start a load. Returns whether the worker holds the tensors of the load ``base``; None: it need not hold
        any."""
        if not self.manager.flush_cache(empty_cache=False):
            raise SyncError("SGLang keeps keys and values of the old weights: there are unfinished requests")
        holds = bool(base) and base == self._name
        if not holds:
            self._last_tensors = None if base is None else {}
        self._name = ""
        self.runner.weight_updater.begin_weight_update()
        self._load = ModelLoad(self.runner.model)
        return holds

    def take_file(self, path: str) -> None:
        if self._load is None:
            raise SyncError("weights arrived before begin_load()")
        self._load.take(read_bucket(Path(path), self._last_tensors))

    def finish(self, name: str) -> dict[str, Any]:
        """End a load; ``name`` is its name from now on."""
        load, self._load = self._load, None
        if load is None:
            raise SyncError("end_load() without begin_load()")
        missing = load.end()
        self.runner.weight_updater.end_weight_update(run_post_load=False)
        if not missing:
            self._name = name
        return {"received": load.received, "nbytes": load.nbytes, "missing": missing, "peak_memory": peak_memory()}

    def differing_file(self, path: str) -> list[str]:
        return differing(self.runner.model, read_bucket(Path(path)))

    def load_name(self) -> str:
        return self._name

    def answer(self, action: str, arguments: list[Any]) -> list[dict[str, Any]]:
        """The result of the call on each worker, or its error."""
        methods = {
            method.__name__: method
            for method in (self.facts, self.start, self.take_file, self.finish, self.differing_file, self.load_name)
        }
        answer: dict[str, Any] = {"value": None, "error": ""}
        try:
            answer["value"] = methods[action.removeprefix(PREFIX)](*arguments)
        except RlhfError as error:
            answer["error"] = str(error)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        group = self.manager.tp_cpu_group
        answers = [answer] * distributed.get_world_size(group)
        distributed.all_gather_object(answers, answer, group)
        return answers


_models: dict[int, ServedModel] = {}
"""Models of this process by their manager, whose class has no attribute for them."""


def check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Replaces the manager's method of this name. It also answers this plugin's calls."""
    if not request.action.startswith(PREFIX):
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    model = _models.setdefault(id(manager), ServedModel(manager))
    answers = model.answer(request.action, json.loads(request.skip_tensor_list[0]))
    return CheckWeightsReqOutput(success=True, message=json.dumps(answers))


def register() -> None:
    """Install the replacement. Called by SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{MANAGER}.check_weights", check_weights, HookType.AROUND)
