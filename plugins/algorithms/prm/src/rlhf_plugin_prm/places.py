"""Find the tokens at which the steps of a trajectory end."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf.steps import StepEnds
from rlhf.types import Image, Trajectory
from rlhf.types.images import joined_images


@dataclass(slots=True)
class Context:
    """One context of a trajectory, up to the turn that rewrites it, and the steps in it."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Positions in ``ids`` of the tokens that end a step."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """The same tokens as (turn, token in turn)."""
    images: tuple[Image, ...] = ()


def contexts(trajectory: Trajectory, ends: StepEnds) -> list[Context]:
    """The contexts, in order. A turn that rewrites the context (``fresh``) starts a new one.

    Steps are found in sampled turns only, in each turn separately, because only the policy's own text gets credit. A
    token that ends two steps appears once.
    """
    all_contexts: list[Context] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.fresh or not all_contexts:
            all_contexts.append(Context())
        context = all_contexts[-1]
        if turn.sampled:
            for token in dict.fromkeys(ends(turn.ids)):
                context.positions.append(len(context.ids) + token)
                context.places.append((number, token))
        context.images += tuple(image.moved(len(context.ids)) for image in turn.images)
        context.ids += turn.ids
    return all_contexts


def last_token(trajectory: Trajectory) -> list[Context]:
    """The context with the last sampled token, as if a single step ended there; empty if nothing was sampled."""
    sampled = [n for n, turn in enumerate(trajectory.turns) if turn.sampled and turn.ids]
    if not sampled:
        return []
    last = sampled[-1]
    start = max((n for n, turn in enumerate(trajectory.turns[: last + 1]) if turn.fresh), default=0)
    turns = trajectory.turns[start : last + 1]
    ids = [i for turn in turns for i in turn.ids]
    images = joined_images((len(turn.ids), turn.images) for turn in turns)
    return [Context(ids, [len(ids) - 1], [(last, len(trajectory.turns[last].ids) - 1)], images)]
