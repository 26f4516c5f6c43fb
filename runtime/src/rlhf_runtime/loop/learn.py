"""One step of learning, shared by online and offline runs: annotate, credit, update."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from rlhf.errors import TrainingError, boundary
from rlhf.interfaces import Algorithm, Loss
from rlhf.ops.batch import Batch
from rlhf.ops.loss_value import add_sums, finish_sums
from rlhf.ops.reduce import weigh
from rlhf.seeds import derive_seed
from rlhf.types import Annotation, Snapshot, Update
from rlhf.weights.bucket import Bucket
from rlhf.weights.fingerprint import marks
from torch import Tensor

from rlhf_runtime.calls.algorithm_calls import ask, metrics_of
from rlhf_runtime.models.roles import Role

Metrics = dict[str, float]


class LearnReports:
    """What :func:`learn` reports of a step. This class reports nothing."""

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Measures the time of a phase."""
        return nullcontext()

    def count(self, label: str, number: int, total: int) -> None:
        """Called before each of several optimizer steps of an update."""

    def credited(self, batch: Batch, annotations: Sequence[Annotation]) -> None:
        """Called with the batch that has advantages, and the annotations in it."""

    def skipped(self, step: int, reason: str, minibatch: Batch) -> None:
        """Called for every optimizer step whose gradient is not finite. Such a step changes no weights."""


def learn(
    batch: Batch,
    algorithm: Algorithm,
    roles: Mapping[str, Role],
    seed: int,
    step: int,
    reports: LearnReports,
) -> Metrics:
    """Annotate the batch, compute advantages from rewards, train every role that the algorithm names. Returns the
    metrics of ``credit`` and of the updates."""
    annotations = ask(algorithm, "annotations", step)
    with reports.timed("annotate") if annotations else nullcontext():
        # One call for each role, so that annotations of one view share a forward pass.
        for name in dict.fromkeys(a.role for a in annotations):
            role = role_of(roles, name, f"annotations() of {algorithm.name!r}")
            batch = role.annotate(batch, [a for a in annotations if a.role == name])
    with boundary(TrainingError, f"algorithm {algorithm.name!r}"):
        batch, metrics = algorithm.credit(batch)
        updates = algorithm.updates(step, batch)
    metrics = metrics_of(f"credit() of algorithm {algorithm.name!r}", metrics)
    reports.credited(batch, annotations)
    for update in updates:
        if isinstance(update, Snapshot):
            snapshot(roles, update)
        else:
            metrics |= train(batch, algorithm.parts[update.loss], roles, update, seed, step, reports)
    return metrics


def role_of(roles: Mapping[str, Role], name: str, caller: str) -> Role:
    """The role that an algorithm or a loss names. Raises TrainingError if the algorithm does not declare it."""
    if name not in roles:
        raise TrainingError(
            f"{caller} names the role {name!r}, which this run does not have. It has {', '.join(sorted(roles))}. An "
            f"algorithm declares its roles: needs() must return Needs(roles=(..., RoleSpec({name!r})))."
        )
    return roles[name]


def train(
    batch: Batch,
    loss: Loss,
    roles: Mapping[str, Role],
    update: Update,
    seed: int,
    step: int,
    reports: LearnReports,
) -> Metrics:
    """All optimizer steps of one update; metrics are named ``<role>/<name>``."""
    steps = update.epochs * update.minibatches
    if update.live and steps != 1:
        raise TrainingError(
            f"the update of {update.role!r} has {update.epochs} x {update.minibatches} optimizer steps and leaves out "
            f"{sorted(update.live)}: only an update of a single step may leave columns out, because the live output "
            "differs from them after the first step"
        )
    role, parts, skipped = role_of(roles, update.role, "updates()"), [], 0
    grad_norms: list[float] = []
    result = None
    for number, minibatch in enumerate(minibatches(batch, update, seed, step), 1):
        if steps > 1:
            reports.count("optimizer step", number, steps)
        minibatch = loss_batch(minibatch, loss, roles)
        with boundary(TrainingError, f"the update of {update.role!r} with the loss {loss.name!r}"):
            sums, result = role.update(minibatch, loss, update)
        if result.skipped:  # its sums may hold NaN, so they are not in the metrics
            skipped += 1
            reports.skipped(step, f"{update.role}: {result.skipped}", minibatch)
        else:
            parts.append(sums)
            grad_norms.append(result.grad_norm)
    assert result is not None
    summed = add_sums(parts)
    # A sum without a count is a value of a whole optimizer batch (the loss). The mean over the batches is reported.
    already_normalised = {k: (v / len(parts), c) for k, (v, c) in summed.items() if c == 0}
    values = finish_sums(summed | already_normalised)
    values |= summary(loss, values)
    values["lr"] = result.lr
    values["skipped"] = float(skipped)
    if grad_norms:
        values["grad_norm"] = sum(grad_norms) / len(grad_norms)
    return {f"{update.role}/{name}": value for name, value in values.items()}


def loss_batch(batch: Batch, loss: Loss, roles: Mapping[str, Role]) -> Batch:
    """The batch with everything that the loss reads: outputs with the current weights (``prepass``), its own columns
    (``prepare``), and the weights of its terms."""
    for annotation in loss.prepass():
        reader = role_of(roles, annotation.role, f"prepass() of loss {loss.name!r}")
        batch = reader.annotate(batch, [annotation])
    with boundary(TrainingError, f"loss {loss.name!r}"):
        return weigh(loss.prepare(batch), loss.reduce())


def summary(loss: Loss, means: Metrics) -> Metrics:
    """The metrics that a loss computes from the means of others."""
    label = f"summary() of loss {loss.name!r}"
    with boundary(TrainingError, label):
        return metrics_of(label, loss.summary(means))


def minibatches(batch: Batch, update: Update, seed: int, step: int) -> Iterator[Batch]:
    """The optimizer batches of an update: per epoch a seeded shuffle of the units, cut into near-equal parts."""
    if update.minibatches > batch.units:
        raise TrainingError(
            f"{update.minibatches} minibatches for {batch.units} units: some would be empty. An algorithm may ask "
            "for at most one minibatch per unit"
        )
    for epoch in range(update.epochs):
        # A batch that is not divided needs neither a shuffle nor the copy that select() makes.
        if update.minibatches == 1:
            yield batch
            continue
        generator = torch.Generator().manual_seed(derive_seed(seed, "minibatch", step, epoch))
        order = torch.randperm(batch.units, generator=generator).tolist()
        bounds = [round(i * batch.units / update.minibatches) for i in range(update.minibatches + 1)]
        for start, end in itertools.pairwise(bounds):
            yield batch.select(order[start:end])


def snapshot(roles: Mapping[str, Role], update: Snapshot) -> None:
    """``role := share source + (1 - share) role`` on every rank."""
    source, target = (role_of(roles, name, "a Snapshot in updates()") for name in (update.source, update.role))
    # The source may be the base of a role that trains adapters, whose live weights are others.
    buckets = list(source.group.stream("buckets", source.view))
    if update.share < 1:
        old: list[Bucket] = [target.group.value(item) for item in target.group.stream("buckets", "live")]
        old_tensors = {name: tensor for bucket in old for name, tensor in bucket.tensors}
        buckets = [mixed(source.group.value(item), old_tensors, update) for item in buckets]
    # Counted before the call, which may fail after some tensors were replaced (Saves.rescue).
    target.changes += 1
    target.every("load_buckets", buckets)


def mixed(bucket: Bucket, old_tensors: Mapping[str, Tensor], update: Snapshot) -> Bucket:
    """``share bucket + (1 - share) old``, tensor by tensor, in new memory.

    Args:
        old_tensors: every tensor of the role that is overwritten, by name.

    Raises TrainingError if the two roles are not of one architecture.
    """
    tensors: list[tuple[str, Tensor]] = []
    for name, tensor in bucket.tensors:
        old = old_tensors.get(name)
        if old is None or old.shape != tensor.shape:
            difference = "lacks it" if old is None else f"has it with the shape {tuple(old.shape)}"
            raise TrainingError(
                f"role {update.role!r} cannot be mixed with {update.source!r}, which has the tensor {name!r} of shape "
                f"{tuple(tensor.shape)}: the role {difference}. Both need the same architecture and vocabulary."
            )
        new = tensor.to(old.device).float() * update.share + old.float() * (1 - update.share)
        tensors.append((name, new.to(old.dtype)))
    return Bucket(tuple(tensors), tuple(marks([tensor for _, tensor in tensors])))
