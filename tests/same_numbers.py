"""Trains on recorded batches on any backend. Returns the first gradients, and the losses of all steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rlhf.ops.batch import Batch
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf_runtime.checkpoint.saved_groups import read_groups
from rlhf_runtime.config.load import load
from rlhf_runtime.loop.learn import LearnReports, learn
from rlhf_runtime.models.roles import Role
from rlhf_runtime.setup.launch import launch_roles
from rlhf_runtime.setup.prepare import Prepared, prepare
from torch import Tensor

from tests.runs import Finished, Workshop, merged

Gradients = dict[str, dict[str, Tensor]]
"""{role: {parameter: gradient}}."""


@dataclass
class Learnt:
    """The results of one algorithm on one backend."""

    gradients: Gradients
    """Gradients of the first optimizer step."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each step."""


@dataclass(frozen=True)
class Case:
    """An algorithm, and further options of its run file."""

    algo: str
    changes: Mapping[str, Any] = field(default_factory=dict)


def prepared(shop: Workshop, case: Case, output: str, **runtime: Any) -> Prepared:
    """A run that could start, with fresh algorithm, data order and parts."""
    file = shop.arguments(shop.config(case.algo, output, **merged(case.changes, runtime)))[1]
    return prepare(load(file), Plugins.discover())


def learn_everywhere(
    shop: Workshop, cases: Mapping[str, Case], recorded: Mapping[str, Finished], folder: Path, **runtime: Any
) -> dict[str, Learnt]:
    """{case: results of training on its recorded run}, all with one set of models, which are restored before each case.

    The models are those of the case ``ppo``, with a critic and a reference. For a case that trains a scalar head, the
    critic takes the role of the policy.
    """
    with ExitStack() as closing:
        replay = {"use": "replay", "path": str(recorded["ppo"].path / "rollouts")}  # so that no generator is needed
        host = prepared(shop, cases["ppo"], "roles", rollout=replay, **runtime)
        launcher = host.parts["launcher"].build()
        closing.callback(launcher.shutdown)
        roles = launch_roles(host, launcher)
        for name, role in roles.items():
            (folder / name).mkdir(parents=True)
            role.every("save", folder / name)
        learnt = {}
        for label, case in cases.items():
            for name, role in roles.items():
                role.every("load", folder / name)
            run = prepared(shop, case, f"again {label}", run=runtime["run"])
            scalar = run.specs["policy"].role.head == "scalar"
            learners = {"policy": roles["critic"]} if scalar else roles
            learnt[label] = learn_recorded(run, learners, recorded[label])
        return learnt


def learn_recorded(run: Prepared, roles: Mapping[str, Role], first: Finished) -> Learnt:
    """Repeat the steps of the recorded run."""
    batches = recorded_batches(run, first)
    learnt = Learnt(first_gradients(run, roles, batches[0]))
    for step, batch in enumerate(batches):
        metrics = learn(batch, run.algorithm, roles, run.config.run.seed, step, LearnReports())
        learnt.steps.append(metrics)
    return learnt


def recorded_batches(run: Prepared, first: Finished) -> list[Batch]:
    """The batches that ``assemble`` makes from each step's rollouts or rows."""
    files = sorted((first.path / "rollouts").glob("*.arrow")) if run.online else []
    if files:
        batches = [run.algorithm.assemble(read_groups(file, run.data.row))[0] for file in files]
    else:
        size, steps = run.config.data.batch_size, run.total_steps
        batches = [run.algorithm.assemble(run.data.examples(run.data.take(size)))[0] for _ in range(steps)]
    return [batch for batch in batches if batch is not None]


def first_gradients(run: Prepared, roles: Mapping[str, Role], batch: Batch) -> Gradients:
    """Gradients of the first optimizer step; nothing is updated."""
    algorithm = run.algorithm
    for annotation in algorithm.annotations(0):
        batch = roles[annotation.role].annotate(batch, [annotation])
    state = algorithm.state_dict()
    batch, _ = algorithm.credit(batch)
    algorithm.load_state_dict(state)
    gradients = {}
    for update in algorithm.updates(0, batch):
        loss, inputs = algorithm.parts[update.loss], batch
        for annotation in loss.prepass():
            inputs = roles[annotation.role].annotate(inputs, [annotation])
        gradients[update.role] = roles[update.role].gradients(weigh(loss.prepare(inputs), loss.reduce()), loss, update)
    return gradients


def distance(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all parameters together."""
    assert tensors.keys() == expected.keys()
    difference = torch.stack([(tensors[n].double() - expected[n].double()).norm() for n in expected]).norm()
    return float(difference / torch.stack([t.double().norm() for t in expected.values()]).norm())
