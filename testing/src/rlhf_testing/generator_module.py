"""Checks of how a generator treats the module of its trainer."""

from __future__ import annotations

from typing import Any

import torch
from rlhf.errors import RlhfError
from rlhf.interfaces.generator import TakesModule
from rlhf.types import Sampling

from rlhf_testing.compare import same_bits
from rlhf_testing.contract import Nonconformance, expect


class ModuleChecks:
    """A mixin of :class:`rlhf_testing.generator.GeneratorContract`, which defines the attributes declared here."""

    cls: Any
    make: Any
    requests: Any
    grid: Any
    label: Any

    def test_packed_attention(self) -> None:
        """With ``TakesModule``, the samples are the same if the module has packed attention, as that of a trainer that
        lays several sequences into a row."""
        if not issubclass(self.cls, TakesModule):
            return
        from rlhf_modeling.attention import use_packed_attention

        for config in self.grid():
            label, s = self.label(config), self.make(config)
            requests = self.requests(Sampling(6, ignore_eos=True))
            plain = s.turns(requests, label)
            use_packed_attention(s.source.module)
            s.generator.load(s.source, 0)
            try:
                turns = s.turns(requests, label)
            except RlhfError as error:
                raise Nonconformance(f"{label} cannot sample from a module with packed attention: {error}") from error
            equal = [t.ids for t in turns] == [t.ids for t in plain]
            expect(equal, f"{label} samples of a module with packed attention differ from those with plain attention")

    def test_source_untouched(self) -> None:
        """Generating does not change the trainer's weights, modes and gradients or the global random state."""
        for config in self.grid():
            label, s = self.label(config), self.make(config)
            module = s.source.module
            module.train()
            for p in module.parameters():
                p.grad = torch.ones_like(p)
            weights = {k: v.clone() for k, v in module.state_dict().items()}
            modes = [m.training for m in module.modules()]
            needs = [p.requires_grad for p in module.parameters()]
            hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
            attention = module.config._attn_implementation
            state = torch.get_rng_state()
            s.turns(self.requests(Sampling(6)), label)
            for name, values in module.state_dict().items():
                expect(same_bits(values, weights[name]), f"{label} generating changed the weight {name!r}")
            expect(modes == [m.training for m in module.modules()], f"{label} generating changed train / eval modes")
            expect(needs == [p.requires_grad for p in module.parameters()], f"{label} generating changed requires_grad")
            counts = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
            expect(hooks == counts, f"{label} generating left hooks on the module")
            expect(module.config._attn_implementation == attention, f"{label} generating changed the model's attention")
            grads = all(p.grad is not None and bool((p.grad == 1).all()) for p in module.parameters())
            expect(grads, f"{label} generating changed accumulated gradients")
            equal = torch.equal(state, torch.get_rng_state())
            expect(equal, f"{label} generating draws from torch's global random state: use the request's seed")
