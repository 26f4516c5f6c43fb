"""The generator suite passes a plain generator and names the rule that a broken one breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.interfaces import Generator, Proof
from rlhf.types import Turn
from rlhf_testing.contract import Nonconformance
from rlhf_testing.generator import GeneratorContract


class PlainGenerator(Generator):
    """One request at a time, the whole sequence again for each token."""

    name = "plain"
    capabilities = frozenset({"accept:module", "logprobs", "seeds", "top_k", "top_p", "min_p"})

    def __init__(self, config, spec):
        self.config = self.Config() if config is None else config
        self.eos, self.decode = spec.eos_token_ids, spec.decode

    def load(self, source, version):
        self.source, self.version = source, version
        return Proof(version)

    def generate(self, requests):
        for n, request in enumerate(requests):
            yield n, self.sample(n, request)

    def random(self, n, request):
        return torch.Generator().manual_seed(request.seed)

    def logits(self, request, ids):
        with torch.no_grad():
            return self.source.logits(torch.tensor([*request.ids, *ids]))[-1]

    def report(self, row, s):
        p = self.truncate(torch.softmax(row / (s.temperature or 1.0), 0), s)
        return (p / p.sum()).log()

    def truncate(self, p, s):
        if s.top_k:
            p = torch.where(p >= p.topk(s.top_k).values[-1], p, 0.0)
        if s.top_p < 1:
            order = p.argsort(descending=True)
            before = p[order].cumsum(0) - p[order]
            p = p.index_fill(0, order[before >= s.top_p], 0.0)
        return torch.where(p >= s.min_p * p.max(), p, 0.0)

    def sample(self, n, request):
        s, random = request.sampling, self.random(n, request)
        temperature = s.temperature or 1.0
        ends = (() if s.ignore_eos else self.eos) + s.stop_token_ids
        ids, logprobs, finish = [], [], "length"
        for _ in range(s.max_new_tokens):
            row = self.logits(request, ids)
            p = self.truncate(torch.softmax(row / temperature, 0), s)
            token = int(torch.multinomial(p, 1, generator=random)) if s.temperature else int(row.argmax())
            ids.append(token)
            logprobs.append(float(self.report(row, s)[token]))
            if token in ends or any(t in self.decode(ids) for t in s.stop):
                finish = "stop"
                break
        return Turn(ids, True, logprobs, ((0, self.version),), finish, temperature, text=self.decode(ids))


class TestPlainGenerator(GeneratorContract):
    generator = PlainGenerator
    registered = False


# ------------------------------------------------------------------------------- broken on purpose


class IgnoresTemperature(PlainGenerator):
    """Log-probs at temperature 1."""

    def report(self, row, s):
        return torch.log_softmax(row, 0)


class UntruncatedLogprobs(PlainGenerator):
    """Log-probs of the whole distribution, whatever was left out."""

    def report(self, row, s):
        return torch.log_softmax(row / (s.temperature or 1.0), 0)


class GlobalSeed(PlainGenerator):
    """Draws from torch's global state."""

    def random(self, n, request):
        return None


class SeedByPosition(PlainGenerator):
    """Seeds by the place in the batch."""

    def random(self, n, request):
        return torch.Generator().manual_seed(n)


class OneSeed(PlainGenerator):
    """Every request draws alike."""

    def random(self, n, request):
        return torch.Generator().manual_seed(0)


class SamplesCold(PlainGenerator):
    """Samples at half the temperature and reports the right log-probs."""

    def truncate(self, p, s):
        return super().truncate(p, s).square()


class DropsEos(PlainGenerator):
    """Leaves the end token out."""

    def sample(self, n, request):
        turn = super().sample(n, request)
        if turn.finish == "stop":
            return replace(turn, ids=turn.ids[:-1], logprobs=turn.logprobs[:-1])
        return turn


class SaysLength(PlainGenerator):
    """Always finishes as length."""

    def sample(self, n, request):
        return replace(super().sample(n, request), finish="length")


class SharesBudget(PlainGenerator):
    """Every sample gets the first one's budget."""

    def generate(self, requests):
        return super().generate([replace(r, sampling=requests[0].sampling) for r in requests])


class SwitchesMode(PlainGenerator):
    """Leaves the module in evaluation mode."""

    def generate(self, requests):
        self.source.module.eval()
        yield from super().generate(requests)


class CopiesOnce(PlainGenerator):
    """Keeps the first weights for ever."""

    def load(self, source, version):
        import copy

        if "source" not in vars(self):
            self.source = copy.copy(source)
            self.source.module = copy.deepcopy(source.module)
        self.version = version
        return Proof(version)


class Duplicates(PlainGenerator):
    """Answers the first request twice."""

    def generate(self, requests):
        yield 0, self.sample(0, requests[0])
        yield from super().generate(requests)


class NotGreedy(PlainGenerator):
    """Samples at temperature 0."""

    def sample(self, n, request):
        s = request.sampling
        return super().sample(n, replace(request, sampling=replace(s, temperature=s.temperature or 1.0)))


class IgnoresTopK(PlainGenerator):
    """Draws from all tokens and reports log-probs as if it had not."""

    def truncate(self, p, s):
        return super().truncate(p, replace(s, top_k=0))

    def report(self, row, s):
        p = torch.softmax(row / (s.temperature or 1.0), 0)
        return p.log() - super().truncate(p, s).sum().log()


def suite(made):
    return type("Broken", (GeneratorContract,), {"generator": made, "registered": False})()


@pytest.mark.parametrize(
    ("made", "check", "message"),
    [
        (IgnoresTemperature, "test_logprobs", "temperature 0.7: log-probs differ from the reference"),
        (UntruncatedLogprobs, "test_truncated_sampling", "log-probs differ"),
        (GlobalSeed, "test_seeds", "seeds belong to requests"),
        (GlobalSeed, "test_source_untouched", "global random state"),
        (SeedByPosition, "test_neighbours", "function of its own tokens"),
        (OneSeed, "test_seeds", "different seeds are equal"),
        (SamplesCold, "test_distribution", "do not follow the softmax"),
        (DropsEos, "test_stops", "belongs to the turn"),
        (SaysLength, "test_stops", "finishes as 'length'"),
        (SharesBudget, "test_budgets", "max_new_tokens = 5 gives 1"),
        (SwitchesMode, "test_source_untouched", "train / eval modes"),
        (CopiesOnce, "test_new_weights", "after new weights"),
        (Duplicates, "test_turns", "each once"),
        (NotGreedy, "test_greedy", "not the most likely"),
        (IgnoresTopK, "test_truncated_sampling", "outside of it"),
    ],
)
def test_broken_generator_fails_the_right_check(made, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(made), check)()
