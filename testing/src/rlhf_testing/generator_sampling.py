"""The generator suite's checks of sampling: seeds, batching, distribution, budgets and stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rlhf.interfaces.generator import AnswersRequests
from rlhf.types import GenerationRequest, Sampling, Turn

from rlhf_testing.contract import expect

PROMPT = (20, 21, 22)


class SamplingChecks:
    """A mixin of :class:`rlhf_testing.generator.GeneratorContract`, which defines the four methods declared here."""

    make: Any
    requests: Any
    grid: Any
    about: Any

    def test_seeds(self) -> None:
        """Equal seeds give bit-equal samples in a fresh generator, whatever the global random state is. Different seeds
        give different samples."""
        for config in self.grid():
            about = self.about(config)
            requests = self.requests(Sampling(10, ignore_eos=True))
            torch.manual_seed(1)
            first = self.make(config).turns(requests, about)
            torch.manual_seed(2)
            second = self.make(config).turns(requests, about)
            expect(
                first == second, f"{about} two generators with equal seeds draw differently: seeds belong to requests"
            )
            ids = [tuple(t.ids) for t in first]
            expect(ids[0] != ids[2], f"{about} two samples of one prompt with different seeds are equal: {ids[0]}")

    def test_neighbours(self) -> None:
        """A request draws the same tokens alone and at any position of a batch."""
        for config in self.grid():
            about, s = self.about(config), self.make(config)
            requests = self.requests(Sampling(10, ignore_eos=True))
            together = s.turns(requests, about)
            back = s.turns(requests[::-1], about)[::-1]
            for n, request in enumerate(requests):
                alone = s.turns([request], about)[0]
                for position, other in (("alone", alone), ("in reversed order", back[n])):
                    expect(
                        other.ids == together[n].ids,
                        f"{about} request {n} draws {other.ids} {position} and {together[n].ids} in the batch: a "
                        "sample is a function of its own tokens, seed and sampling",
                    )

    def test_advance(self) -> None:
        """An ``AnswersRequests`` samples requests that come one after another, and drops some, as
        :meth:`generate` samples them together."""
        for config in self.grid():
            about, s = self.about(config), self.make(config)
            if not isinstance(s.generator, AnswersRequests):
                continue
            requests = [replace(r, sampling=Sampling(3 + 3 * n)) for n, r in enumerate(self.requests(Sampling(3)))]
            together = s.turns(requests, about)
            last = len(requests) - 1
            answers = s.generator.advance({last: requests[last]})
            answers += s.generator.advance({n: requests[n] for n in range(last)})
            answers += s.generator.advance({}, dropped=[last - 1])
            for _ in range(100):
                answers += s.generator.advance({}, seconds=0.1)
            numbers = [n for n in range(len(requests)) if n != last - 1]
            names = sorted(name for name, _ in answers)
            expect(
                names == numbers, f"{about} advance() answers requests {names}; each of {numbers} once was asked for"
            )
            for name, turn in answers:
                expect(
                    turn.ids == together[name].ids,
                    f"{about} request {name} draws {turn.ids} by advance() and {together[name].ids} by generate()",
                )

    def test_distribution(self) -> None:
        """First tokens follow the reference's softmax at the temperature (chi-square over eight bins of similar
        mass)."""
        for config in self.grid():
            about, s = self.about(config), self.make(config)
            for temperature in (0.7, 1.3):
                sampling = Sampling(1, temperature, ignore_eos=True)
                requests = [GenerationRequest(PROMPT, seed, sampling) for seed in range(400)]
                tokens = [t.ids[0] for t in s.turns(requests, about)]
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
                    f"{about} temperature {temperature}: first tokens do not follow the softmax, chi-square {chi:.0f} "
                    f"of 7 degrees of freedom (allowed 40; chance 1e-6): drawn {counts.tolist()}, "
                    f"expected {want.round().tolist()}",
                )

    def test_greedy(self) -> None:
        """Temperature 0 takes the most likely token each time."""
        for config in self.grid():
            about, s = self.about(config), self.make(config)
            for request, turn in zip(
                self.requests(Sampling(8)),
                s.turns(self.requests(Sampling(8, 0.0, ignore_eos=True)), about),
                strict=True,
            ):
                rows = s.logprobs(request.ids, turn.ids, 1.0)
                short = rows.max(1).values - rows[torch.arange(len(turn.ids)), torch.tensor(turn.ids)]
                expect(
                    float(short.max()) <= 1e-5, f"{about} temperature 0 takes a token that is not the most likely one"
                )

    def test_budgets(self) -> None:
        """``max_new_tokens`` applies to each request by itself, and a turn that reaches it finishes as ``length``."""
        for config in self.grid():
            about, s = self.about(config), self.make(config)
            sampling = Sampling(1, ignore_eos=True)
            budgets = (1, 5, 2, 9, 3)
            requests = [
                replace(r, sampling=replace(sampling, max_new_tokens=n))
                for r, n in zip(self.requests(sampling), budgets, strict=True)
            ]
            for budget, turn in zip(budgets, s.turns(requests, about), strict=True):
                tokens, finish = len(turn.ids), turn.finish
                expect(
                    (tokens, finish) == (budget, "length"),
                    f"{about} max_new_tokens = {budget} gives {tokens} tokens, finish {finish!r}",
                )

    def test_stops(self) -> None:
        """End tokens, stop tokens and stop strings end a turn where they first appear, and are part of the turn."""
        for config in self.grid():
            about, s = self.about(config), self.make(config)
            free = s.turns([GenerationRequest(PROMPT, 7, Sampling(12, ignore_eos=True))], about)[0]
            stop = free.ids[4]
            until = free.ids[: free.ids.index(stop) + 1]
            request = GenerationRequest(PROMPT, 7, Sampling(12, ignore_eos=True, stop_token_ids=(stop,)))
            self._ended(s.turns([request], about)[0], until, f"{about} stop_token_ids = ({stop},)")
            request = GenerationRequest(PROMPT, 7, Sampling(12))
            ender = self.make(config, eos=(stop,))
            self._ended(ender.turns([request], about)[0], until, f"{about} end token {stop}")
            ignored = ender.turns([replace(request, sampling=Sampling(12, ignore_eos=True))], about)[0]
            expect(ignored.ids == free.ids, f"{about} ignore_eos: the end token {stop} ended the turn: {ignored.ids}")
            text = next((t for t in (s.decode([i]) for i in free.ids[2:]) if t.strip()), "")
            if text:
                count = next(n for n in range(1, 13) if text in s.decode(free.ids[:n]))
                request = GenerationRequest(PROMPT, 7, Sampling(12, ignore_eos=True, stop=(text,)))
                self._ended(s.turns([request], about)[0], free.ids[:count], f"{about} stop = ({text!r},)")

    def _ended(self, turn: Turn, ids: list[int], about: str) -> None:
        expect(turn.ids == ids, f"{about} must end the turn as {ids} (it belongs to the turn), got {turn.ids}")
        expect(turn.finish == "stop", f"{about} finishes as {turn.finish!r}, not 'stop'")
        expect(
            turn.logprobs is not None and len(turn.logprobs) == len(ids),
            f"{about} loses the log-prob of its last token",
        )
