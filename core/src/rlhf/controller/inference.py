"""A model that only answers, with the rollouts, rewards and data of training: `rlhf eval` and `rlhf generate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlhf.controller.answering import Answering, answering, evaluation_settings
from rlhf.controller.build import launch_roles
from rlhf.controller.evaluate import evaluate_rollouts
from rlhf.controller.learn import Metrics
from rlhf.controller.prepare import Prepared, prepare
from rlhf.interfaces import Algorithm
from rlhf.ops.batch import Batch
from rlhf.plugins import Plugins
from rlhf.runfile import Choice, RunFile
from rlhf.serialise import write_groups
from rlhf.types import Group, Needs, RoleSpec


class Answer(Algorithm):
    """Learns nothing: holds an untrained policy."""

    name = "answer"

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy"),))

    def assemble(self, examples: Sequence[object]) -> Batch | None:
        return None

    def updates(self, step: int) -> list:
        return []


@contextmanager
def answers(config: RunFile, plugins: Plugins) -> Iterator[tuple[Prepared, Answering]]:
    """Load the policy (and reward models) of a run file, whatever its algorithm, ready to answer evaluation rows."""
    plugins.register("algorithm", Answer)
    data = config.data.model_copy(update={"train": config.data.eval or config.data.train})
    algorithm = Choice(use="answer")
    config = config.model_copy(update={"algorithm": algorithm, "data": data, "observer": ()})
    prepared = prepare(config, plugins, scored=bool(config.reward) or config.env is not None)
    for note in prepared.data.notes:
        print(f"note: {note}", file=sys.stderr)  # noqa: T201
    launcher = prepared.parts["launcher"].build()
    with ExitStack() as closing:
        closing.callback(launcher.shutdown)
        roles = launch_roles(prepared, launcher)
        made = answering(prepared, roles, launcher, lambda line: print(line, file=sys.stderr))  # noqa: T201
        for closer in reversed(made.closers):
            closing.callback(closer)
        made.sync.push(0)
        yield prepared, made


def evaluate_model(
    config: RunFile,
    plugins: Plugins,
    progress: Callable[[int, int], None] = lambda done, total: None,
    save: Path | None = None,
) -> tuple[Metrics, list[Group]]:
    """Answer and score every evaluation row; ``save``: a file for answers. Metrics without the ``eval/`` in front."""
    with answers(config, plugins) as (prepared, made):
        rows = prepared.data.eval_rows()[: config.eval.max_rows]
        settings = evaluation_settings(config)
        metrics, groups = evaluate_rollouts(made.rollouts, rows, settings, config.eval, progress=progress)
        if save is not None:
            write_groups(save, groups, prepared.data.template.prompt_of)
        return {name.removeprefix("eval/"): value for name, value in metrics.items()}, groups
