"""`rlhf export`: writes the model in a checkpoint as a folder in Hugging Face format."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import CheckpointError, ConfigError, boundary
from rlhf.interfaces import Algorithm, Reward
from rlhf.plugins import Plugins
from rlhf.plugins.resolved import IN_PROCESS
from rlhf.types import Group, RewardResult
from rlhf_hub.hub import Commits

from rlhf_runtime.checkpoint.atomic_files import publish_folder
from rlhf_runtime.checkpoint.json_values import read_json
from rlhf_runtime.checkpoint.store import Checkpoint, CheckpointStore
from rlhf_runtime.checks.order import checked
from rlhf_runtime.checks.run import RunPlugins, device_here
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.template import Template
from rlhf_runtime.data.tokenizer import load_tokenizer, tokens_of
from rlhf_runtime.loop.model_card import write_card
from rlhf_runtime.loop.saves import ADAPTER, ModelFiles
from rlhf_runtime.loop.schedule import UpdateSchedule
from rlhf_runtime.models.roles import Role
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.setup.prepare import total_steps, with_precision

Which = int | Literal["best", "average"]
"""The weights to export: of a step, of the best checkpoint, or the mean of all checkpoints."""


def choose(run: Path, choice: Which) -> list[Checkpoint]:
    """The checkpoints of the run in ``run`` that an export reads. Every file is compared with its checksum.

    Raises CheckpointError or ConfigError if there are none, or they are damaged.
    """
    store = CheckpointStore(run)
    complete = store.complete()
    steps = [checkpoint.step for checkpoint in complete]
    contents = (
        f"{store.root} holds checkpoints of the steps {steps}"
        if steps
        else f"there is no complete checkpoint in {store.root}"
    )
    if choice == "average":
        if len(steps) < 2:
            raise ConfigError(f"--average needs two or more checkpoints, but {contents}.")
        return [store.open(step) for step in steps]
    if choice == "best":
        best = store.best()
        if best is None:
            raise ConfigError(
                f"no checkpoint of {run} is marked as the best: it had no evaluation, or checkpoint.save_best = false. "
                f"Name a step with --step; {contents}."
            )
        return [store.open(best.step)]
    if choice not in steps:
        raise ConfigError(f"--step {choice}: {contents}.")
    return [store.open(choice)]


def export(
    config: RunFile, plugins: Plugins, run: Path, choice: Which, output: Path, note: Callable[[str], None]
) -> list[int]:
    """Write the policy of checkpoints of the run in ``run`` to the folder ``output``, as the run writes ``model/``.

    Args:
        config: the run file of the run. The trainer loads the checkpoint, so it must be the same trainer.
        note: shows messages of the trainer.

    Returns the steps of the checkpoints.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists. Name a new folder, or delete this one.")
    checkpoints = choose(run, choice)
    with loaded_policy(config, plugins, run) as (role, parts, template):
        for remark in role.facts.notes:
            note(remark)

        def write(folder: Path, checkpoint: Checkpoint) -> None:
            role.every("load", checkpoint.path / "roles" / "policy")
            _restore(parts.algorithm, checkpoint.path / "state.json")
            ModelFiles(parts.config, parts.algorithm, template).write_policy(role, folder)

        def write_all(folder: Path) -> None:
            *earlier_checkpoints, newest = checkpoints
            with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as place:
                exports = [Path(place) / f"step-{checkpoint.step}" for checkpoint in earlier_checkpoints]
                for path, checkpoint in zip(exports, earlier_checkpoints, strict=True):
                    path.mkdir()
                    write(path, checkpoint)
                write(folder, newest)
                if earlier_checkpoints:  # the product of mean factors is not the mean of products
                    shutil.rmtree(folder / ADAPTER, ignore_errors=True)
                _add_to_mean(folder, exports)
            write_card(folder, run, steps=[checkpoint.step for checkpoint in checkpoints])

        publish_folder(output, write_all)
    return [checkpoint.step for checkpoint in checkpoints]


@contextmanager
def loaded_policy(
    config: RunFile, plugins: Plugins, run: Path, folder: Path | None = None
) -> Iterator[tuple[Role, RunPlugins, Template]]:
    """The run's policy on its own devices, before a checkpoint is loaded. No row of the data is read.

    Args:
        folder: a whole model to load instead of the policy's model, as a role that is not trained.
    """
    start = RunDirectory.last_start(run)
    parts = checked(_without_objects(config, plugins), plugins, scored=False, commits=Commits(start.get("hub")))
    steps = start.get("total_steps") or total_steps(parts.config, 0)
    tokenizer = load_tokenizer(parts.model("policy"), parts.config.policy.trust_remote_code)
    parts.algorithm.use_tokens(tokens_of(tokenizer))
    template = Template(tokenizer, parts.config.data)
    schedule = UpdateSchedule.of(parts.algorithm, steps)
    # No other role is launched here, so there is none to share devices with.
    place = replace(parts.places_on(device_here())["policy"], share=None)
    spec = parts.spec("policy", schedule.total()["policy"], place.ranks, start.get("images", False))
    spec = with_precision({"policy": spec}, parts.trainer_class, start.get("on_processor"))["policy"]
    if folder is not None:
        spec = replace(spec, path=str(folder), role=replace(spec.role, trained=False))
    trainer = parts.trainer("policy")
    trainer.resolved.cls.check_files(spec)
    launcher = parts.parts["launcher"].build()
    with ExitStack() as resources:
        resources.callback(launcher.shutdown)
        launcher.place({"policy": place}, [trainer.resolved], None)
        yield Role(spec, launcher.launch_trainer(trainer.resolved.cls, trainer.config, spec), None), parts, template


class _AbsentReward(Reward):
    async def score(self, group: Group) -> list[RewardResult]:
        raise NotImplementedError


def _without_objects(config: RunFile, plugins: Plugins) -> RunFile:
    """The run file without observers, and with stand-ins for the rewards that were functions or classes of the process
    that started the run. Nothing is scored here, but the algorithm is checked against the number of rewards."""
    rewards = list(config.reward)
    for number, section in enumerate(rewards):
        distribution, _, name = section.use.partition("/")
        if distribution == IN_PROCESS:
            plugins.register("reward", type(_AbsentReward.__name__, (_AbsentReward,), {"name": name}))
            rewards[number] = section.model_copy(update={"options": {}})
    return config.model_copy(update={"observer": (), "reward": tuple(rewards)})


def _restore(algorithm: Algorithm, state: Path) -> None:
    """Restore the state that the algorithm writes into a model's config."""
    components = {"algorithm": algorithm, **{f"algorithm.{slot}": part for slot, part in algorithm.parts.items()}}
    saved: Any = read_json(state)
    for name, component in components.items():
        with boundary(CheckpointError, f"load_state_dict() of {name}, given components.{name} of {state},"):
            component.load_state_dict(saved["components"][name])


def _add_to_mean(folder: Path, exports: Sequence[Path]) -> None:
    """Replace the weights of the export in ``folder`` by the mean of its weights and the weights of other exports,
    which are divided into the same files. At most one file is in memory."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    for path in sorted(folder.glob("*.safetensors")) if exports else ():
        tensors = load_file(path)
        # In fp32, because sums of several bf16 tensors would be rounded after each one.
        sums = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
        for other in exports:
            with safe_open(other / path.name, "pt") as file:
                for name in sums:
                    sums[name] += file.get_tensor(name)
        means = {name: (total / (1 + len(exports))).to(tensors[name].dtype) for name, total in sums.items()}
        save_file({**tensors, **means}, path, metadata={"format": "pt"})
        # save_file() makes files that only their owner can read.
        path.chmod(0o644)
