"""The models that clients train: adapters of one base model. The trainer holds one model at a time."""

from __future__ import annotations

import json
import re
import shutil
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import RestartsOptimizer, TakesModule
from rlhf.ops.batch import Batch
from rlhf.ops.heads import resolve_head
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.seeds import derive_seed
from rlhf.types import GenerationRequest, Sampling, Update
from rlhf_hub.published import add_older_names
from rlhf_runtime.checkpoint.atomic_files import publish_folder
from rlhf_runtime.jobs.training import TrainedPolicy

from rlhf_cli.serve_training.losses import READS, TARGETS, BadRequest, LossChoice, ProtocolLoss, head, values
from rlhf_cli.serve_training.wire import Array, Datum, Drawn

FACTS = "served.json"
NAME = r"[\w-]+:train:\d+"
PATH = re.compile(rf"tinker://({NAME})/(weights|sampler_weights)/([\w.-]+)")
"""Clients choose parts of these, which are names of folders here."""
UNNAMED = 8
"""Number of unnamed checkpoints for sampling clients that are kept per model. A long run writes one per step."""
BASE = "base"
"""Source of samples if a client names the base model."""


@dataclass
class Model:
    """The adapters of one client."""

    folder: Path
    state: Path
    """Folder of its training state, as of the last time that it was written."""
    unsaved: bool = False
    """Whether the trainer holds a newer state of it."""
    unnamed: list[str] = field(default_factory=list)
    """Checkpoints that :meth:`TrainedModels.save_unnamed` wrote, the oldest first."""


@dataclass(frozen=True)
class SampleQuestion:
    """A request for samples of one prompt."""

    ids: Sequence[int]
    sampling: Sampling
    samples: int
    seed: int | None
    prompt_logprobs: bool


class TrainedModels:
    """All methods compute, and are called one at a time.

    :meth:`learn` only computes the loss of a batch; :meth:`step` computes its gradient. Between the two calls the
    trainer may hold another model, or other weights for sampling, and no gradient is lost.

    Args:
        base: name of the base model of the adapters. Only checkpoints of this model are used.
        folder: folder of all checkpoints.
    """

    def __init__(self, policy: TrainedPolicy, base: str, folder: Path) -> None:
        self._policy, self._base, self._folder = policy, base, folder
        self._role = policy.role
        self._models: dict[str, Model] = {}
        self._pending: dict[str, list[tuple[Batch, LossChoice]]] = {}
        self._live_model: Model | None = None
        self._equal: set[Path] = set()
        """Folders with the weights that the trainer holds."""
        self._weights, self._sampler_weights, self._draw_count = 0, "", 0
        folder.mkdir(parents=True, exist_ok=True)
        self._own_folder = TemporaryDirectory(prefix=".server-", dir=folder)  # other servers may have the same folder
        self._new = Path(self._own_folder.name) / "new-model"
        self._write(self._new)

    # ------------------------------------------------------------------------------------- training

    def create(self, name: str) -> None:
        """Create a model. All models have the same initial training state, from ``run.seed``."""
        if re.fullmatch(NAME, name) is None:
            raise BadRequest(f"{name!r} is not a model: a session's name has letters, digits, '_' and '-'")
        self._models.setdefault(name, Model(self._folder / _folder_name(name), self._new))
        self._pending.setdefault(name, [])

    def learn(self, name: str, data: Sequence[Datum], loss: LossChoice, learns: bool) -> tuple[list[Array], float]:
        """Log-probs of the targets of each datum, [n] or [n, K], and the loss, a sum. With ``learns`` the next step
        follows the gradient of it."""
        self._hold(name)
        batch = _batch_of(data, loss)
        logprobs_N = self._role.forward(batch, [head()])["target_logprobs"]
        mask_N = batch.tok["loss_mask"]
        columns = {column: batch.tok[column][mask_N] for column in READS[loss.name]}
        total = float(values(loss, logprobs_N[mask_N], columns).double().sum())
        if learns:
            self._pending[name].append((batch, loss))
        ends = np.cumsum([len(datum.ids) for datum in data])[:-1]
        return np.split(logprobs_N[mask_N].numpy(), ends), total

    def step(self, name: str, options: Mapping[str, Any]) -> dict[str, float]:
        """One optimizer step with the gradients of all batches since the last one.

        Args:
            options: options of the trainer for this step.

        Raises BadRequest, also for a gradient that is not finite; the weights are then unchanged.
        """
        model, pending = self._hold(name), self._pending[name]
        if not pending:
            raise BadRequest("optim_step needs a forward_backward before it: there is no gradient")
        trainer, config = self._policy.trainer.resolved.cls, self._policy.trainer.config
        changes = {key: value for key, value in options.items() if value != getattr(config, key)}
        allowed = trainer.changeable | (trainer.per_step if issubclass(trainer, RestartsOptimizer) else frozenset())
        if fixed := changes.keys() - allowed:
            raise BadRequest(f"trainer {trainer.name!r} cannot change {sorted(fixed)} between two steps")
        config = type(config).model_validate({**config.model_dump(), **changes})
        self._pending[name] = []
        try:
            self._role.every("change", config)
            for batch, loss in pending:
                # The trainer takes means over these sequences, but the protocol has sums: ProtocolLoss multiplies by
                # the number.
                sequences = len(torch.unique(batch.seq_N[batch.tok["trained"]]))
                weighed = ProtocolLoss(loss, sequences)
                self._role.accumulate(weigh(batch, weighed.reduce()), weighed, Update("policy", "loss"))
            result = self._role.apply()
        except BaseException:
            # The gradients of some batches may have been added already: the next step must not follow them.
            self._role.every("zero_grad")
            raise
        if result.skipped:
            raise BadRequest(f"the step was not taken: {result.skipped}")
        model.unsaved = True
        self._weights += 1
        self._equal = set()
        return {"grad_norm": result.grad_norm, "lr": result.lr}

    # ---------------------------------------------------------------------------------- checkpoints

    def save(self, name: str, kind: str, label: str, overwrite: bool) -> str:
        """Write a checkpoint and return its address. ``kind``: ``weights`` | ``sampler_weights``. Both contain the
        optimizer's state."""
        path = f"tinker://{name}/{kind}/{label}"
        folder = checkpoint_folder(self._folder, path)
        if folder.exists() and not overwrite:
            raise BadRequest(f"{path} exists. Choose another name, or set overwrite")
        self._hold(name)
        self._write(folder)
        return path

    def save_unnamed(self, name: str, label: str) -> str:
        """Write a checkpoint for one sampling client. Only the last :data:`UNNAMED` of a model are kept."""
        path, model = self.save(name, "sampler_weights", label, overwrite=False), self._models[name]
        model.unnamed.append(path)
        while len(model.unnamed) > UNNAMED:
            folder = checkpoint_folder(self._folder, model.unnamed.pop(0))
            self._equal.discard(folder)
            shutil.rmtree(folder)
        return path

    def load(self, name: str, path: str, optimizer: bool) -> None:
        """Replace the weights of a model by those of a checkpoint; with ``optimizer`` also the optimizer's state."""
        self.facts(path)
        trainer = self._policy.trainer.resolved.cls
        if not optimizer and not issubclass(trainer, RestartsOptimizer):
            raise BadRequest(f"trainer {trainer.name!r} loads weights only together with the optimizer's state")
        model = self._hold(name)
        self._put_aside()  # if the checkpoint is damaged, the model continues with its own state
        self._read(checkpoint_folder(self._folder, path))
        # The state on the disk is older than this checkpoint: it must be written before another model is loaded.
        self._live_model, model.unsaved = model, True
        self._pending[name] = []
        if not optimizer:
            self._role.every("restart_optimizer")

    def export(self, path: str, folder: Path) -> None:
        """Write the model of a checkpoint, with its adapter in PEFT's form."""
        self.facts(path)
        self._show(checkpoint_folder(self._folder, path))

        def write(new: Path) -> None:
            self._role.every("export", new)
            add_older_names(new)

        publish_folder(folder, write)

    def facts(self, path: str) -> dict[str, Any]:
        """The metadata of a checkpoint. Raises BadRequest if it does not exist, or is of another base model."""
        try:
            facts: dict[str, Any] = json.loads((checkpoint_folder(self._folder, path) / FACTS).read_text())
        except OSError:
            raise BadRequest(
                f"there is no checkpoint {path}. Of a model's unnamed checkpoints only the last {UNNAMED} are kept"
            ) from None
        own_facts = self._own_facts()
        if facts != own_facts:
            raise BadRequest(f"{path} is a checkpoint of {facts}; this server trains {own_facts}")
        return facts

    # ------------------------------------------------------------------------------------- sampling

    def sample(self, source: str, questions: Sequence[SampleQuestion]) -> list[tuple[list[Drawn], Array | None]]:
        """Samples of each question, and the log-probs of its prompt, float32, NaN for the first token.

        Args:
            source: a checkpoint, or :data:`BASE`.
        """
        if source != BASE:
            self.facts(source)
            self._show(checkpoint_folder(self._folder, source))
        elif not isinstance(self._policy.generator, TakesModule):
            self._show(self._new)  # an engine gets the adapters that the trainer holds; initial ones change nothing
        else:
            self._role.every("use_view", "base")  # without the adapters that the trainer holds
            try:
                return self._answer(BASE, questions)
            finally:
                self._role.every("use_view", "live")
        return self._answer(str(self._weights), questions)

    def _answer(self, weights: str, questions: Sequence[SampleQuestion]) -> list[tuple[list[Drawn], Array | None]]:
        """Answers with the weights that the trainer holds, whose name is ``weights``."""
        prompts = [self._prompt_logprobs(question.ids) if question.prompt_logprobs else None for question in questions]
        return list(zip(self._draw(weights, questions), prompts, strict=True))

    def _draw(self, weights: str, questions: Sequence[SampleQuestion]) -> list[list[Drawn]]:
        if weights != self._sampler_weights:
            self._sampler_weights = ""  # in case the push fails
            self._policy.weights.push(self._policy.weights.version + 1)
            self._sampler_weights = weights
        requests, owners = [], []
        for owner, question in enumerate(questions):
            seed = (
                derive_seed(self._policy.config.run.seed, "served", self._draw_count)
                if question.seed is None
                else question.seed
            )
            self._draw_count += 1
            for n in range(question.samples):
                requests.append(GenerationRequest(question.ids, derive_seed(seed, "sample", n), question.sampling))
                owners.append(owner)
        samples: list[Drawn | None] = [None] * len(requests)
        for position, turn in self._policy.generator.generate(requests):
            samples[position] = Drawn(turn.ids, turn.logprobs or (), turn.finish == "stop")
        answers: list[list[Drawn]] = [[] for _ in questions]
        for owner, sample in zip(owners, samples, strict=True):
            if sample is None:
                raise TrainingError(f"generator {self._policy.generator.name!r} gave no sample for a request")
            answers[owner].append(sample)
        return answers

    def _prompt_logprobs(self, ids: Sequence[int]) -> Array:
        if len(ids) == 1:
            return np.full(1, np.nan, np.float32)
        batch = pack([UnitData([SequenceData(array("i", ids), {"loss_mask": [True] * len(ids)})])])
        output = self._role.forward(batch, [resolve_head("logprobs", "loss_mask")])["logprobs"]
        return np.concatenate([[np.float32(np.nan)], output[1:].numpy()])

    # ----------------------------------------------------------------- the model in the trainer

    def _hold(self, name: str) -> Model:
        """Load a model into the trainer, and save the training state of the model that it held."""
        if name not in self._models:
            raise BadRequest(
                f"there is no model {name!r}: models end with the server. Create one, or load a saved state"
            )
        model = self._models[name]
        if self._live_model is not model:
            self._put_aside()
            self._read(model.state)
            self._live_model, model.unsaved = model, False
        return model

    def _put_aside(self) -> None:
        model = self._live_model
        if model is not None and model.unsaved:
            state = model.folder / "state"
            self._write(state)
            model.state, model.unsaved = state, False
        self._live_model = None

    def _show(self, folder: Path) -> None:
        """Load the weights of a checkpoint into the trainer."""
        if folder not in self._equal:
            self._put_aside()
            self._read(folder)

    def _read(self, folder: Path) -> None:
        self._weights += 1
        self._equal = set()  # in case the load fails
        self._role.every("load", folder)
        self._equal = {folder}

    def _write(self, folder: Path) -> None:
        def write(new: Path) -> None:
            self._role.every("save", new)
            (new / FACTS).write_text(json.dumps(self._own_facts()))

        publish_folder(folder, write)
        self._equal.add(folder)

    def _own_facts(self) -> dict[str, Any]:
        return {"base_model": self._base, "lora_rank": self._policy.adapter_rank}


def checkpoint_folder(folder: Path, path: str) -> Path:
    """The folder of the checkpoint ``tinker://...``, below the folder of all checkpoints. Raises BadRequest for another
    address."""
    match = PATH.fullmatch(path)
    if match is None or set(match[3]) == {"."}:
        raise BadRequest(f"{path!r} is not a checkpoint: names have letters, digits, '.', '_' and '-'")
    return folder / _folder_name(match[1]) / match[2] / match[3]


def _folder_name(model: str) -> str:
    return model.replace(":", "_")


def _batch_of(data: Sequence[Datum], loss: LossChoice) -> Batch:
    """A unit for each datum: its tokens and one more, so that every token predicts the next. Columns are at the token
    that is predicted.

    ``loss_mask``: all predicted tokens. ``trained``: those with a gradient, or all if no token has one.
    """
    batch = pack(
        [
            UnitData(
                [SequenceData(array("i", [*d.ids.tolist(), int(d.ids[-1])]), {"loss_mask": [True] * (len(d.ids) + 1)})]
            )
            for d in data
        ]
    )
    for name in (TARGETS, *READS[loss.name]):
        rows = [np.concatenate([np.zeros_like(d.inputs[name][:1]), d.inputs[name]]) for d in data]
        batch = batch.with_column("tok", name, torch.from_numpy(np.concatenate(rows)), over=None)
    mask_N = batch.tok["loss_mask"]
    trained_N = mask_N
    if loss.name != "dro":  # its second term does not depend on the advantage
        factor_N = batch.tok[READS[loss.name][-1]]
        trained_N = mask_N & (factor_N.reshape(len(factor_N), -1) != 0).any(1)
    return batch.with_column("tok", "trained", trained_N if bool(trained_N.any()) else mask_N, over=None)
