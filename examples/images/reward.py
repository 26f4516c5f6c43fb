"""1 for the right colour, else 0."""


async def score(prompt, completion, row):
    return float(completion.strip() == row["answer"])
