"""The generator suite passes a plain generator and names the rule that a broken one breaks."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from unittest import SkipTest

import pytest
import torch
from rlhf.errors import SyncError
from rlhf.interfaces import AnswersRequests, Generator, ModelSpec, Proof, TakesModule
from rlhf.types import RoleSpec, Turn
from rlhf.weights.bucket import Bucket
from rlhf_modeling.attention import packed
from rlhf_testing import generator
from rlhf_testing.contract import Nonconformance
from rlhf_testing.generator import GeneratorContract
from rlhf_testing.plain import PlainTrainer
from rlhf_workers.links.ends import connect_receiver
from rlhf_workers.links.receiving import ReceivesOverLinks


class PlainSampling(Generator):
    """One request at a time, the whole sequence again for each token."""

    name = "plain"
    capabilities = frozenset({"logprobs", "seeds", "top_k", "top_p", "min_p"})

    def __init__(self, config, spec):
        self.config = self.Config() if config is None else config
        self.eos, self.decode = spec.eos_token_ids, spec.decode

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
            preceding = p[order].cumsum(0) - p[order]
            p = p.index_fill(0, order[preceding >= s.top_p], 0.0)
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


class PlainGenerator(TakesModule, PlainSampling):
    """Samples from the trainer's module."""

    def load(self, source, version):
        self.source, self.version = source, version
        return Proof(version)

    def logits(self, request, ids):
        with packed([len(request.ids) + len(ids)]):  # for modules that pack several sequences into a row
            return super().logits(request, ids)


class PlainLinked(ReceivesOverLinks, PlainSampling):
    """Holds a copy of the model, and takes weights over links."""

    name = "plain_linked"
    receiver = None

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.source = PlainTrainer(None, ModelSpec(RoleSpec("policy"), spec.path, dtype="fp32"))

    def receivers(self):
        return 1

    def connect(self, link, first):
        self.receiver = connect_receiver(link, first, torch.device("cpu"))

    def opened(self, bucket):
        return nullcontext(bucket) if isinstance(bucket, Bucket) else self.receiver.open(bucket)

    def begin_load(self, version):
        self.coming, self.tensors, self.received = version, {}, {}

    def take(self, bucket):
        with self.opened(bucket) as opened:
            self.received |= opened.received()
            self.tensors |= {name: tensor.clone() for name, tensor in opened.tensors}

    def end_load(self):
        self.source.load_weights(iter(self.tensors.items()))
        self.version = self.coming
        return [Proof(self.version, received=self.received)]

    def stale(self, bucket):
        weights = dict(self.source.weights())
        with self.opened(bucket) as opened:
            return [name for name, tensor in opened.tensors if not torch.equal(weights[name], tensor)]


class Advances(AnswersRequests, PlainGenerator):
    """One request per call, complete."""

    def advance(self, requests, dropped=(), seconds=0.0):
        self.waiting = getattr(self, "waiting", {}) | requests
        for name in dropped:
            self.waiting.pop(name, None)
        if not self.waiting:
            return []
        name = next(iter(self.waiting))
        return [(name, self.sample(name, self.waiting.pop(name)))]


class AdvancesAll(Advances):
    """All requests in one call, so that a request may be complete before it is dropped."""

    def advance(self, requests, dropped=(), seconds=0.0):
        return [(name, self.sample(name, request)) for name, request in requests.items()]


class TestPlainGenerator(GeneratorContract):
    generator = PlainGenerator
    registered = False


@pytest.mark.parametrize("cls", [Advances, AdvancesAll])
def test_requests_that_come_and_go_pass(cls):
    """``AdvancesAll`` answers before a request is dropped."""
    suite(cls).test_advance()


def test_a_generator_that_takes_weights_over_links_passes():
    suite(PlainLinked).test_links()


# ------------------------------------------------------------------------------- broken on purpose


class IgnoresTemperature(PlainGenerator):
    """Log-probs at temperature 1."""

    def report(self, row, s):
        return torch.log_softmax(row, 0)


class UntruncatedLogprobs(PlainGenerator):
    """Log-probs of the whole distribution, although top_p or top_k left tokens out."""

    def report(self, row, s):
        return torch.log_softmax(row / (s.temperature or 1.0), 0)


class GlobalSeed(PlainGenerator):
    """Draws from torch's global state."""

    def random(self, n, request):
        return None


class SeedByPosition(PlainGenerator):
    """Derives seeds from the position in the batch."""

    def random(self, n, request):
        return torch.Generator().manual_seed(n)


class OneSeed(PlainGenerator):
    """Every request uses the same random numbers."""

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


class CannotPack(PlainGenerator):
    """Gives the module no lengths of sequences."""

    def logits(self, request, ids):
        return PlainSampling.logits(self, request, ids)


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


class FirstLinkOnly(PlainLinked):
    """Ignores every link but the first."""

    def connect(self, link, first):
        if self.receiver is None:
            super().connect(link, first)


class HeaderForBucket(PlainLinked):
    """Proves the fingerprints that the header names, and loads nothing that comes over a link."""

    def take(self, bucket):
        if isinstance(bucket, Bucket):
            super().take(bucket)
            return
        with self.opened(bucket):
            self.received |= dict(zip((n for n, *_ in bucket.layout.tensors), bucket.layout.fingerprints, strict=True))

    def end_load(self):
        self.tensors = self.tensors or dict(self.source.weights())
        return super().end_load()


class DropsABucket(PlainLinked):
    """Takes only the first bucket that comes over a link."""

    def take(self, bucket):
        with self.opened(bucket):
            if isinstance(bucket, Bucket) or not bucket.number:
                super().take(bucket)

    def end_load(self):
        self.tensors = dict(self.source.weights()) | self.tensors
        return super().end_load()


class AllStale(PlainLinked):
    """Calls every tensor that comes over a link stale."""

    def stale(self, bucket):
        with self.opened(bucket) as opened:
            return [name for name, _ in opened.tensors]


class AnswersDropped(Advances):
    def advance(self, requests, dropped=(), seconds=0.0):
        return super().advance(requests)


class SeedByName(Advances):
    """The seed is the name of the request."""

    def advance(self, requests, dropped=(), seconds=0.0):
        seeded = {name: replace(request, seed=name) for name, request in requests.items()}
        return super().advance(seeded, dropped)


class KnowsBase(PlainGenerator):
    """Samples from the base too."""

    capabilities = PlainGenerator.capabilities | {"base"}

    def sample(self, n, request):
        if not request.base:
            return super().sample(n, request)
        self.source.use_view("base")
        turn = super().sample(n, request)
        self.source.use_view("live")
        return turn


class IgnoresBase(KnowsBase):
    def sample(self, n, request):
        return super().sample(n, replace(request, base=False))


class StaysAtBase(KnowsBase):
    """Does not go back to the policy's weights."""

    def sample(self, n, request):
        turn = super().sample(n, request)
        if request.base:
            self.source.use_view("base")
        return turn


def suite(cls):
    return type("Broken", (GeneratorContract,), {"generator": cls, "registered": False})()


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (IgnoresTemperature, "test_logprobs", "temperature 0.7: log-probs differ from the reference"),
        (UntruncatedLogprobs, "test_truncated_sampling", "log-probs differ"),
        (GlobalSeed, "test_seeds", "use the request's seed"),
        (GlobalSeed, "test_source_untouched", "global random state"),
        (SeedByPosition, "test_neighbours", "function of its own tokens"),
        (OneSeed, "test_seeds", "different seeds are equal"),
        (SamplesCold, "test_distribution", "do not follow the softmax"),
        (DropsEos, "test_stops", "belongs to the turn"),
        (SaysLength, "test_stops", "must finish as 'stop', got 'length'"),
        (SharesBudget, "test_budgets", "max_new_tokens = 5 gives 1"),
        (SwitchesMode, "test_source_untouched", "train / eval modes"),
        (CopiesOnce, "test_new_weights", "after new weights"),
        (Duplicates, "test_turns", "must be answered once"),
        (CannotPack, "test_packed_attention", r"call it inside rlhf_modeling.attention.packed\(lens\)"),
        (NotGreedy, "test_greedy", "not the most likely"),
        (IgnoresTopK, "test_truncated_sampling", "which it excludes"),
        (AnswersDropped, "test_advance", "expected each of .* once"),
        (SeedByName, "test_advance", r"by advance\(\) and .* by generate\(\)"),
        (HeaderForBucket, "test_links", "after a load over a link: .*log-probs differ"),
        (DropsABucket, "test_links", "fingerprints must be equal"),
        (IgnoresBase, "test_base", "base = True: greedy log-probs differ by "),
        (StaysAtBase, "test_base", "changed the trainer's view"),
        (AllStale, "test_links", r"stale\(\) names \['model.embed_tokens.weight'"),
    ],
)
def test_broken_generator_fails_the_right_check(cls, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(cls), check)()


def test_a_generator_that_samples_from_the_base_passes():
    suite(KnowsBase).test_base()


def test_links_are_left_out_where_memory_cannot_be_shared(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SkipTest, match=r"needs Linux.*this is darwin"):
        suite(PlainLinked).test_links()


def test_a_generator_that_ignores_the_second_link_cannot_take_its_buckets(monkeypatch):
    monkeypatch.setattr(generator, "LINK_SECONDS", 1.0)
    with pytest.raises(SyncError, match=r"waiting for a rank of the trainer on cpu took longer than 1 s"):
        suite(FirstLinkOnly).test_links()
