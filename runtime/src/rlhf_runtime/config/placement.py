"""The run file's ``[placement]`` as one checked place per role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf.errors import ConfigError, did_you_mean
from rlhf.interfaces.launcher import GENERATOR, Place

from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.config.sections import PlacementSection


def placement(sections: Mapping[str, PlacementSection], roles: Sequence[str], generator: bool) -> dict[str, Place]:
    """A place for every role of the run, and for the generator if there is one.

    Raises ConfigError that lists every section that names, or shares with, a role that the run does not have, shares in
    a chain or a circle, or assigns devices twice.
    """
    parts = [*roles, GENERATOR] if generator else list(roles)
    problems = []
    for name, section in sections.items():
        label = f"[placement.{name}]"
        if name not in parts:
            problems.append(
                f"{label}: this run has only {', '.join(parts)}.{did_you_mean(name, parts)} Remove the section."
            )
        elif section.share is not None and (problem := _sharing_problem(sections, name, section.share, parts)):
            problems.append(f"{label}{problem}")
    raise_problems("the placement does not work", problems)
    settings = {name: sections.get(name, PlacementSection()) for name in parts}
    return {name: Place(ranks_of(sections, name), s.devices, s.share) for name, s in settings.items()}


def _sharing_problem(sections: Mapping[str, PlacementSection], name: str, share: str, parts: Sequence[str]) -> str:
    """Why ``name`` cannot use the devices of ``share``; empty if it can."""
    section, host = sections[name], sections.get(share, PlacementSection())
    if share == name or share not in parts:
        return (
            f" shares the devices of {share!r}; it can only share those of {', '.join(h for h in parts if h != name)}."
        )
    if host.share is not None:
        return f" shares with {share!r}, which shares with {host.share!r}: name {host.share!r} itself in both."
    # Not whether it was set: the config.toml of a run has the default of every field.
    if section.devices != PlacementSection().devices and name != GENERATOR:
        return f": it uses the devices of {share!r}; set only one of share and devices."
    ranks, host_ranks = ranks_of(sections, name), host.ranks or 1
    if ranks * section.devices <= host_ranks * host.devices:
        return ""
    return (
        f": {ranks} ranks x {section.devices} devices do not fit on the {host_ranks} ranks x {host.devices} devices = "
        f"{host_ranks * host.devices} of {share!r}. Lower its ranks or devices, or raise those of {share!r}."
    )


def ranks_of(sections: Mapping[str, PlacementSection], name: str) -> int:
    """The ranks of a role, or the number of engines. If they are not set: 1, or the number of the role whose devices it
    shares, limited to the number that fits, so that no rank's devices are idle."""
    section = sections.get(name, PlacementSection())
    if section.ranks is not None or section.share is None:
        return section.ranks or 1
    host = sections.get(section.share, PlacementSection())
    ranks = host.ranks or 1
    return max(1, min(ranks, ranks * host.devices // section.devices)) if name == GENERATOR else ranks


def divided(place: Place, generator: str, parallel: tuple[int, int]) -> Place:
    """The place of the engines, with one worker for each part of an engine.

    Args:
        generator: name of the generator, for messages.
        parallel: ``Generator.parallel_sizes``.

    Raises ConfigError if an engine has fewer devices than workers. The launcher checks engines with more devices
    (:func:`rlhf.interfaces.launcher.check_workers`).
    """
    tensor, pipeline = parallel
    if tensor * pipeline > place.devices:
        raise ConfigError(
            f"[placement.generator]: generator {generator!r} divides an engine over tensor_parallel x "
            f"pipeline_parallel = {tensor} x {pipeline} = {tensor * pipeline} workers, each on its own GPU, or on its "
            f"own CPU core if there are no GPUs; an engine has devices = {place.devices}. Set "
            f"placement.generator.devices = {tensor * pipeline}, or lower the generator's parallel sizes."
        )
    return replace(place, workers=tensor * pipeline)


def neighbours(places: Mapping[str, Place], name: str) -> list[str]:
    """The other roles on the devices of ``name``, and the generator if it is there."""
    home = places[name].share or name
    return [other for other, place in places.items() if other != name and (place.share or other) == home]
