"""The conformance suite of generators.

::

    from rlhf_testing.generator import GeneratorContract

    class TestMyGenerator(GeneratorContract):
        generator = MyGenerator

The reference is :class:`rlhf_testing.plain.PlainTrainer` on the same weights: one sequence at a time, in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
from rlhf.interfaces.generator import AnswersRequests, Sleeps, TakesModule
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.model import PARTS, LowRankAdapters, ModelSpec
from rlhf.types import GenerationRequest, RoleSpec, Sampling, Turn
from torch import Tensor

from rlhf_testing.contract import Contract, expect
from rlhf_testing.generator_module import ModuleChecks
from rlhf_testing.models import model_path
from rlhf_testing.plain import PlainAdapterTrainer, PlainTrainer

PROMPT = (20, 21, 22)


LOGPROB = 1e-5
"""Allowed absolute difference between fp32 log-probs of a cached, batched decode and of a forward pass over the whole
sequence."""
TEMPERATURES = (0.7, 1.0, 1.3)
PROMPTS = ((20, 21, 22), (30,), (20, 21, 22), (40, 41, 42, 43, 44, 45, 46), (9, 8))
"""Prompts of different lengths. Equal prompts may share their prefill."""
BUCKET_BYTES = 2**14
LINK_SECONDS = 60.0
"""Time after which one end of a link stops waiting for the other."""


class Sampled:
    """A generator, with the reference trainer from which it gets its weights."""

    def __init__(self, generator: Any, source: PlainTrainer, decode: Any) -> None:
        self.generator, self.source, self.decode = generator, source, decode

    def turns(self, requests: Sequence[GenerationRequest], label: str) -> list[Turn]:
        """One turn per request, in request order. Fails unless each request is answered exactly once."""
        answers = list(self.generator.generate(requests))
        order = sorted(n for n, _ in answers)
        expect(
            order == list(range(len(requests))), f"{label} {len(requests)} requests must be answered once, got {order}"
        )
        return [turn for _, turn in sorted(answers, key=lambda pair: pair[0])]

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[T, V] of the plain forward pass."""
        with torch.no_grad():
            return self.source.logits(torch.tensor(list(ids)))

    def logprobs(self, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> Tensor:
        """[T, V] log-probs of the distributions that the sampled tokens were drawn from, before any truncation."""
        rows = self.logits([*prompt, *ids])[len(prompt) - 1 : -1]
        return torch.log_softmax(rows / temperature, 1)


class GeneratorContract(ModuleChecks, Contract):
    """Checks log-probs against the reference, seeds, batching, stops and budgets, and that the trainer is not
    changed."""

    kind = "generator"
    generator: Any = None
    architectures: Sequence[str] = ("qwen3",)
    """Model types of transformers to check."""
    sizes: Mapping[str, int] = {}
    """Sizes of the tiny models, if the generator's kernels need particular ones: ``{"head_dim": 32}``."""

    def path(self, architecture: str = "", seed: int = 0) -> Path:
        """The folder of the tiny model that :meth:`make` samples from."""
        return model_path(architecture or self.architectures[0], seed=seed, **self.sizes)

    def make(
        self,
        config: Any,
        *,
        eos: Sequence[int] = (1,),
        architecture: str = "",
        seed: int = 0,
        adapters: LowRankAdapters | None = None,
    ) -> Sampled:
        """A loaded generator. Override it for a generator that needs more than weights (a model path, a server). With
        ``adapters``, which go into the spec, the source is a ``PlainAdapterTrainer``."""
        from transformers import AutoTokenizer

        path = str(self.path(architecture, seed))
        tokenizer = AutoTokenizer.from_pretrained(path)

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))

        generator = self.cls(config, GeneratorSpec(tuple(eos), decode, path, "fp32", max_tokens=256, adapters=adapters))
        model = ModelSpec(RoleSpec("policy"), path, dtype="fp32")
        source = PlainTrainer(None, model) if adapters is None else PlainAdapterTrainer(None, model)
        sampled = Sampled(generator, source, decode)
        self.load(sampled, 0)
        return sampled

    def load(self, sampled: Sampled, version: int) -> Any:
        """Load the source's weights into the generator, by the ability that it has."""
        if issubclass(self.cls, TakesModule):
            return sampled.generator.load(sampled.source, version)
        sampled.generator.begin_load(version)
        view = PARTS if isinstance(sampled.source, PlainAdapterTrainer) else "live"
        for bucket in sampled.source.buckets(view, BUCKET_BYTES):
            sampled.generator.take(bucket)
        [proof, *_] = sampled.generator.end_load()
        return proof

    def build(self, config: Any) -> Any:
        return self.make(config).generator

    def requests(self, sampling: Sampling, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[GenerationRequest]:
        return [GenerationRequest(tuple(p), 100 + n, sampling) for n, p in enumerate(prompts)]

    # ------------------------------------------------------------------------------------- checks

    def test_seeds(self) -> None:
        """Equal seeds give bit-equal samples in a fresh generator, whatever the global random state is. Different seeds
        give different samples."""
        for config in self.grid():
            label = self.label(config)
            requests = self.requests(Sampling(10, ignore_eos=True))
            torch.manual_seed(1)
            first = self.make(config).turns(requests, label)
            torch.manual_seed(2)
            second = self.make(config).turns(requests, label)
            expect(first == second, f"{label} two generators answer equal requests differently: use the request's seed")
            ids = [tuple(t.ids) for t in first]
            expect(ids[0] != ids[2], f"{label} two samples of one prompt with different seeds are equal: {ids[0]}")

    def test_neighbours(self) -> None:
        """A request draws the same tokens alone and at any position of a batch."""
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            requests = self.requests(Sampling(10, ignore_eos=True))
            batch = s.turns(requests, label)
            reversed_batch = s.turns(requests[::-1], label)[::-1]
            for n, request in enumerate(requests):
                single = s.turns([request], label)[0]
                for position, other in (("alone", single), ("in reversed order", reversed_batch[n])):
                    expect(
                        other.ids == batch[n].ids,
                        f"{label} request {n} draws {other.ids} {position} and {batch[n].ids} in the batch: a "
                        "sample is a function of its own tokens, seed and sampling",
                    )

    def test_advance(self) -> None:
        """An ``AnswersRequests`` samples requests that come one after another, and drops some, as
        :meth:`generate` samples them together."""
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            if not isinstance(s.generator, AnswersRequests):
                continue
            requests = [replace(r, sampling=Sampling(3 + 3 * n)) for n, r in enumerate(self.requests(Sampling(3)))]
            batch = s.turns(requests, label)
            last = len(requests) - 1
            answers = s.generator.advance({last: requests[last]})
            answers += s.generator.advance({n: requests[n] for n in range(last)})
            # a call samples at least one token, so a generator may have finished the request before it is dropped
            finished = {name for name, _ in answers}
            answers += s.generator.advance({}, dropped=[last - 1])
            for _ in range(100):
                answers += s.generator.advance({}, seconds=0.1)
            numbers = [n for n in range(len(requests)) if n != last - 1 or n in finished]
            names = sorted(name for name, _ in answers)
            expect(names == numbers, f"{label} advance() answers the requests {names}; expected each of {numbers} once")
            for name, turn in answers:
                expect(
                    turn.ids == batch[name].ids,
                    f"{label} request {name} draws {turn.ids} by advance() and {batch[name].ids} by generate()",
                )

    def test_distribution(self) -> None:
        """First tokens follow the reference's softmax at the temperature (chi-square over eight bins of similar
        mass)."""
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            for temperature in (0.7, 1.3):
                sampling = Sampling(1, temperature, ignore_eos=True)
                requests = [GenerationRequest(PROMPT, seed, sampling) for seed in range(400)]
                tokens = [t.ids[0] for t in s.turns(requests, label)]
                p_V = s.logprobs(PROMPT, [0], temperature)[0].exp().double()
                order = p_V.argsort(descending=True)
                bin_V = torch.zeros_like(order)
                bin_V[order] = (p_V[order].cumsum(0) * 8).long().clamp(max=7)
                want = torch.zeros(8, dtype=torch.float64).index_add(0, bin_V, p_V) * len(tokens)
                counts = torch.bincount(bin_V[torch.tensor(tokens)], minlength=8).double()
                filled = want > 1
                chi = float(((counts - want)[filled].square() / want[filled]).sum())
                expect(
                    chi < 40.0,
                    f"{label} temperature {temperature}: first tokens do not follow the softmax, chi-square {chi:.0f} "
                    f"of 7 degrees of freedom (allowed 40; chance 1e-6): drawn {counts.tolist()}, "
                    f"expected {want.round().tolist()}",
                )

    def test_greedy(self) -> None:
        """Temperature 0 takes the most likely token each time."""
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            for request, turn in zip(
                self.requests(Sampling(8)),
                s.turns(self.requests(Sampling(8, 0.0, ignore_eos=True)), label),
                strict=True,
            ):
                rows = s.logprobs(request.ids, turn.ids, 1.0)
                short = rows.max(1).values - rows[torch.arange(len(turn.ids)), torch.tensor(turn.ids)]
                expect(
                    float(short.max()) <= 1e-5, f"{label} temperature 0 takes a token that is not the most likely one"
                )

    def test_budgets(self) -> None:
        """``max_new_tokens`` applies to each request by itself, and a turn that reaches it finishes as ``length``."""
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            sampling = Sampling(1, ignore_eos=True)
            budgets = (1, 5, 2, 9, 3)
            requests = [
                replace(r, sampling=replace(sampling, max_new_tokens=n))
                for r, n in zip(self.requests(sampling), budgets, strict=True)
            ]
            for budget, turn in zip(budgets, s.turns(requests, label), strict=True):
                tokens, finish = len(turn.ids), turn.finish
                expect(
                    (tokens, finish) == (budget, "length"),
                    f"{label} max_new_tokens = {budget} gives {tokens} tokens, finish {finish!r}",
                )

    def test_stops(self) -> None:
        """End tokens, stop tokens and stop strings end a turn where they first appear, and are part of the turn."""
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            free = s.turns([GenerationRequest(PROMPT, 7, Sampling(12, ignore_eos=True))], label)[0]
            stop = free.ids[4]
            # the token may also come before position 4
            ids = free.ids[: free.ids.index(stop) + 1]
            request = GenerationRequest(PROMPT, 7, Sampling(12, ignore_eos=True, stop_token_ids=(stop,)))
            self._expect_end(s.turns([request], label)[0], ids, f"{label} stop_token_ids = ({stop},)")
            request = GenerationRequest(PROMPT, 7, Sampling(12))
            ender = self.make(config, eos=(stop,))
            self._expect_end(ender.turns([request], label)[0], ids, f"{label} end token {stop}")
            ignored = ender.turns([replace(request, sampling=Sampling(12, ignore_eos=True))], label)[0]
            expect(ignored.ids == free.ids, f"{label} ignore_eos: the end token {stop} ended the turn: {ignored.ids}")
            text = next((t for t in (s.decode([i]) for i in free.ids[2:]) if t.strip()), "")
            if text:
                count = next(n for n in range(1, 13) if text in s.decode(free.ids[:n]))
                request = GenerationRequest(PROMPT, 7, Sampling(12, ignore_eos=True, stop=(text,)))
                self._expect_end(s.turns([request], label)[0], free.ids[:count], f"{label} stop = ({text!r},)")

    def _expect_end(self, turn: Turn, ids: Sequence[int], label: str) -> None:
        expect(turn.ids == ids, f"{label} must end the turn as {ids} (it belongs to the turn), got {turn.ids}")
        expect(turn.finish == "stop", f"{label} must finish as 'stop', got {turn.finish!r}")
        expect(
            turn.logprobs is not None and len(turn.logprobs) == len(ids),
            f"{label} drops the log-prob of the last token",
        )

    def test_turns(self) -> None:
        """Each request is answered once, by a complete sampled turn that names the version of its weights."""
        for config in self.grid():
            s = self.make(config)
            sampling = Sampling(max_new_tokens=7, temperature=0.9)
            requests = self.requests(sampling)
            for n, turn in enumerate(s.turns(requests, self.label(config))):
                label = f"{self.label(config)} request {n}"
                if n == 0 and "seeds" in self.cls.capabilities:
                    streamed = [token for piece in s.generator.stream(requests[0]) for token in piece]
                    expect(streamed == list(turn.ids), f"{label}: stream() gives {streamed}, generate() {turn.ids}")
                expect(
                    turn.sampled and 1 <= len(turn.ids) <= 7,
                    f"{label}: expected 1 to 7 tokens and sampled=True, got {len(turn.ids)} and sampled={turn.sampled}",
                )
                count = None if turn.logprobs is None else len(turn.logprobs)
                expect(count == len(turn.ids), f"{label}: {len(turn.ids)} tokens and {count} log-probs")
                expect(turn.temperature == 0.9, f"{label}: temperature is {turn.temperature}, but 0.9 was requested")
                expect(
                    turn.versions == ((0, 0),),
                    f"{label}: versions are {turn.versions}; all tokens are of version 0, so expected ((0, 0),)",
                )
                expect(turn.finish in ("stop", "length"), f"{label}: finish is {turn.finish!r}")
                expect(
                    turn.text == s.decode(turn.ids),
                    f"{label}: the text is {turn.text!r}, but its tokens decode to {s.decode(turn.ids)!r}",
                )

    def test_logprobs(self) -> None:
        """Log-probs equal those of the reference forward pass at temperatures 0.7, 1 and 1.3."""
        for config in self.grid():
            for architecture in self.architectures:
                label, s = f"{self.label(config)} {architecture}:", self.make(config, architecture=architecture)
                for temperature in TEMPERATURES:
                    self._same_logprobs(
                        s, Sampling(12, temperature, ignore_eos=True), f"{label} temperature {temperature}:"
                    )

    def test_truncated_sampling(self) -> None:
        """With top_p, top_k or min_p only allowed tokens are drawn, and log-probs are those of the renormalised
        distribution that the tokens were drawn from."""
        capabilities = self.cls.capabilities
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            for name, value in (("top_k", 3), ("top_p", 0.5), ("min_p", 0.5)):
                if name not in capabilities:
                    continue
                sampling = Sampling(12, 1.3, ignore_eos=True, **{name: value})  # type: ignore[arg-type]
                keep = partial(allowed, name=name, value=value)
                for request, turn in self._same_logprobs(s, sampling, f"{label} {name} = {value}:", keep):
                    for position, row in enumerate(s.logprobs(request.ids, turn.ids, 1.3)):
                        token = turn.ids[position]
                        expect(
                            allowed(row, token, name, value),
                            f"{label} {name} = {value} drew token {token}, which it excludes",
                        )

    def _same_logprobs(
        self, s: Sampled, sampling: Sampling, label: str, keep: Callable[..., bool] | None = None
    ) -> list[tuple[GenerationRequest, Turn]]:
        requests = self.requests(sampling)
        turns = s.turns(requests, label)
        for request, turn in zip(requests, turns, strict=True):
            rows = s.logprobs(request.ids, turn.ids, sampling.temperature)
            want = rows[torch.arange(len(turn.ids)), torch.tensor(turn.ids)]
            logprobs = torch.tensor(turn.logprobs)
            delta = float((logprobs - want).abs().max())
            if keep is not None:  # rounding decides at the edge of a truncation, so the mass has two bounds
                largest_mass, smallest_mass = (_log_mass(rows, partial(keep, margin=m)) for m in (1.0, -1.0))
                delta = float(torch.maximum(want - largest_mass - logprobs, logprobs - want + smallest_mass).max())
            expect(
                delta <= LOGPROB,
                f"{label} log-probs differ from the reference forward pass by {delta:.1e} (allowed {LOGPROB:.0e}). "
                "Report those of the distribution that the token was drawn from, after temperature and truncation",
            )
        return list(zip(requests, turns, strict=True))

    def test_new_weights(self) -> None:
        """After new weights are loaded, samples come from them only. ``load`` proves its version."""
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            sampling = Sampling(8, ignore_eos=True)
            s.turns(self.requests(sampling), label)
            other = PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(self.path(seed=5))))
            s.source.load_weights(other.weights())
            proof = self.load(s, 3)
            expect(proof.version == 3, f"{label} the proof of load(..., 3) has version {proof.version}")
            expect(s.generator.version == 3, f"{label} after load(..., 3) its version is {s.generator.version}")
            for _, turn in self._same_logprobs(s, sampling, f"{label} after new weights:"):
                expect(turn.versions == ((0, 3),), f"{label} after load(..., 3) a turn has versions {turn.versions}")

    def test_base(self) -> None:
        """With the capability ``base``, requests for the policy's base get its tokens, whatever the adapters, and other
        requests of the same call the policy's. One configuration is checked, because no option changes this."""
        if "base" not in self.cls.capabilities:
            return
        config = next(iter(self.grid()))
        label, s = self.label(config), self.make(config, adapters=PlainAdapterTrainer.low_rank)
        source: Any = s.source
        requests = self.requests(Sampling(8, 0.0, ignore_eos=True))
        requests = [replace(request, base=base) for request in requests for base in (True, False)]
        for seed in (1, 2):
            source.draw(seed)
            self.load(s, seed)
            streams = [[t for piece in s.generator.stream(request) for t in piece] for request in requests[:2]]
            turns = s.turns(requests, label)
            expect(streams == [list(t.ids) for t in turns[:2]], f"{label} stream() gives {streams}, unlike generate()")
            expect(source.current_view == "live", f"{label} generating changed the trainer's view")
            for request, turn in zip(requests, turns, strict=True):
                source.use_view("base" if request.base else "live")
                best = s.logprobs(request.ids, turn.ids, 1.0).max(1).values
                delta = float((best - torch.tensor(turn.logprobs)).abs().max())
                expect(delta <= LOGPROB, f"{label} base = {request.base}: greedy log-probs differ by {delta:.1e}")

    def test_links(self) -> None:
        """With ``ReceivesOverLinks``, weights that come over a link are proven and sampled from, and a second
        link replaces the first. The check uses CPUs, shared memory and one configuration, because GPU memory cannot be
        shared within one process, and a link does not depend on options."""
        from rlhf_workers.links.coordination import serve
        from rlhf_workers.links.ends import ConnectedTrainer
        from rlhf_workers.links.link import Link
        from rlhf_workers.links.receiving import ReceivesOverLinks

        config = next(iter(self.grid()))
        label, s = self.label(config), self.make(config)
        generator = s.generator
        if not isinstance(generator, ReceivesOverLinks) or torch.cuda.is_available():
            return
        if sys.platform != "linux":
            raise SkipTest(f"The check needs Linux, where processes map each other's memory; this is {sys.platform}")
        stores = []  # kept alive: a store serves until it is collected, and an unread link must time out
        for version in (1, 2):
            other = PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(self.path(seed=4 + version))))
            s.source.load_weights(other.weights())
            store, address = serve("127.0.0.1", LINK_SECONDS)
            stores.append(store)
            link = Link("shared", address, generator.receivers(), 1, False, LINK_SECONDS)
            trainer = ConnectedTrainer(s.source, link)
            generator.connect(link, 0)
            generator.begin_load(version)
            for header in trainer.send_buckets("live", BUCKET_BYTES):
                generator.take(header)
            for proof in generator.end_load():
                expect(
                    proof.version == version and dict(proof.received) == s.source.sent_fingerprints(),
                    f"{label} version {version} was sent over a link with {len(s.source.sent_fingerprints())} tensors, "
                    f"and {proof.receiver} proves version {proof.version} with {len(proof.received)}: versions and "
                    "fingerprints must be equal",
                )
            self._same_logprobs(s, Sampling(8, ignore_eos=True), f"{label} after a load over a link:")
            stale = [name for header in trainer.send_buckets("live", BUCKET_BYTES) for name in generator.stale(header)]
            expect(not stale, f"{label} stale() names {stale}, but the generator samples from these weights")
            trainer.close()

    def test_sleep(self) -> None:
        """With ``Sleeps``, the samples after ``sleep`` and ``wake`` are the same as before."""
        if not issubclass(self.cls, Sleeps):
            return
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            requests = self.requests(Sampling(6))
            first = [t.ids for t in s.turns(requests, label)]
            s.generator.sleep()
            s.generator.wake()
            expect(
                [t.ids for t in s.turns(requests, label)] == first, f"{label} samples differ after sleep() and wake()"
            )


def allowed(logprobs_V: Tensor, token: int, name: str, value: float, margin: float = 1.0) -> bool:
    """Whether the truncation allows the token. ``margin`` 1 also allows tokens at the edge that rounding may allow, -1
    only tokens that are allowed in spite of rounding."""
    p_V, probability = logprobs_V.exp(), float(logprobs_V[token].exp())
    above_V = p_V > probability * (1 + 1e-4 * margin)
    above_V[token] = False
    if name == "top_k":
        return int(above_V.sum()) < value
    if name == "min_p":
        return probability >= value * float(p_V.max()) * (1 - 1e-3 * margin)
    return float(p_V[above_V].sum()) < value + 1e-4 * margin


def _log_mass(rows: Tensor, keep: Callable[[Tensor, int], bool]) -> Tensor:
    """For each row of log-probs, the log of the probability mass that is kept."""
    mask = torch.tensor([[keep(row, token) for token in range(len(row))] for row in rows])
    return rows.masked_fill(~mask, float("-inf")).logsumexp(-1)
