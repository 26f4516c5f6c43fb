"""The sampling loop of one call: admission, prefill, decoding steps, compaction."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rlhf.types import Finish, GenerationRequest, Image, Turn
from rlhf.types.arrays import IntArray
from torch import Tensor

from rlhf_plugin_local.decoder import Decoder
from rlhf_plugin_local.kv_cache import LayerKV, SlotCache
from rlhf_plugin_local.sample_rows import SampleRows

GROWTH = 64
"""Smallest growth of the cache in positions (or a quarter of its length, if that is more)."""


@dataclass(slots=True)
class _Prompt:
    """A distinct prompt. Its keys, values and logits are kept while requests for it wait."""

    ids: IntArray
    images: tuple[Image, ...] = ()
    waiting: int = 0
    kv: list[LayerKV] | None = None
    logits_V: Tensor | None = None
    delta: int = 0
    """Position of the next token, minus the number of tokens."""
    choices_TLK: np.ndarray | None = None
    """The experts of the prompt's tokens, if they are recorded."""


def _need(request: GenerationRequest) -> int:
    """Largest number of cache positions of a request (its last token is never an input)."""
    return len(request.ids) + request.sampling.max_new_tokens - 1


class SamplingLoop:
    """Decisions depend on counters only (requests, their lengths and finishes), never on time."""

    def __init__(
        self,
        requests: Mapping[int, GenerationRequest],
        decoder: Decoder,
        config: Any,
        eos: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        version: int,
        work: Counter[str],
    ) -> None:
        """``requests``: the requests by their position in the call."""
        self.decoder, self.config, self.version, self.work = decoder, config, version, work
        self.waiting = deque(requests.items())
        self.keys = {index: request.context_key for index, request in requests.items()}
        """The context key of each request's prompt."""
        self.size = min(config.max_batch, len(requests))
        self.prompts: dict[bytes, _Prompt] = {}
        for index, request in requests.items():
            self.prompts.setdefault(self.keys[index], _Prompt(request.ids, request.images)).waiting += 1
        stop_ids = max((len({*r.sampling.stop_token_ids, *eos}) for r in requests.values()), default=0)
        layers = None if decoder.routers is None else decoder.routers.layers
        self.rows = SampleRows(self.size, stop_ids, decoder.vocabulary, eos, decode, decoder.device, layers)
        self.cache = SlotCache()
        self._finished: list[tuple[int, Turn]] = []

    @property
    def done(self) -> bool:
        return not self.waiting and not self.rows.live

    def advance(self, steps: int) -> list[tuple[int, Turn]]:
        """Run up to ``steps`` decoding steps. Returns the finished samples. Must be called inside
        ``Decoder.borrowed``."""
        for _ in range(steps):
            if self.waiting:
                self._admit()
            if not self.rows.live:
                if self.waiting:
                    continue
                break
            if len(self.rows.holes) > self.rows.used // 10:
                self._compact()
            self._step()
        finished, self._finished = self._finished, []
        return finished

    def _step(self) -> None:
        rows, length = self.rows, self.rows.length()
        if length > self.cache.capacity:
            self._compact()
            self._grow(length, rows.used)
        used = rows.used
        logits_SV = self.decoder.step(self.cache, rows.last[:used], rows.position[:used], rows.delta[:used], length)
        self.work["steps"] += 1
        self.work["row_steps"] += rows.used
        self._take(rows.record(None, logits_SV, self.decoder.choices_MLK))

    def _take(self, finishes: list[tuple[int, Finish]]) -> None:
        turns = self.rows.finish(finishes, self.version)
        self.work["sampled_tokens"] += sum(len(turn.ids) for _, turn in turns)
        self._finished += turns

    def _compact(self) -> None:
        source, target = self.rows.compact()
        if source:
            self.cache.move(source, target)

    # ------------------------------------------------------------------------------------ admission

    def _admissible(self) -> int:
        """How many waiting requests, in order, can get a row and cache positions for everything that they may
        sample."""
        live = self.rows.live
        longest, count = max((_need(row.request) for row in live), default=0), 0
        bound = self.config.max_cache_tokens
        for _, request in self.waiting:
            longest = max(longest, _need(request))
            rows = len(live) + count + 1
            if rows > self.size or (bound is not None and rows * longest > bound):
                break
            count += 1
        # A prefill pass for a single free row would cost more than the row gains.
        return 0 if live and count < min(len(self.waiting), max(1, len(live) // 8)) else count

    def _admit(self) -> None:
        count = self._admissible()
        if not count:
            return
        if len(self.rows.holes) > count:
            self._compact()
        requests = [self.waiting.popleft() for _ in range(count)]
        used, holes = self.rows.used, self.rows.holes
        slots = [*holes[:count], *range(used, used + count - len(holes[:count]))]
        self._prefill([self.keys[index] for index, _ in requests])
        prompts = [self.prompts[self.keys[index]] for index, _ in requests]
        self.rows.admit(slots, requests, [prompt.delta for prompt in prompts], [p.choices_TLK for p in prompts])
        length = self.rows.length()
        if self.rows.used > self.cache.slots or length > self.cache.capacity:
            self._grow(length, used)
        by_prompt: dict[bytes, list[int]] = {}
        logits: list[Tensor] = []
        for slot, (index, _) in zip(slots, requests, strict=True):
            by_prompt.setdefault(self.keys[index], []).append(slot)
            logits_V = self.prompts[self.keys[index]].logits_V
            assert logits_V is not None
            logits.append(logits_V)
        logits_BV = torch.stack(logits)
        del logits, logits_V  # they may be views of a whole pack, which is freed here
        for key, prompt_slots in by_prompt.items():
            prompt = self.prompts[key]
            assert prompt.kv is not None
            self.cache.write_prompt(prompt_slots, prompt.kv)
            prompt.waiting -= len(prompt_slots)
            if prompt.waiting:  # a copy, so that the whole pack is not kept alive
                prompt.kv = [(k.clone(), v.clone()) for k, v in prompt.kv]
            else:
                prompt.kv = prompt.logits_V = None
        self._take(self.rows.record(slots, logits_BV))

    def _prefill(self, keys: list[bytes]) -> None:
        """Compute keys and values of new prompts, in packs of at most ``prefill_tokens``."""
        packs: list[list[_Prompt]] = []
        room = 0
        for key in dict.fromkeys(keys):
            prompt = self.prompts[key]
            if prompt.kv is None:
                if len(prompt.ids) > room:
                    packs.append([])
                    room = self.config.prefill_tokens
                packs[-1].append(prompt)
                room -= len(prompt.ids)
        for pack in packs:
            ids, images = [prompt.ids for prompt in pack], [prompt.images for prompt in pack]
            for prompt, logits_V, layers, delta in zip(pack, *self.decoder.prefill(ids, images), strict=True):
                prompt.logits_V, prompt.kv, prompt.delta = logits_V, layers, delta
            if (choices_MLK := self.decoder.choices_MLK) is not None:
                for prompt, choices_TLK in zip(pack, choices_MLK.split([len(p.ids) for p in pack]), strict=True):
                    prompt.choices_TLK = choices_TLK.to(torch.int16).cpu().numpy()
            self.work["prefill_tokens"] += sum(len(prompt.ids) for prompt in pack)

    def _grow(self, length: int, used: int) -> None:
        """Grow to ``length`` positions for all rows and some more, but never beyond what they may need."""
        slots = self.rows.used
        longest = max(_need(row.request) for row in self.rows.live)
        capacity = max(length, min(longest, length + max(GROWTH, length // 4)))
        like = None
        if not self.cache.slots:
            like = next(p.kv for p in self.prompts.values() if p.kv is not None)
        self.cache.reserve(like, slots, capacity, used)
        self.work["peak_cache_tokens"] = max(self.work["peak_cache_tokens"], slots * capacity)
