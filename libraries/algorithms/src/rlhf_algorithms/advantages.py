"""Advantage estimators. ``rlhf_algorithms.pipeline`` does the rest (shaping, clipping, KL) and sets the order.

If rewards come only at the end and gamma = 1, every token of an answer gets the same credit. With step rewards, or KL
in the reward, credit differs from token to token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from rlhf.interfaces import Advantage, ComponentConfig
from rlhf.interfaces.advantage import Sources
from rlhf.ops.groups import group_center, group_mean, group_std, leave_one_out
from rlhf.ops.returns import gae, return_to_go
from torch import Tensor


class ReturnConfig(ComponentConfig):
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token."""


class WhitenConfig(ReturnConfig):
    normalise: Literal["none", "center", "whiten"] = "whiten"
    """Over all action tokens of the rollout batch: ``whiten`` (mean 0, variance 1), ``center`` (mean 0), ``none``."""


class ReturnToGo(Advantage):
    """Discounted return-to-go as advantage. Base class of all estimators here that have no critic."""

    Config: ClassVar[type[ComponentConfig]] = ReturnConfig

    def returns(
        self, R_NA: Tensor, mask_NA: Tensor, values_NA: Tensor | None, boot_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        G_NA = return_to_go(R_NA, mask_NA, self.config.gamma)
        return G_NA, G_NA


class GAEConfig(WhitenConfig):
    lam: float = Field(default=1.0, ge=0, le=1)
    """lambda: 1 = the return minus the value, 0 = one-step temporal difference. Below 1 a reward at the end reaches
    early tokens only through the critic."""


class GAE(Advantage):
    """Generalised advantage estimation over a critic's values, then whitening.

    Deviations: (1) The recursion runs over action tokens only: gamma and lambda do not apply at observation tokens.
    """

    name = "gae"
    source = "Schulman et al. 2016, High-dimensional continuous control using GAE, arXiv:1506.02438"
    Config = GAEConfig

    @property
    def needs_values(self) -> bool:
        return True

    def returns(
        self, R_NA: Tensor, mask_NA: Tensor, values_NA: Tensor | None, boot_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert values_NA is not None
        return gae(R_NA, values_NA, mask_NA, boot_N, self.config.gamma, self.config.lam)


class Reinforce(ReturnToGo):
    """Return-to-go without baseline, whitened over the batch; works with one sample per prompt."""

    name = "reinforce"
    source = "Hu 2025, REINFORCE++, arXiv:2501.03262"
    Config = WhitenConfig


class ReinforceBaseline(ReturnToGo):
    """Reward minus its group's mean, then return-to-go, whitened over the batch."""

    name = "reinforce_baseline"
    source = "Hu 2025, REINFORCE++ (-baseline), arXiv:2501.03262"
    Config = WhitenConfig
    group_min = 2

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        return group_center(r_N, group_N)


class LeaveOneOut(ReturnToGo):
    """Reward minus the mean of the other samples of the group."""

    name = "rloo"
    source = "Ahmadian et al. 2024, Back to basics, arXiv:2402.14740"
    group_min = 2

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        return leave_one_out(r_N, group_N)


class GroupNormConfig(ReturnConfig):
    std: Literal["group", "batch", "none"] = "group"
    """Divide by the unbiased standard deviation of the group's rewards, of the whole batch's, or not at all."""


class GroupNorm(ReturnToGo):
    """(r - mean of the group) / (std + 1e-9); equal rewards give exactly 0."""

    name = "group_norm"
    source = "Shao et al. 2024, DeepSeekMath, arXiv:2402.03300"
    Config = GroupNormConfig
    group_min = 2

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        centred_N = group_center(r_N, group_N)
        if self.config.std == "none":
            return centred_N
        # The mean is always the group's; only the scale may be the batch's.
        one_group_N = group_N if self.config.std == "group" else torch.zeros_like(group_N)
        return centred_N / (group_std(r_N, one_group_N) + 1e-9)


class GroupMean(ReturnToGo):
    """Reward minus the mean of the group, without dividing by the standard deviation: nearly solved prompts do not get
    a larger weight."""

    name = "dr_grpo"
    source = "Liu et al. 2025, Understanding R1-Zero-like training, arXiv:2503.20783"
    group_min = 2

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        return group_center(r_N, group_N)


class BatchMean(ReturnToGo):
    """Reward minus the mean over the whole rollout batch; works with one sample per prompt."""

    name = "batch_mean"
    source = "FlashREINFORCE 2026; flash_reinforce in OpenRLHF 0.11.2"
    over_batch = True

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        return group_center(r_N, torch.zeros_like(group_N))


class GDPO(ReturnToGo):
    """Standardise each reward within its group, then standardise the weighted sum over the rollout batch. A reward that
    varies more does not outweigh the others, and samples with different rewards but the same sum get different credit.

    Deviations: (1) A reward without a value for a sample counts as 0 for it. (2) Divisions are by std + 1e-9; equal
    values give exactly 0.
    """

    name = "gdpo"
    source = "GDPO 2026, arXiv:2601.05242"
    group_min = 2
    over_batch = True

    def baseline(self, r_N: Tensor, group_N: Tensor, sources: Sources | None = None) -> Tensor:
        sum_N = torch.zeros(r_N.shape, dtype=torch.float64)
        for weight, values_N in (sources or {"reward": (1.0, r_N)}).values():
            # NaN: the source gave no value, so the sample is in no statistic of this source.
            own_N = ~values_N.isnan()
            values, groups = values_N[own_N], group_N[own_N]
            sum_N[own_N] += weight * group_center(values, groups) / (group_std(values, groups) + 1e-9)
        one_group_N = torch.zeros_like(group_N)
        return group_center(sum_N, one_group_N) / (group_std(sum_N, one_group_N) + 1e-9)


class MaxRL(ReturnToGo):
    """(r - mean of the group) / mean of the group. For rewards of 0 and 1 this is the gradient of the log of the pass
    rate.

    Deviations: (1) Credit is 0 where the mean is not above 0, so rewards should be at least 0; the paper has rewards of
    0 and 1.
    """

    name = "max_rl"
    source = "MaxRL 2026, arXiv:2602.02710"
    group_min = 2

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        mean_N = group_mean(r_N, group_N)
        positive_N = mean_N > 0
        return torch.where(positive_N, group_center(r_N, group_N) / torch.where(positive_N, mean_N, 1.0), 0.0)


class OPO(ReturnToGo):
    """Reward minus the length-weighted mean of the group. This baseline has the least variance if the squared gradient
    of an answer grows with its length."""

    name = "opo"
    source = "Hao et al. 2025, On-policy RL with optimal reward baseline, arXiv:2505.23585"
    group_min = 2

    def baseline(self, r_N: Tensor, group_N: Tensor, own_tokens_N: Tensor | None = None) -> Tensor:
        centred_N = group_center(r_N, group_N)  # equal rewards stay exactly 0
        if own_tokens_N is None:
            return centred_N
        length_N = group_mean(own_tokens_N, group_N).clamp(min=1e-9)
        return centred_N - group_mean(centred_N * own_tokens_N, group_N) / length_N


class ReMax(ReturnToGo):
    """Reward minus the reward of the greedy answer to the same prompt. The greedy answer is sampled only for this
    baseline and is not trained on. Works with one sample per prompt.

    Deviations: (1) Several samples of a prompt share one greedy answer; the paper has one sample. (2) Shaping and KL
    change the reward of a sample, but not the reward of the greedy answer, as in verl. The baseline stays independent
    of the sample. (3) The paper has KL in the reward; here it is off unless ``kl.coef`` is set.
    """

    name = "remax"
    source = "Li et al. 2023, ReMax, arXiv:2310.10505 (algorithm 1)"

    def baseline(self, r_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        assert greedy_N is not None
        return r_N - greedy_N


class RAEConfig(ReturnConfig):
    decay: float = Field(default=0.95, gt=0, lt=1)
    """Weight of the mean before a sample's reward enters it."""
    by: tuple[str, ...] = ()
    """Data columns, such as the game, that select a sample's mean together with its source and the agent."""


class RAE(ReturnToGo):
    """Reward minus the running mean of its environment and player: b <- decay b + (1 - decay) r, A = r - b, sample by
    sample; b starts at 0. Checkpoints contain the means. Works with one sample per prompt.

    The environment is the source in ``data.train``, with the columns ``by``. If the policy plays several agents
    (:meth:`rlhf.interfaces.Env.agents`), the player is the agent. Each game then gives one trajectory per player, as in
    the paper.

    Deviations: (1) If the policy plays one agent, any other player is part of the environment. (2) The samples of a
    batch update the mean in the order of their prompts. (3) A is decay (r - b), with b before the update, as in the
    paper; prime-rl uses r - b, with b before the update.
    """

    name = "rae"
    source = "Liu et al. 2025, SPIRAL, arXiv:2506.24119 (eq. 2, algorithm 1)"
    Config = RAEConfig
    over_batch = True

    def __init__(self, config: ComponentConfig | None = None) -> None:
        super().__init__(config)
        self.means: dict[int, float] = {}

    def columns(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.config.by
        return names

    def baseline(
        self, r_N: Tensor, group_N: Tensor, key_N: Tensor | None = None, sample_N: Tensor | None = None
    ) -> Tensor:
        assert key_N is not None
        assert sample_N is not None
        return self._enter(dict(self.means), r_N, group_N, key_N, sample_N)

    def update_statistics(self, r_N: Tensor, group_N: Tensor, key_N: Tensor, sample_N: Tensor) -> None:
        self._enter(self.means, r_N, group_N, key_N, sample_N)

    def _enter(self, means: dict[int, float], r_N: Tensor, group_N: Tensor, key_N: Tensor, sample_N: Tensor) -> Tensor:
        """Update ``means`` by each reward in turn. Returns the rewards minus their means."""
        credit_N, decay = torch.zeros(r_N.shape, dtype=torch.float64), self.config.decay
        rows = zip(group_N.tolist(), sample_N.tolist(), key_N.tolist(), r_N.tolist(), range(len(r_N)), strict=True)
        for _, _, key, reward, i in sorted(rows):
            means[key] = decay * means.get(key, 0.0) + (1 - decay) * reward
            credit_N[i] = reward - means[key]
        return credit_N

    def state_dict(self) -> dict[str, Any]:
        return {"means": {str(key): mean for key, mean in self.means.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.means = {int(key): float(mean) for key, mean in state["means"].items()}


class GiGPOConfig(ComponentConfig):
    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per turn of the return that gives turns their credit."""
    step_weight: float = Field(default=1.0, gt=0)
    """omega: weight of the turn credit relative to the credit of the whole answer."""
    std: Literal["group", "none"] = "group"
    """Divide both by the unbiased standard deviation of their group, or not at all."""


class GiGPO(ReturnToGo):
    """A^E + omega A^S for each token of a turn. A^E is the group's advantage, as in ``group_norm``. A^S compares turns
    that the policy sampled in the same state: with R_t = sum over k >= t of gamma^(k - t) r_k, it is (R_t - mean) /
    (std + 1e-9) over all turns of the group that follow the same observation. Two actions in one state thus get
    different credit, although no state was deliberately sampled from twice. A state with one turn gives A^S = 0.

    Deviations: (1) Observations are one state if their texts and images are equal; verl-agent can also join similar
    ones. The observation must therefore describe the state completely. (2) Rewards that do not come from the
    environment (a reward source, shaping) count at the answer's last turn. ``reward_clip`` changes A^E only.
    """

    name = "gigpo"
    source = "Feng et al. 2025, Group-in-group policy optimization, arXiv:2505.10978 (eq. 8)"
    Config = GiGPOConfig
    group_min = 2

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        return self._normalised(r_N, group_N)

    def turn_credit(self, reward_M: Tensor, state_M: Tensor, trajectory_M: Tensor) -> Tensor:
        returns, trajectories = reward_M.tolist(), trajectory_M.tolist()
        for i in reversed(range(len(returns) - 1)):
            if trajectories[i] == trajectories[i + 1]:
                returns[i] += self.config.gamma * returns[i + 1]
        return self.config.step_weight * self._normalised(torch.tensor(returns, dtype=torch.float64), state_M)

    def returns(
        self, R_NA: Tensor, mask_NA: Tensor, values_NA: Tensor | None, boot_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        G_NA = return_to_go(R_NA, mask_NA, 1.0)
        return G_NA, G_NA

    def _normalised(self, values: Tensor, groups: Tensor) -> Tensor:
        centred = group_center(values, groups)
        return centred if self.config.std == "none" else centred / (group_std(values, groups) + 1e-9)


class PassAtKConfig(ReturnConfig):
    k: int = Field(default=2, ge=2)
    """Number of answers per prompt of which the best counts; at most ``sampling.samples_per_prompt``."""


class PassAtK(ReturnToGo):
    """Credit for the best of k answers: how much the answer adds to the best of k - 1 others, averaged over all subsets
    of the group's n answers, times n.

    For rewards of 0 and 1, the sum of the scores is the unbiased gradient of pass@k. For other rewards it is the
    unbiased gradient of the expected best of k. With g_j sorted from the lowest, s_i = sum over j < i of (g_i - g_j)
    C(j, k - 2) / C(n, k). The advantage is n s_i. It is at least 0, and 0 if all rewards are equal.
    """

    name = "pass_at_k"
    source = "Walder and Karkhanis 2025, Pass@k policy optimization, arXiv:2505.15201 (the estimator with the baseline)"
    Config = PassAtKConfig

    def __init__(self, config: ComponentConfig | None = None) -> None:
        super().__init__(config)
        # With fewer than k samples there is no subset of k, and no sample would get credit.
        self.group_min = self.config.k

    def baseline(self, r_N: Tensor, group_N: Tensor) -> Tensor:
        scores_N = torch.zeros(r_N.shape, dtype=torch.float64)
        for group in group_N.unique():
            members = (group_N == group).nonzero()[:, 0]
            scores_N[members] = best_of_k_scores(r_N[members].double(), self.config.k)
        return scores_N


def best_of_k_scores(r_G: Tensor, k: int) -> Tensor:
    """n times what each of n answers adds to the best of k - 1 others, float64 [n]; 0 for fewer than k answers."""
    n = r_G.numel()
    order = r_G.argsort(stable=True)
    sorted_G = r_G[order]
    subsets = max(math.comb(n, k), 1)
    # Divided as ints, because both may be too large for a float.
    weight_G = torch.tensor([n * math.comb(j, k - 2) / subsets for j in range(n)], dtype=torch.float64)
    # Sum of (g_i - g_j) over j < i; each counts once for every subset in which j is the best of k - 1 others.
    gains_GG = (sorted_G[:, None] - sorted_G[None, :]).tril(-1) * weight_G
    return torch.zeros_like(r_G).index_copy(0, order, gains_GG.sum(1))
