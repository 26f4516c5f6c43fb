"""Checks of ``[stream]`` before anything starts: a part of :mod:`rlhf_runtime.config.validation`."""

from __future__ import annotations

from rlhf.interfaces import GENERATOR, Generator, Launcher

from rlhf_runtime.config.runfile import RunFile

ANSWERS = "answers"
"""Capability of launchers and generators: single requests are answered while other work goes on."""

KEEPS_KEYS = "keep:keys"
"""Capability of generators: ``GeneratorSpec.keys``."""


def stream_problems(run: RunFile, launcher: type[Launcher] | None, generator: type[Generator] | None) -> list[str]:
    """Problems of the options by which batches are made."""
    section = run.stream
    problems: list[str] = []
    if section.replay is not None:  # the other options say how the recorded samples were drawn
        return problems
    if section.mode == "waves":
        if section.order != "submission":
            problems.append(
                f"stream.order = {section.order!r}: batches that are generated whole are in submission order. Remove "
                "it, or set --stream.mode continuous."
            )
        if section.oversample is not None:
            problems.append(
                f"stream.oversample = {section.oversample:g}: batches are generated whole, with nothing beside them. "
                "Remove it, or set --stream.mode continuous."
            )
        if run.sync.in_flight != "continue":
            problems.append(
                f"sync.in_flight = {run.sync.in_flight!r}: no answer is unfinished when weights are sent. Remove it, "
                "or set --stream.mode continuous."
            )
        if run.sync.keys != "recompute":
            problems.append(
                f"sync.keys = {run.sync.keys!r}: no answer is unfinished when weights are sent. Remove it, or set "
                "--stream.mode continuous."
            )
        return problems
    if run.sync.keys == "keep" and run.sync.in_flight != "continue":
        problems.append(
            f"sync.keys = 'keep': with sync.in_flight = {run.sync.in_flight!r} no answer goes on with new weights. "
            "Remove one of them."
        )
    elif run.sync.keys == "keep" and generator is not None and KEEPS_KEYS not in generator.capabilities:
        problems.append(
            f"sync.keys = 'keep': generator {generator.name!r} keeps no keys and values when it gets new weights. "
            "Remove it, or use another --generator.use."
        )
    if launcher is not None and ANSWERS not in launcher.capabilities:
        problems.append(
            f"stream.mode = 'continuous': launcher {launcher.name!r} generates and trains in turns, so samples cannot "
            f"go on while the policy learns. Remove it, or use a launcher with the capability {ANSWERS!r}: "
            "`rlhf plugins list launcher`, `rlhf plugins show NAME`."
        )
    elif generator is not None and ANSWERS not in generator.capabilities:
        problems.append(
            f"stream.mode = 'continuous': generator {generator.name!r} answers no single requests. Remove it, or use "
            "another --generator.use."
        )
    if section.round > 1:
        problems.append(
            f"stream.round = {section.round} generates whole rounds before the first of their steps, and stream.mode = "
            "'continuous' generates all the time. Remove one of them; --stream.staleness allows older samples."
        )
    if section.oversample is not None and section.oversample > section.staleness + 1:
        problems.append(
            f"stream.oversample = {section.oversample:g}: with stream.staleness = {section.staleness} at most "
            f"{section.staleness + 1} batches may be started. Lower it, or raise --stream.staleness."
        )
    shared = run.placement.get(GENERATOR)
    if shared is not None and shared.share is not None:
        problems.append(
            f"stream.mode = 'continuous': [placement.generator] shares the devices of {shared.share!r}, which learns "
            "while samples are generated. Give the engines devices of their own, or remove stream.mode."
        )
    return problems
