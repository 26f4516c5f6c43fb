"""One step and five steps of the same recorded rollouts, wherever the models live."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from rlhf.config import load
from rlhf.controller.answering import answering, training_settings
from rlhf.controller.build import launch_roles
from rlhf.controller.prepare import Prepared, prepare
from rlhf.controller.roles import Role
from rlhf.controller.stream import Stream
from rlhf.ops.batch import Batch
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from torch import Tensor

from tests.runs import Workshop


def first_gradients(shop: Workshop, algo: str, output: str, **changes: Any) -> dict[str, dict[str, Tensor]]:
    """{role: {parameter: gradient}} of the first optimizer step that a run would make, nothing updated."""
    file = shop.arguments(shop.config(algo, output, **changes))[1]
    prepared = prepare(load(file), Plugins.discover())
    with ExitStack() as closing:
        launcher = prepared.parts["launcher"].build()
        closing.callback(launcher.shutdown)
        roles = launch_roles(prepared, launcher)
        batch = _batch(prepared, roles, launcher, closing)
        algorithm = prepared.algorithm
        for annotation in algorithm.annotations(0):
            batch = roles[annotation.role].annotate(batch, [annotation])
        batch, _ = algorithm.credit(batch)
        found = {}
        for update in algorithm.updates(0):
            loss = algorithm.parts[update.loss]
            found[update.role] = roles[update.role].gradients(weigh(loss.prepare(batch), loss.reduce()), loss, update)
        return found


def _batch(prepared: Prepared, roles: Mapping[str, Role], launcher: Any, closing: ExitStack) -> Batch:
    config, data = prepared.config, prepared.data
    if not prepared.online:
        batch = prepared.algorithm.assemble(data.examples(data.take(config.data.batch_size)))
        assert batch is not None
        return batch
    answers = answering(prepared, roles, launcher, print)
    for closer in reversed(answers.closers):
        closing.callback(closer)
    stream = Stream(
        data, answers.rollouts, training_settings(config), batch_size=config.data.batch_size,
        total_steps=prepared.total_steps, staleness=0, filter=None, on_failed_sample="abort", group_min=1,
    )  # fmt: skip
    answers.sync.push(0)
    stream.start(0)
    batch = prepared.algorithm.assemble(stream.take(0).groups)
    assert batch is not None
    return batch


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all parameters together."""
    assert ours.keys() == theirs.keys()
    difference = torch.stack([(ours[n].double() - theirs[n].double()).norm() for n in theirs]).norm()
    return float(difference / torch.stack([t.double().norm() for t in theirs.values()]).norm())
