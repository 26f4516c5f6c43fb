"""A curriculum is refused in a run that cannot give it what it reads, or that reads none of what it decides."""

from __future__ import annotations

import pytest
from rlhf.interfaces import Curriculum
from rlhf_runtime.checks import sections

from runtime.tests.checks.stub_run import StubAlgorithm, stub_run

BASE = [("algorithm", "x"), ("policy.model", "m"), ("data.train", "a.jsonl"), ("reward", "math")]


class Sampling(StubAlgorithm):
    name = "sampling"


class Given(Sampling):
    name = "given"
    data = "pairs"


class Blind(Curriculum):
    name = "blind"

    def setup(self, rows, seed, total_steps):
        pass

    def choose(self, n, step):
        return range(n)


class Comparing(Blind):
    name = "comparing"
    min_scores = 2


class Mixing(Blind):
    name = "mixing"
    reads_probabilities = True


SHARES = [("data.train.0.probability", "1.0")]


def problems(flags=(), algorithm=Sampling, curriculum=Blind, scored=True, base=BASE):
    return sections.curriculum(stub_run([*base, *flags], algorithm(), curriculum=curriculum, scored=scored))


def test_what_fits_passes():
    assert problems() == problems(algorithm=Given) == problems(SHARES, curriculum=Mixing) == []
    assert problems([("sampling.samples_per_prompt", "2")], curriculum=Comparing) == []
    assert problems([("env", "game"), ("sampling.samples_per_prompt", "2")], curriculum=Comparing, base=BASE[:3]) == []
    assert problems(base=BASE[:3]) == [], "it reads no scores"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"curriculum": Comparing, "algorithm": Given}, "given learns from pairs and samples nothing in training"),
        (
            {"curriculum": Comparing, "base": BASE[:3]},
            "chooses rows by the scores of answers, but nothing scores the answers",
        ),
        ({"curriculum": Comparing}, "got sampling.samples_per_prompt = 1; set --sampling.samples_per_prompt 2 or more"),
        ({"flags": [("data.shuffle", "false")]}, "data.shuffle = false: curriculum 'blind' decides the order"),
        ({"flags": SHARES}, "probabilities are set, but curriculum 'blind' does not read them"),
    ],
)
def test_what_does_not_fit_is_refused(options, says):
    (problem,) = problems(**options)
    assert says in problem
    assert problem.startswith(("curriculum '", "data."))
