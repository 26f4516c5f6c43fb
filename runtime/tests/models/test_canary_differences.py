"""The form of a generator's proof, and how far canaries' log-probs are apart: the mean of each, and the median of all
if a side computes in bf16."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from rlhf.errors import PluginInvalid
from rlhf.interfaces import Proof
from rlhf_runtime.models.weight_sync import Canary, canary_differences, check_answers, proofs_of


@pytest.mark.parametrize(
    ("differences", "bf16", "values"),
    [
        ([4.0, 0.0, 0.5, 0.1, 0.4], False, [0.0, 1.0]),
        ([4.0, 0.0, 0.5, 0.1, 0.4], True, [0.1, 0.1]),  # the lower one of the two in the middle of six tokens
        ([math.inf, 0.0, 0.0, 0.0, 0.0], False, [0.0, math.nan]),
        ([math.nan, 0.0, 0.0, 0.0, 0.0], True, [math.nan, math.nan]),
    ],
)
def test_rounding_of_single_tokens_counts_in_fp32_only_and_what_is_not_finite_always(differences, bf16, values):
    canaries = [Canary([3, 4]), Canary([0, 1, 2, 3, 4, 5])]
    ours_N = torch.arange(8.0)  # 0 and 1, then 2 to 7; a canary's first token has no log-prob
    right, other = [1.0], [3.0 + differences[0], *(float(4 + i) - x for i, x in enumerate(differences[1:]))]
    engines = [[right, [3.0, 4.0, 5.0, 6.0, 7.0]], [right, other]]
    assert canary_differences(canaries, ours_N, engines, bf16) == pytest.approx(values, nan_ok=True)


def test_a_canary_with_an_image_is_compared_by_itself_in_bf16():
    canaries = [Canary([3, 4]), Canary([0, 1], ("an image",)), Canary([3, 4])]
    engines = [[[1.0], [5.0], [5.5]]]
    assert canary_differences(canaries, torch.arange(6.0), engines, True) == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("proofs", [[], None, Proof(1), ["proof"]])
def test_a_load_without_a_proof_is_refused(proofs) -> None:
    """With an empty list only the canaries would be compared, and neither version nor fingerprints."""
    assert proofs_of(SimpleNamespace(name="mine", end_load=lambda: (Proof(1),))) == [Proof(1)]
    with pytest.raises(PluginInvalid, match=r"end_load\(\) of generator 'mine' returned .*; allowed: a list with one"):
        proofs_of(SimpleNamespace(name="mine", end_load=lambda: proofs))


@pytest.mark.parametrize("answers", [[], None, [[-1.0, -2.0], [-3.0]], [[[-1.0, -2.0]]], [[[-1.0] * 3, [-3.0] * 2]]])
def test_log_probs_of_canaries_in_another_form_are_refused(answers) -> None:
    generator, canaries = SimpleNamespace(name="mine"), [Canary([1, 2, 3]), Canary([4, 5])]
    check_answers(generator, [[[-1.0, -2.0], [-3.0]]] * 2, canaries)
    with pytest.raises(PluginInvalid, match=r"logprobs\(\) of generator 'mine' .*\[engine\]\[sequence\]\[token - 1\]"):
        check_answers(generator, answers, canaries)
