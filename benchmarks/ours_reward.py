"""The benchmarks' reward as ours loads it (`file:ours_reward.py:score`); a file stands alone, so the body is repeated
from settings.digits. `async`: like TRL's it is called in the training process."""


async def score(prompt, completion, row):
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
