"""The benchmarks' reward as ours loads it (`file:ours_reward.py:score`). `async`: like TRL's it is called in the
training process, which has the settings."""

from settings import reward


async def score(prompt, completion, row):
    return reward(prompt, completion)
