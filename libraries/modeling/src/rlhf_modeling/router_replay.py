"""Router replay of a mixture of experts: tokens go to experts that were recorded when they were sampled (R3, Ma et al.
2025, arXiv:2510.11370). This applies to every forward pass, also when gradient checkpointing recomputes a layer.

A router chooses experts by ``torch.topk`` of its scores, and weights them by the chosen scores. Here the result of that
call is replaced by the recorded indices and the router's own scores at these indices. So the router's own code computes
the weights, with gradients, whatever its formula is. Tokens without a record keep the router's choice, bit for bit. A
router must therefore return (logits, weights, indices) and call ``topk`` once; :func:`expert_layers` tests each class
on random numbers and refuses others.

Deviation from the paper: tokens without a record (the last one of an answer, a context that the engine did not report)
are routed by the trainer. They are counted.

Shape suffixes: M computed tokens, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from rlhf.errors import CapabilityError, TrainingError
from rlhf.types import ExpertLayers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlhf_modeling.experts import named_routers

_choices: ContextVar[Tensor | None] = ContextVar("rlhf_expert_choices", default=None)
_TOKENS = 16
"""Number of tokens in the test of a router."""


@contextmanager
def replayed(choices_MLK: Tensor | None) -> Iterator[None]:
    """Context in which :class:`Routers` send the M tokens to these experts. Negative numbers: the routers choose."""
    token = _choices.set(choices_MLK)
    try:
        yield
    finally:
        _choices.reset(token)


def replayed_choices() -> Tensor | None:
    """The choices of the enclosing context."""
    return _choices.get()


class Routers:
    """The routers of a loaded model, in the order of its layers."""

    def __init__(self, module: nn.Module, layers: ExpertLayers) -> None:
        self.layers = layers
        self._recorded: dict[int, Tensor] | None = None
        for number, (_, router) in enumerate(named_routers(module)):
            router.forward = partial(self._forward, router.forward, number)

    def _forward(self, forward: Callable[..., Any], number: int, *args: Any, **options: Any) -> Any:
        choices_MLK = _choices.get()
        if choices_MLK is None:
            out = forward(*args, **options)
        else:
            with _Choice(choices_MLK[:, number].long()):
                out = forward(*args, **options)
        if self._recorded is not None:
            self._recorded[number] = out[2]
        return out

    @contextmanager
    def recorded(self) -> Iterator[Callable[[], Tensor]]:
        """Context in which each forward pass is recorded. Yields a function that returns the choices of the latest one,
        int64 [M, L, K]."""
        recorded: dict[int, Tensor] = {}
        self._recorded = recorded
        try:
            yield lambda: torch.stack([recorded[n] for n in range(len(self.layers.layers))], 1)
        finally:
            self._recorded = None


class _Choice(TorchFunctionMode):
    """Context in which ``topk`` returns these indices."""

    calls = 0

    def __init__(self, choices_MK: Tensor) -> None:
        super().__init__()
        self.choices_MK = choices_MK

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        self.calls += 1
        own_MK = result[1]
        if own_MK.shape != self.choices_MK.shape:
            raise TrainingError(
                f"the recorded experts have the shape {tuple(self.choices_MK.shape)} [tokens, experts per token], but "
                f"the router chooses experts of the shape {tuple(own_MK.shape)}"
            )
        indices_MK = torch.where(self.choices_MK < 0, own_MK, self.choices_MK)
        return torch.return_types.topk((args[0].gather(-1, indices_MK), indices_MK))


def expert_layers(module: nn.Module) -> ExpertLayers:
    """The layers with experts of a model, which may be on the meta device. Raises CapabilityError if it has no experts,
    or a router whose choices cannot be replaced."""
    model, routers = type(module).__name__, named_routers(module)
    if not routers:
        raise CapabilityError(
            f"trainer.router_replay: {model} has no experts (transformers declares no routers for it). Remove the "
            "option."
        )
    config: Any = module.config
    hidden = config.get_text_config().hidden_size
    kinds = {(type(router), *(p.shape for p in router.parameters())): router for _, router in routers}
    sizes = {_sizes(router, model, hidden) for router in kinds.values()}
    numbers = [re.search(r"\blayers\.(\d+)\.", name) for name, _ in routers]
    if len(sizes) > 1 or None in numbers:
        raise CapabilityError(
            f"trainer.router_replay: the layers of {model} have different numbers of experts, or are not numbered. "
            "Remove the option."
        )
    [(experts, chosen)] = sizes
    return ExpertLayers(tuple(int(n[1]) for n in numbers if n is not None), experts, chosen)


@torch.no_grad()
def _sizes(router: nn.Module, model: str, hidden: int) -> tuple[int, int]:
    """(number of experts, experts per token), from a test on random numbers."""
    draw = torch.Generator().manual_seed(0)
    copy = deepcopy(router).to_empty(device="cpu").float().eval()
    for tensor in (*copy.parameters(), *copy.buffers()):
        if tensor.is_floating_point():
            tensor.normal_(generator=draw)
        else:
            tensor.zero_()
    hidden_MH = torch.randn(_TOKENS, hidden, generator=draw)
    try:
        logits_ME, _, own_MK = outputs = copy(hidden_MH)
        experts, chosen = logits_ME.shape[-1], own_MK.shape[-1]
        others_MK = torch.rand(_TOKENS, experts, generator=draw).argsort(-1)[:, :chosen]
        with _Choice(others_MK) as choice:
            trial = copy(hidden_MH)
        # The first token has no record, the others are sent to the router's own choices: nothing may change.
        with _Choice(torch.where(torch.arange(_TOKENS)[:, None] < 1, -1, own_MK)):
            replay = copy(hidden_MH)
        fits = choice.calls == 1 and torch.equal(trial[2], others_MK) and not torch.equal(trial[1], outputs[1])
        fits = fits and all(torch.equal(a, b) for a, b in zip(outputs, replay, strict=True))
    except Exception:  # any exception: the router's code is not ours
        fits = False
    if not fits:
        raise CapabilityError(
            f"trainer.router_replay: {type(router).__name__} of {model} is not a router whose choices can be replaced. "
            "It must return (logits, weights, indices) and choose with one torch.topk. Remove the option."
        )
    return int(experts), int(chosen)
