"""The loss and the advantage of every algorithm where a run file names none: the numbers of runs depend on them."""

from __future__ import annotations

from rlhf.plugins import Plugins
from rlhf_runtime.config.components import build_algorithm
from rlhf_runtime.config.sections import Choice

from tests.members import PLUGINS

CLIPPED = ("ppo", {"clip_low": 0.2, "clip_high": 0.2})
VALUE = ("value", {})
WITHOUT_LENGTHS = {"aggregation": "seq_sum_constant", "max_length": 256}
PARTS = {
    "ppo": {
        "advantage": ("gae", {"gamma": 1.0, "lam": 1.0}),
        "loss": CLIPPED,
        "value_loss": ("value", {"clip": 0.5}),
    },
    "reinforce_pp": {"advantage": ("reinforce", {}), "loss": CLIPPED, "value_loss": VALUE},
    "reinforce_pp_baseline": {"advantage": ("reinforce_baseline", {}), "loss": CLIPPED, "value_loss": VALUE},
    "flash_reinforce": {
        "advantage": ("batch_mean", {}),
        "loss": ("ppo", {"aggregation": "seq_mean_token_mean", "correction": {"preset": "flash_reinforce"}}),
        "value_loss": VALUE,
    },
    "grpo": {"advantage": ("group_norm", {"std": "group"}), "loss": CLIPPED, "value_loss": VALUE},
    "dapo": {
        "advantage": ("group_norm", {"std": "group"}),
        "loss": ("ppo", {"clip_low": 0.2, "clip_high": 0.28}),
        "value_loss": VALUE,
    },
    "dr_grpo": {
        "advantage": ("dr_grpo", {}),
        "loss": ("ppo", {**CLIPPED[1], **WITHOUT_LENGTHS}),
        "value_loss": VALUE,
    },
    "luffy": {"advantage": ("group_norm", {"std": "group"}), "loss": ("luffy", {}), "value_loss": VALUE},
    "rloo": {"advantage": ("rloo", {}), "loss": CLIPPED, "value_loss": VALUE},
    "rejection_sampling": {"loss": ("nll", {})},
    "per_source": {},
    "sft": {"loss": ("nll", {})},
    "distill": {"loss": ("distill", {})},
    "distill_on_policy": {"loss": ("distill", {"divergence": "reverse_kl", "alpha": 1.0})},
    "dpo": {"loss": ("dpo", {})},
    "online_dpo": {"loss": ("dpo", {})},
    "cpo": {"loss": ("cpo", {})},
    "orpo": {"loss": ("orpo", {})},
    "simpo": {"loss": ("simpo", {})},
    "kto": {"loss": ("kto", {})},
    "kto_pair": {"loss": ("kto", {})},
    "reward_model": {"loss": ("pairwise", {})},
    "prm": {"loss": ("step_labels", {})},
}
"""{algorithm: {slot: (plugin, options)}}."""


def test_every_algorithm_has_its_default_parts():
    plugins, names = (
        Plugins.discover(),
        [name for member in PLUGINS for kind, name, _ in member.entry_points if kind == "algorithm"],
    )
    slots = {name: plugins.resolve("algorithm", name).cls.slots for name in names}
    assert {
        n: {s: (slot.use, dict(slot.defaults)) for s, slot in members.items()} for n, members in slots.items()
    } == PARTS


def test_dr_grpo_of_openrlhf_takes_the_mean_over_tokens():
    """As the README of the plugin says: grpo with the advantage of dr_grpo."""
    chosen = Choice(use="grpo", options={"advantage": "dr_grpo", "preset": "openrlhf"})
    algorithm = build_algorithm(Plugins.discover(), chosen)
    assert (algorithm.parts["advantage"].name, algorithm.parts["loss"].name) == ("dr_grpo", "ppo")
    assert algorithm.parts["loss"].reduce()["policy"].method == "token_mean"
