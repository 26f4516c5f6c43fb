"""The algorithm ``per_source``: splits every batch by source, and adds the losses of the sources' algorithms."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator
from rlhf.errors import ConfigError, TrainingError
from rlhf.interfaces import Algorithm, ComponentConfig
from rlhf.types import Annotation, Group, Needs, OnlineShape, RoleSpec, RunOptions, Update
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf.types.images import joined_images

if TYPE_CHECKING:
    from rlhf.interfaces.tokens import Tokens
    from rlhf.ops.batch import Batch


_NAME = re.compile(r"[a-z][a-z0-9_]*")
_METRIC_PREFIXES = ("policy", "loss")
"""First words of metric names. A member must not have such a name, which would hide metrics."""


class Member(ComponentConfig):
    use: str
    """The algorithm. Its options and slots stand in the same table: ``kl.coef = 0.05``, ``loss = { use = "gspo" }``."""
    sources: tuple[str, ...] = Field(min_length=1)
    """Names of the sources in ``data.train`` whose rows it trains on."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of its loss in the sum; with ``weight_end``, the factor of the first step."""
    weight_end: float | None = Field(default=None, ge=0)
    """The factor after ``weight_steps`` steps of the run, reached linearly (mu of CHORD, arXiv:2508.11408, whose code
    takes a cosine after a warm-up). Default: constant."""
    weight_steps: int | None = Field(default=None, ge=1)
    """Number of steps until ``weight_end``."""

    @model_validator(mode="after")
    def _check(self) -> Member:
        if (self.weight_end is None) != (self.weight_steps is None):
            raise ValueError("weight_end and weight_steps must be set together: set both or neither")
        return self

    def weight_at(self, step: int) -> float:
        """The factor in step ``step`` of the run, from 0. It depends on nothing else, so a resume needs no state."""
        if self.weight_end is None or self.weight_steps is None:
            return self.weight
        return self.weight + (self.weight_end - self.weight) * min(step / self.weight_steps, 1.0)


class PerSourceConfig(ComponentConfig):
    members: Mapping[str, Member] = Field(min_length=1)
    """The algorithms, by names of your choice, which are also the prefixes of their metrics."""

    @model_validator(mode="after")
    def _check(self) -> PerSourceConfig:
        owner: dict[str, str] = {}
        for name, member in self.members.items():
            if not _NAME.fullmatch(name) or name in _METRIC_PREFIXES:
                raise ValueError(
                    f"members: the name {name!r} is not allowed; a name matches [a-z][a-z0-9_]* and is not "
                    f"{' or '.join(_METRIC_PREFIXES)}"
                )
            for source in member.sources:
                if source in owner:
                    names = f"both {owner[source]!r} and {name!r}" if owner[source] != name else f"{name!r} twice"
                    raise ValueError(
                        f"members: the source {source!r} is named by {names}; a source has only one member. Remove one"
                    )
                owner[source] = name
        return self


class PerSource(Algorithm[Group]):
    """Every row is trained on by the algorithm of its source. All share the policy and the optimizer step.

    ::

        loss = sum over members m of weight_m * loss_m

    loss_m is the loss of member m, computed on the samples of its sources only. The member has its own groups,
    advantages, normalisation and columns, and the divisor is its own number of tokens or samples in the optimizer
    batch. A member without samples in an optimizer batch adds 0; the others keep their weights. weight_m may change
    over the steps of the run (``weight_end``).

    Metrics of a member begin with its name: ``math/reward/mean``, ``policy/math/clip_fraction``,
    ``policy/loss/math/policy``.

    A member may learn from demonstrations (``sft``): the rows of its sources have an answer, which it is trained on in
    the same optimizer steps (``Needs.demonstration_sources``).

    Restrictions, which are checked before the run: at least one member, and every member without demonstrations, learns
    from samples (``prompts``) with a reward. All members train only the policy (no critic) and copy no weights (no
    ``kl.snapshot_every``). Members that sample have the same epochs and minibatches. All prompts get
    ``sampling.samples_per_prompt`` samples.
    """

    name = "per_source"
    Config = PerSourceConfig
    has_members = True

    def __init__(
        self,
        config: ComponentConfig | None = None,
        parts: Mapping[str, Any] | None = None,
        run: RunOptions | None = None,
    ) -> None:
        super().__init__(config, parts, run)
        self.members: dict[str, Algorithm] = {name: self.parts[f"members.{name}"] for name in self.config.members}
        self._owner = {source: name for name, m in self.config.members.items() for source in m.sources}
        self._check_sources()
        for name, member in self.members.items():
            check_member(name, member)
        if all(member.data != "prompts" for member in self.members.values()):
            raise ConfigError(
                "algorithm.members: every member learns from demonstrations, so nothing is sampled. Add one that "
                "learns from samples, or use only the algorithm of the demonstrations"
            )
        self._check_updates(0)
        self.annotations(0)  # refuses outputs that cannot be joined
        from rlhf_plugin_per_source.loss import LossOfMembers

        self.needs()  # refuses roles that differ
        losses = {name: member.parts[planned_update(name, member, 0).loss] for name, member in self.members.items()}
        self.parts = {f"members.{name}.{slot}": p for name, m in self.members.items() for slot, p in m.parts.items()}
        self.parts["loss"] = LossOfMembers(losses, {n: m.weight for n, m in self.config.members.items()})

    def _check_sources(self) -> None:
        """Raises ConfigError if the members' sources are not those of ``data.train``."""
        sources = self.run.sources
        if not sources:  # not in a run
            return
        if unknown := [source for source in self._owner if source not in sources]:
            raise ConfigError(
                f"algorithm.members: {', '.join(map(repr, unknown))} is not a source of data.train; its sources are "
                f"{', '.join(map(repr, sources))}. A source's name is its `name`, or the stem of its file"
            )
        if missing := [source for source in sources if source not in self._owner]:
            raise ConfigError(
                f"algorithm.members: no member trains on {', '.join(map(repr, missing))} of data.train. Add it to the "
                "`sources` of a member"
            )

    # ---------------------------------------------------------------------- requirements and plans

    def needs(self) -> Needs:
        """The combined needs of all members. Samples may come from another distribution only if every member's loss
        corrects for it (feature ``correction``)."""
        roles: dict[str, tuple[RoleSpec, str]] = {}
        needs = {name: member.needs() for name, member in self.members.items()}
        for name, of_member in needs.items():
            for role in of_member.roles:
                first, other = roles.setdefault(role.name, (role, name))
                if first != role:
                    raise ConfigError(
                        f"members {other!r} and {name!r} declare the role {role.name!r} differently: {first} and {role}"
                    )
        features = [set(of_member.features) for name, of_member in needs.items() if self._samples(name)]
        return Needs(
            tuple(role for role, _ in roles.values()),
            max(member_needs.group_min for member_needs in needs.values()),
            any(member_needs.generator_logprobs for member_needs in needs.values()),
            tuple(sorted(set.intersection(*features))),
            max(member_needs.rows_min for member_needs in needs.values()),
            demonstration_sources=tuple(source for source, name in self._owner.items() if not self._samples(name)),
            greedy=any(member_needs.greedy for member_needs in needs.values()),
        )

    def columns(self, source: str) -> Collection[str]:
        return self.members[self._owner[source]].columns(source)

    def use_tokens(self, tokens: Tokens) -> None:
        for member in self.members.values():
            member.use_tokens(tokens)

    def conflicts(self, shape: OnlineShape) -> list[str]:
        return [
            re.sub(r"\balgorithm\.(?=\w)", f"algorithm.members.{name}.", line)
            for name, member in self.members.items()
            for line in member.conflicts(shape)
        ]

    # ------------------------------------------------------------------------- the calls of a step

    def assemble(self, examples: Sequence[Group]) -> tuple[Batch | None, dict[str, float]]:
        from rlhf_plugin_per_source.batch_parts import join

        groups: dict[str, list[Group]] = {name: [] for name in self.members}
        for group in examples:
            if group.row.source not in self._owner:
                raise TrainingError(
                    f"row {group.row.index} is of source {group.row.source!r}, and no member of per_source trains on it"
                )
            groups[self._owner[group.row.source]].append(group)
        parts: dict[str, Batch] = {}
        metrics: dict[str, float] = {}
        for name, own_groups in groups.items():
            examples_of_member = own_groups if self._samples(name) else [demonstration(group) for group in own_groups]
            own_batch, counts = self.members[name].assemble(examples_of_member) if own_groups else (None, {})
            metrics |= {f"{name}/{key}": value for key, value in counts.items()}
            if own_batch is not None:
                parts[name] = own_batch
        return (join(parts, self.members) if parts else None), metrics

    def annotations(self, step: int) -> list[Annotation]:
        """The annotations of all members. Each covers only the units of its member."""
        from rlhf.ops.heads import resolve_head

        annotations = []
        for name, member in self.members.items():
            for a in member.annotations(step):
                head = resolve_head(a.output)
                if head.over != "loss_mask" or head.columns:
                    raise ConfigError(
                        f"member {name!r}: its algorithm {member.name!r} reads {head.name!r} of the role {a.role!r}, "
                        "which is not computed from the tokens under loss_mask alone; per_source cannot join it. "
                        "Remove the member's option that needs this role"
                    )
                output = replace(head, name=f"{name}/{head.name}", over=f"{name}/loss_mask")
                annotations.append(replace(a, output=output, column=f"{name}/{a.column}"))
        return annotations

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        from rlhf_plugin_per_source.batch_parts import join

        parts: dict[str, Batch] = {}
        metrics: dict[str, float] = {}
        for name, member, part in self._parts(batch):
            parts[name], counts = member.credit(part)
            metrics |= {f"{name}/{key}": value for key, value in counts.items()}
        return join(parts, self.members), metrics

    def updates(self, step: int, batch: Batch | None = None) -> list[Update]:
        """One update of the policy. If a step has fewer samples than minibatches, the largest number of minibatches
        among the members is used."""
        from rlhf_plugin_per_source.loss import FACTOR

        planned = self._check_updates(step)
        plans = {name: planned_update(name, member, step) for name, member in self.members.items()}
        idle: dict[str, float] = {}
        if batch is not None:
            all_updates = {name: member.updates(step, part) for name, member, part in self._parts(batch)}
            idle = {f"{name}/{FACTOR}": 0.0 for name, updates in all_updates.items() if not updates}
            batch_updates = {name: policy_update(name, self.members[name], u) for name, u in all_updates.items() if u}
            if not batch_updates:
                return []
            planned = replace(planned, minibatches=max(update.minibatches for update in batch_updates.values()))
            # A member that trains nothing (all its samples are masked) keeps its coefficients: its loss is computed,
            # with the factor 0.
            plans = {name: batch_updates.get(name, plans[name]) for name in all_updates}
        coef = {f"{name}/{key}": value for name, u in plans.items() for key, value in u.coef.items()}
        # The reductions already contain m.weight.
        coef |= {f"{name}/{FACTOR}": m.weight_at(step) / m.weight for name, m in self._moving.items()}
        live = {f"{name}/{column}": output for name, u in plans.items() for column, output in u.live.items()}
        return [replace(planned, coef=coef | idle, live=live)]

    def finish(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        all_metrics = {f"{name}/weight": m.weight_at(step) for name, m in self._moving.items()}
        for name, member, part in self._parts(batch):
            of_member = member.finish(step, part, metrics_of(name, tuple(self.members), metrics))
            all_metrics |= {f"{name}/{key}": value for key, value in of_member.items()}
        return all_metrics

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        for member in self.members.values():
            member.evaluated(metrics)

    def model_config(self) -> dict[str, Any]:
        return {key: value for member in self.members.values() for key, value in member.model_config().items()}

    def state_dict(self) -> dict[str, Any]:
        states = {name: member.state_dict() for name, member in self.members.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, member in self.members.items():
            member.load_state_dict(state.get(name, {}))
        super().load_state_dict({name: value for name, value in state.items() if name not in self.members})

    # -------------------------------------------------------------------- derived from the options

    @property
    def _moving(self) -> dict[str, Member]:
        """The members whose weight changes."""
        return {name: m for name, m in self.config.members.items() if m.weight_end is not None}

    def _samples(self, name: str) -> bool:
        """Whether this member learns from samples, not from demonstrations."""
        return self.members[name].data == "prompts"

    def _parts(self, batch: Batch) -> Iterator[tuple[str, Algorithm, Batch]]:
        """(name, algorithm, part of the batch) for each member with units in the batch."""
        from rlhf_plugin_per_source.batch_parts import part

        for name, member in self.members.items():
            member_batch = part(batch, name)
            if member_batch is not None:
                yield name, member, member_batch

    def _check_updates(self, step: int) -> Update:
        """The passes of a step, which must be equal for all members that sample. Demonstrations use the same passes.
        Raises ConfigError if they differ."""
        sampling = [(name, member) for name, member in self.members.items() if self._samples(name)]
        updates = {name: planned_update(name, member, step) for name, member in sampling}
        passes = {name: (update.epochs, update.minibatches) for name, update in updates.items()}
        if len(set(passes.values())) > 1:
            counts = ", ".join(f"{name!r} {e} and {m}" for name, (e, m) in passes.items())
            raise ConfigError(
                f"algorithm.members: all members share each optimizer step, so their epochs and minibatches must be "
                f"equal. They are {counts}. Set --algorithm.members.NAME.epochs and "
                "--algorithm.members.NAME.minibatches"
            )
        epochs, minibatches = next(iter(passes.values()))
        return Update("policy", "loss", epochs, minibatches)


def check_member(name: str, member: Algorithm) -> None:
    """Raises ConfigError for an algorithm that cannot be a member."""
    needs = member.needs()
    roles = sorted(role.name for role in needs.roles if role.trained and role.name != "policy")
    checks = (
        (
            member.data not in ("prompts", "demonstrations"),
            f"learns from {member.data}; members learn from samples (prompts) or demonstrations",
        ),
        (member.has_members, "has members itself; a member cannot have members"),
        (bool(roles), f"trains {', '.join(roles)}; members train only the policy. Use an algorithm without a critic"),
        (
            not needs.reward or needs.demonstration_share > 0,
            "learns from samples without a reward; members need a reward",
        ),
        (
            needs.demonstrations_per_group > 0,
            "takes samples of each group from the data; members cannot. Use only one member's algorithm",
        ),
        (bool(needs.loans), "computes with the output head of another role; members cannot"),
    )
    for wrong, problem in checks:
        if wrong:
            raise ConfigError(f"member {name!r}: algorithm {member.name!r} {problem}")


def demonstration(group: Group) -> Example:
    """The data's answer, which replaces the samples of a row, as a demonstration. Raises TrainingError if the group has
    none."""
    if len(group.trajectories) != 1 or not group.trajectories[0].is_demonstration:
        raise TrainingError(
            f"row {group.row.index} of {group.row.source!r} is a demonstration, but its group holds "
            f"{len(group.trajectories)} samples; it needs the answer in the data (Turn.is_demonstration)"
        )
    turns = group.trajectories[0].turns
    ids = [token for turn in turns for token in turn.ids]
    mask = [turn.sampled for turn in turns for _ in turn.ids]
    images = joined_images((len(turn.ids), turn.images) for turn in turns)
    return Example(group.row, [TokenSequence(ids, mask, images=images)])


def planned_update(name: str, member: Algorithm, step: int) -> Update:
    """The update that a member plans for a step."""
    return policy_update(name, member, member.updates(step))


def policy_update(name: str, member: Algorithm, updates: Sequence[Any]) -> Update:
    """The only element of ``updates``, an update of the policy. Raises ConfigError for anything else."""
    if len(updates) == 1 and isinstance(updates[0], Update) and updates[0].role == "policy":
        return updates[0]
    names = ", ".join(f"{type(u).__name__}({u.role!r})" for u in updates) or "nothing"
    raise ConfigError(
        f"member {name!r}: algorithm {member.name!r} plans {names} in a step; a member makes one update of the policy "
        "and copies no weights (remove kl.snapshot_every, snapshot_every)"
    )


def metrics_of(name: str, members: Sequence[str], metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step as the member reads them when it runs alone: its own metrics without its name, and none of
    other members."""
    member_metrics = {}
    for key, value in metrics.items():
        # The longest prefix first, because each one also begins with the next.
        for start in ("policy/loss/", "policy/", ""):
            owner, slash, rest = key.removeprefix(start).partition("/")
            if key.startswith(start) and slash and owner in members:
                if owner == name:
                    member_metrics[start + rest] = value
                break
        else:
            member_metrics[key] = value
    return member_metrics
