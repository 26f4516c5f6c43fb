"""Calls of the methods of algorithms, losses and rewards. An error names the method, its owner and what it must
return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf.errors import PluginInvalid, TrainingError, boundary, brief
from rlhf.interfaces import Algorithm, Loss, Reward
from rlhf.ops.batch import Batch
from rlhf.types import Annotation, Group, Head, Needs, RoleSpec, Snapshot, Update
from rlhf.types.examples import Example

ITEMS: Mapping[str, tuple[tuple[type[Any], ...], str]] = {
    "annotations": ((Annotation,), "a list of Annotations, [] for none"),
    "updates": ((Update, Snapshot), "a list of Updates and Snapshots"),
    "conflicts": ((str,), "a list of sentences, [] for none"),
    "columns": ((str,), "a list of names of columns, [] for none"),
    "outputs": ((str, Head), 'a tuple of names and Heads, even of one name: ("logprobs",)'),
    "prepass": ((Annotation,), "a tuple of Annotations, () for none"),
    "roles": ((RoleSpec,), "a tuple of RoleSpecs, () for none"),
}
"""{method that returns a list: (types of its items, what it returns)}."""


def ask(plugin: Algorithm | Loss | Reward, method: str, *arguments: Any) -> list[Any]:
    """The list that a method of :data:`ITEMS` returns. Raises TrainingError or PluginInvalid."""
    owner = "loss" if isinstance(plugin, Loss) else "reward" if isinstance(plugin, Reward) else "algorithm"
    label, (kinds, form) = f"{method}() of {owner} {plugin.name!r}", ITEMS[method]
    with boundary(TrainingError, label):
        value = getattr(plugin, method)(*arguments)
        # A generator raises here; a string would be read letter by letter.
        items = [*value] if isinstance(value, Iterable) and not isinstance(value, str) else None
    if items is None or not all(isinstance(item, kinds) for item in items):
        raise PluginInvalid(f"{label} returned {brief(value)}; allowed: {form}")
    return items


def metrics_of(label: str, metrics: object) -> dict[str, float]:
    """The metrics that a plugin returned. Raises PluginInvalid if they are not a mapping.

    Args:
        label: the method and its owner: ``finish() of algorithm 'x'``.
    """
    if not isinstance(metrics, Mapping):
        raise PluginInvalid(
            f"{label} returned {brief(metrics)}; allowed: metrics, a dictionary ({{}} if there are none)"
        )
    return dict(metrics)


def needs_of(algorithm: Algorithm) -> Needs:
    """What an algorithm that trains needs. Raises PluginInvalid if it does not declare roles, the policy among them."""
    label = f"needs() of algorithm {algorithm.name!r}"
    with boundary(PluginInvalid, label):
        needs: object = algorithm.needs()
    declared = needs.roles if isinstance(needs, Needs) else None
    if not isinstance(needs, Needs) or not isinstance(declared, list | tuple):
        raise PluginInvalid(
            f'{label} returned {brief(needs)}; allowed: Needs(roles=(RoleSpec("policy", trained=True),))'
        )
    if "policy" not in [role.name for role in declared if isinstance(role, RoleSpec)]:
        raise PluginInvalid(f'{label} declares no role "policy"; add RoleSpec("policy", trained=True) to its roles')
    return needs


def assemble(
    algorithm: Algorithm, examples: Sequence[Group] | Sequence[Example]
) -> tuple[Batch | None, dict[str, float]]:
    """What ``algorithm.assemble(examples)`` returns. Raises PluginInvalid if that is not (batch or None, metrics)."""
    match algorithm.assemble(examples):
        case (Batch() | None as batch, Mapping() as metrics):
            _require_images(algorithm, examples, batch)
            return batch, dict(metrics)
        case other:
            raise PluginInvalid(
                f"assemble() of algorithm {algorithm.name!r} returned {brief(other)}. It must return a tuple of two: "
                "the batch, None if there is nothing to learn from, and a dictionary of metrics. Without metrics write "
                "`return batch, {}`."
            )


def _require_images(algorithm: Algorithm, examples: Sequence[Group] | Sequence[Example], batch: Batch | None) -> None:
    """Refuse a batch that lacks images of its examples. A model would read the placeholder tokens of images as
    words."""
    rows = [e for e in examples if isinstance(e, Example)]
    if batch is not None and not batch.images_B and rows and all(s.images for e in rows for s in e.sequences):
        raise PluginInvalid(
            f"assemble() of algorithm {algorithm.name!r} left out the images of its examples. Pass Sequence.images on: "
            "SequenceData(s.ids, {...}, s.role, s.images)."
        )
