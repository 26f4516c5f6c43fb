"""Process reward models: the algorithm, its loss, and the reward."""

from rlhf import hookimpl


@hookimpl
def rlhf_register_algorithm() -> list[type]:
    from rlhf_plugin_prm.algorithm import ProcessRewardModel

    return [ProcessRewardModel]


@hookimpl
def rlhf_register_loss() -> list[type]:
    from rlhf_plugin_prm.step_labels import StepLabels

    return [StepLabels]


@hookimpl
def rlhf_register_reward() -> list[type]:
    from rlhf_plugin_prm.reward import ProcessReward

    return [ProcessReward]
