"""Does it fit, and if not, why: the arithmetic of the fullest moment."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.interfaces.launcher import GENERATOR

from rlhf_plugin_plan import heap
from rlhf_plugin_plan.engines import cache_per_token, held_by_engine, reserved_cache
from rlhf_plugin_plan.layout import EngineLayout, Layout, RoleLayout
from rlhf_plugin_plan.phases import GroupPlan, Moment, plan_groups, sum_of
from rlhf_plugin_plan.sizes import text


@dataclass(frozen=True, slots=True)
class Shortage:
    """One device group in one phase whose memory does not suffice, or a cache that holds no whole sequence."""

    where: str
    """The group's title."""
    phase: str
    missing: int
    """Bytes."""
    message: str
    """One line."""
    arithmetic: tuple[str, ...]
    """One line per part."""


@dataclass(frozen=True, slots=True)
class Plan:
    layout: Layout
    groups: tuple[GroupPlan, ...]
    shortages: tuple[Shortage, ...]

    @property
    def judged(self) -> bool:
        """Whether the memory of a device is known."""
        return self.layout.machine.memory is not None

    @property
    def fits(self) -> bool | None:
        """None where the memory is not known."""
        return not self.shortages if self.judged else None

    @property
    def missing(self) -> int:
        """Bytes, over all devices and phases: what a change has to lower."""
        return sum(s.missing for s in self.shortages)


def make_plan(layout: Layout) -> Plan:
    """Every device in every phase, and what is missing."""
    groups = tuple(plan_groups(layout))
    shortages = [s for g in groups for m in g.moments.values() if (s := _shortage(layout, g, m)) is not None]
    shortages += [s for g in groups for m in g.moments.values() if (s := _host(layout, g, m)) is not None]
    if (cache := _cache(layout)) is not None:
        shortages.append(cache)
    return Plan(layout, groups, tuple(shortages))


def _shortage(layout: Layout, group: GroupPlan, moment: Moment) -> Shortage | None:
    memory = layout.machine.memory
    if memory is None or moment.total <= memory:
        return None
    missing = moment.total - memory
    message = (
        f"{group.group.title}: the phase {moment.phase!r} needs {text(moment.total)} of a {_device(layout)}'s "
        f"{text(memory)}, {text(missing)} more than there are"
    )
    return Shortage(group.group.title, moment.phase, missing, message, tuple(arithmetic(layout, moment)))


def _host(layout: Layout, group: GroupPlan, moment: Moment) -> Shortage | None:
    """What is put aside in host memory, by all devices of a node."""
    machine = layout.machine
    devices = min(machine.devices_per_node, group.group.count)
    if machine.host_memory is None or moment.host * devices <= machine.host_memory:
        return None
    missing = moment.host * devices - machine.host_memory
    message = (
        f"{group.group.title}: in the phase {moment.phase!r} {devices} devices of a node put {text(moment.host)} each "
        f"in host memory, {text(moment.host * devices)} of {text(machine.host_memory)}: {text(missing)} too much"
    )
    return Shortage(group.group.title, moment.phase, missing, message, ())


def _cache(layout: Layout) -> Shortage | None:
    engines, memory = layout.engines, layout.machine.memory
    if engines is None or memory is None:
        return None
    space = reserved_cache(engines, layout.machine)
    each = cache_per_token(engines.shape, engines.footprint)
    need = int(each * engines.longest)
    if space is None or space >= need:
        return None
    message = (
        f"{GENERATOR}: its cache has room for {int(space / each) if each else 0} tokens ({text(space)} a device), the "
        f"longest sequence has {engines.longest} ({text(need)})"
    )
    return Shortage(GENERATOR, "generate", need - space, message, (_engine_weights(engines), _engine_cache(layout)))


def _device(layout: Layout) -> str:
    return "host" if layout.machine.device == "cpu" else "device"


# ------------------------------------------------------------------------------------ arithmetic


def arithmetic(layout: Layout, moment: Moment) -> list[str]:
    """``role: part size = how it comes about``, the largest first."""
    lines = []
    for name, parts in sorted(moment.rows.items(), key=lambda row: -sum_of(row[1])):
        for part, size in sorted(parts.items(), key=lambda p: -p[1]):
            if size < 2**20:
                continue
            how = _how(layout, name, part)
            lines.append(f"{name} {part} {text(size)}" + (f" = {how}" if how else ""))
    return lines


def _how(layout: Layout, name: str, part: str) -> str:
    if name == GENERATOR and layout.engines is not None:
        return {"weights": _engine_weights, "cache": lambda _: _engine_cache(layout)}.get(part, lambda _: "")(
            layout.engines
        )
    if name not in {r.name for r in layout.roles}:
        return {"process": "before any model", "working": "what libraries allocate at first use"}.get(part, "")
    role = layout.role(name)
    s, shape = role.sharding, role.shape
    on = {
        "weights": _product(shape.parameters, s.weight_bytes, s.weight_ranks, s.layer_ranks),
        "gradients": _product(role.trained_parameters, s.gradient_bytes, s.gradient_ranks, s.layer_ranks),
        "optimizer": _product(
            role.trained_parameters,
            s.optimizer_bytes + s.master_bytes + s.average_bytes,
            s.optimizer_ranks,
            s.layer_ranks,
        ),
        "activations": _activations(role),
        "logits": f"chunks of at most {s.logits} logits x 4 bytes, several copies",
        "process": "before it holds a model",
        "allocator": _allocator(layout.machine.device),
    }
    more = ""
    if part == "weights":
        more += f", and once more over {s.second_ranks} ranks" if s.second_ranks else ""
        more += f" + {text(role.borrowed)} of heads that others lend" if role.borrowed else ""
    return on.get(part, "") + more


def _product(count: int, each: float, ranks: int, layer_ranks: int = 1) -> str:
    over = f" / {ranks} ranks" if ranks > 1 else ""
    part = f" of layers in {layer_ranks} parts" if layer_ranks > 1 else ""
    return f"{_count(count)} parameters{part} x {each:g} bytes{over}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} G" if parameters >= 1e9 else f"{parameters / 1e6:.4g} M"


def _activations(role: RoleLayout) -> str:
    layers = f"{role.micro_tokens} computed tokens x {len(role.shape.layers)} layers"
    if role.gradient_checkpointing:
        return f"{layers}, inputs only, and one layer whole where that is the peak"
    return layers + (f", keys and values x {role.repeats:.3g}" if role.repeats > 1 else "")


def _allocator(device: str) -> str:
    if device == "cpu":
        return f"{heap.HOLES:.0%} of the heap at its largest, and what other moments had in it"
    return f"{heap.CHURN:.0%} of what comes and goes"


def _engine_weights(engines: EngineLayout) -> str:
    f = engines.footprint
    return _product(held_by_engine(engines.shape, f), f.weight_bytes, 1) + (
        f" / {f.tensor_parallel * f.pipeline_parallel} devices" if f.tensor_parallel * f.pipeline_parallel > 1 else ""
    )


def _engine_cache(layout: Layout) -> str:
    engines = layout.engines
    assert engines is not None
    f, each = engines.footprint, cache_per_token(engines.shape, engines.footprint)
    if f.kv_space is not None:
        return "reserved at the start"
    if f.share is not None:
        return f"what {f.share:g} of the device leaves, {text(each)} a token"
    rows = min(f.rows, engines.samples)
    return f"{rows} samples x {engines.longest} tokens x {text(each)}"
