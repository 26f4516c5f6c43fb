"""Observers that get the names of TRL."""

from rlhf_runtime.observe.trl_names import TRL_NAMES, TRL_NAMES_OF_SCORES, trl_names


def test_a_line_of_an_algorithm_that_samples():
    line = {
        "reward/mean": 1.0, "reward/math/mean": 2.0, "reward/a/b/std": 3.0, "policy/loss": 4.0, "length/truncated": 0.5,
        "stream/prompts": 8.0, "reward/math/info/k": 6.0, "eval/reward": 7.0, "eval/loss": 9.0, "eval/math/loss": 1.5,
        "policy/token_accuracy": 0.25, "eval/token_accuracy": 0.5,
    }  # fmt: skip
    assert trl_names(line) == {
        "train/reward": 1.0, "train/rewards/math/mean": 2.0, "train/rewards/a/b/std": 3.0, "train/loss": 4.0,
        "train/completions/clipped_ratio": 0.5, "stream/prompts": 8.0, "reward/math/info/k": 6.0, "eval/reward": 7.0,
        "eval/loss": 9.0, "eval/math/loss": 1.5, "train/mean_token_accuracy": 0.25, "eval/mean_token_accuracy": 0.5,
    }  # fmt: skip


def test_the_accuracy_of_pairs_and_of_a_reward_model_have_different_names():
    assert trl_names({"policy/accuracy": 1.0, "eval/accuracy": 0.5, "policy/margin": 2.0}) == {
        "train/rewards/accuracies": 1.0,
        "eval/rewards/accuracies": 0.5,
        "policy/margin": 2.0,
    }
    assert trl_names(
        {"policy/accuracy": 1.0, "eval/accuracy": 0.5, "policy/margin": 2.0, "policy/score_mean": 3.0}
    ) == {
        "train/accuracy": 1.0,
        "eval/accuracy": 0.5,
        "train/margin": 2.0,
        "train/mean_reward": 3.0,
    }


def test_names_that_share_one_of_trls_are_of_different_algorithms():
    shared = [name for name in TRL_NAMES if list(TRL_NAMES.values()).count(TRL_NAMES[name]) > 1]
    assert {n.replace("chosen", "desirable").replace("rejected", "undesirable") for n in shared if "kl" not in n} == {
        f"policy/{prefix}desirable_{measure}" for prefix in ("", "un") for measure in ("reward", "logprobs")
    }
    assert {n for n in shared if "kl" in n} == {"policy/kl_reference", "policy/kl", "kl/reference"}
    assert set(TRL_NAMES_OF_SCORES) - set(TRL_NAMES) == {"policy/margin", "policy/score_mean"}
