"""What a role adds to its device while it computes, and what its process keeps afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_plugin_plan import formulas, heap, logits_peak
from rlhf_plugin_plan.heap import Size, total
from rlhf_plugin_plan.layout import RoleLayout

Parts = dict[str, int]
Moment = Mapping[str, Size]


def sum_of(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def forwarding(role: RoleLayout, device: str) -> Parts:
    """What a forward pass without gradient adds at its peak: in the layers, or in the head."""
    moments = _forward(role, device)
    sizes = [total(m.values()) for m in moments]
    return _fullest(moments) | {"allocator": heap.allocator(sizes, Size(), device)}


def training(role: RoleLayout, device: str) -> tuple[Parts, int]:
    """(What forward, backward and step add at their peak, bytes more on the host): gradients of earlier micro-batches,
    what the layers keep, and the largest of four moments: end of the forward pass, the head's backward, a layer's, the
    step."""
    s, moments = role.sharding, _train(role, device)
    added = _fullest(moments)
    sizes = [total(m.values()) for m in moments]
    added["allocator"] = heap.allocator(sizes, _holed(_states(role), moments), device)
    away = s.host_optimizer and not s.keeps_gradients
    return added, formulas.gradients(role.trained_parameters, s) if away else 0


def left(role: RoleLayout) -> int:
    """Bytes of a CPU's heap, beside the optimizer's states, that the role's process keeps after its fullest phase."""
    return max(left_by_forward(role), left_by_training(role))


def left_by_forward(role: RoleLayout) -> int:
    """After annotations and scores."""
    if not (role.annotated or role.rewards):
        return 0
    return heap.kept([total(m.values()) for m in _forward(role, "cpu")], Size())


def left_by_training(role: RoleLayout) -> int:
    if not role.trained:
        return 0
    moments = _train(role, "cpu")
    return heap.kept([total(m.values()) for m in moments], _holed(_states(role), moments))


def _fullest(moments: Sequence[Moment]) -> Parts:
    most = max(moments, key=lambda moment: total(moment.values()).all)
    return {part: size.all for part, size in most.items() if size.all}


def _forward(role: RoleLayout, device: str) -> list[Moment]:
    s, shape = role.sharding, role.shape
    always = [formulas.gathered(shape, s), formulas.casts(shape, s)]
    head = logits_peak.head_forward(shape, role.micro_tokens, s, role.annotated or role.outputs)
    return [{"working": total([*always, _layer(role, device)])}, {"working": total(always), "logits": head}]


def _train(role: RoleLayout, device: str) -> list[Moment]:
    s, shape, tokens, again = role.sharding, role.shape, role.micro_tokens, role.gradient_checkpointing
    kept = formulas.activations(shape, tokens, role.longest, s, device, checkpointing=again, repeats=role.repeats)
    computed = kept
    if again:
        layers = [formulas.layer_kept(shape, x, tokens, role.longest, s, device, role.repeats) for x in shape.layers]
        computed = total([kept, max(layers, key=lambda size: size.all)])
    casts, gathered, none = formulas.casts(shape, s), formulas.gathered(shape, s), Size()
    copied = none if again else casts
    tied = shape.tied and shape.outputs == shape.vocabulary and not s.adapter_rank
    gradients = none
    if not s.host_optimizer:
        alone = formulas.gradients(role.scattered_parameters, s)
        gradients = Size(formulas.gradients(role.trained_parameters, s), alone)
    moments = (
        (kept, logits_peak.head_forward(shape, tokens, s, role.outputs), casts),
        (kept, logits_peak.head_backward(shape, tokens, s, role.outputs), copied),
        (
            computed,
            logits_peak.head_gradient(shape) if tied else none,
            total([copied, _layer(role, device), formulas.weight_gradient(shape, s)]),
        ),
    )
    stepping = {"gradients": gradients, "working": formulas.step(shape, s, role.trained_matrices)}
    return [
        *(
            {"gradients": gradients, "activations": live, "logits": head, "working": total([gathered, working])}
            for live, head, working in moments
        ),
        stepping,
    ]


def _states(role: RoleLayout) -> Size:
    """The optimizer's."""
    if role.sharding.host_optimizer:
        return Size()
    counts = (role.trained_parameters, role.scattered_parameters)
    return Size(*(formulas.optimizer(n, role.sharding, min(n, role.trained_matrices)) for n in counts))


def _holed(states: Size, moments: Sequence[Moment]) -> Size:
    """The optimizer's states as far as they may have holes, on a CPU. They are made in the first step, when its
    activations have gone and its gradients are there: what is free among them is no more than what went."""
    went = max(total(size for part, size in moment.items() if part != "gradients").heap for moment in moments)
    return Size(states.all, min(states.heap, int(went / heap.HOLES)))


def _layer(role: RoleLayout, device: str) -> Size:
    """The largest temporaries of any layer."""
    shape, tokens, longest = role.shape, role.micro_tokens, role.longest
    bf16 = role.sharding.bf16
    sizes = [formulas.layer_working(x, shape.hidden, tokens, longest, bf16=bf16, device=device) for x in shape.layers]
    return max(sizes, key=lambda size: size.all)
