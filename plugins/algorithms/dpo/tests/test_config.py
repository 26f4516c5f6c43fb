"""Options: what is refused, and what each message says."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from rlhf.errors import ConfigError
from rlhf_plugin_dpo import DPO, DPOLoss, OnlineDPO

REFUSED = {
    "no type": ({"loss_type": ()}, "at least one loss type"),
    "twice the same": ({"loss_type": ("ipo", "ipo")}, "each only once"),
    "unknown": ({"loss_type": "kto"}, "sigmoid"),
    "too few weights": ({"loss_type": ("ipo", "sft"), "loss_weights": (1.0,)}, "one number for each of"),
    "exo_pair unsmoothed": ({"loss_type": "exo_pair"}, "label_smoothing above 0"),
    "label_smoothing unread": (
        {"loss_type": "ipo", "label_smoothing": 0.1},
        "label_smoothing = 0.1 is read by sigmoid",
    ),
    "label_smoothing of a half": ({"label_smoothing": 0.5}, "less than 0.5"),
    "ipo unread": ({"ipo": "sum"}, "ipo = 'sum' is read by ipo only"),
    "tau unread": ({"discopop_tau": 0.1}, "discopop_tau = 0.1 is read by discopop only"),
    "tau above 1": ({"loss_type": "discopop", "discopop_tau": 2.0}, "less than or equal to 1"),
    "shift unread": ({"bco_shift": "running"}, "bco_shift = 'running' is read by bco_pair only"),
    "divergence": ({"loss_type": ("sigmoid", "aot"), "f_divergence": "forward_kl"}, "aot need reverse_kl"),
    "divergence from nothing": (
        {"f_divergence": "forward_kl", "reference_free": True},
        "cancels only in the margin of reverse_kl",
    ),
    "alpha unread": ({"f_alpha": 0.2}, "alpha_divergence"),
    "wpo of no pair": ({"loss_type": ("sft", "ipo"), "wpo": True}, "sft has no value for a single pair"),
    "wpo of ranks": ({"loss_type": "aot", "wpo": True}, "aot has no value for a single pair"),
    "ld_alpha unread": ({"loss_type": "sft", "ld_alpha": 0.5}, "which sft does not read"),
    "ld_alpha above 1": ({"ld_alpha": 1.5}, "less than or equal to 1"),
    "beta of 0": ({"beta": 0.0}, "greater than 0"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        DPOLoss.Config(**options)


def test_types_with_their_weights():
    assert DPOLoss.Config().types == {"sigmoid": 1.0}
    assert DPOLoss.Config(loss_type=("sigmoid", "sft")).types == {"sigmoid": 1.0, "sft": 1.0}
    mpo = DPOLoss.Config(loss_type=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0))
    assert mpo.types == {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}


@pytest.mark.parametrize("algorithm", [DPO, OnlineDPO])
def test_no_reference_where_the_loss_reads_none(algorithm):
    def build(**options):
        return algorithm(algorithm.Config(), {"loss": DPOLoss(DPOLoss.Config(**options))})

    assert [r.name for r in build().needs().roles] == ["policy", "reference"]
    assert [a.column for a in build().annotations(0)] == ["ref_logprobs"]
    assert [r.name for r in build(reference_free=True).needs().roles] == ["policy"]
    assert build(reference_free=True).annotations(0) == []


@pytest.mark.parametrize("algorithm", [DPO, OnlineDPO])
def test_a_snapshot_needs_a_reference(algorithm):
    loss = DPOLoss(DPOLoss.Config(reference_free=True))
    with pytest.raises(ConfigError, match=r"algorithm\.snapshot_every = 2 copies the policy to the reference, which"):
        algorithm(algorithm.Config(snapshot_every=2), {"loss": loss})
    with pytest.raises(ValidationError, match=r"snapshot_share = 0\.5 is used every snapshot_every steps"):
        algorithm.Config(snapshot_share=0.5)
    with pytest.raises(ValidationError, match="greater than 0"):
        algorithm.Config(snapshot_every=2, snapshot_share=0)
