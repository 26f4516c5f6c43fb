"""The cases that two ranks of a trainer run for :class:`rlhf_testing.trainer_ranks.TrainerRanksContract`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file

from rlhf_testing.image_batches import image_batch, image_shares
from rlhf_testing.rank_batches import STEPS
from rlhf_testing.rank_case import farthest, held, same
from rlhf_testing.suite_losses import LentLoss, NllLoss, TokenLoss, ValueLoss
from rlhf_testing.token_parts import run_case
from rlhf_testing.trainer_rank_setup import DORA as DORA
from rlhf_testing.trainer_rank_setup import FAMILY, parted
from rlhf_testing.trainer_rank_state import StateCases


class TrainerRankCases(StateCases):
    """Subclass it in a module that is also the ranks' program (:meth:`~rlhf_testing.rank_case.RankCases.main`)."""

    def case_equal(self, layout: str) -> Any:
        """Gradients of the first step, five steps, scores, and coverage."""
        one = self.trainer(layout, ema_decay=0.9, weight_decay=0.1, logits_chunk=500)
        first = self.mine(0)
        names = self.first_gradients(one, layout, first, TokenLoss())
        done = self.steps(one, range(STEPS))
        self.keep(f"weights-{layout}", held(one))
        self.keep(f"average-{layout}", held(one, "ema"))
        scores = {str(n): s["logprobs"] for n, s in enumerate(one.forward(self.mine(9), ("logprobs",)))}
        save_file(scores, self.folder / f"scores-{layout}-{self.rank}.safetensors")
        return {
            "steps": done,
            "micros": len(first),
            "names": names,
            "coverage": one.coverage(),
            "evaluated": one.evaluate(self.mine(9), TokenLoss(), {}, {})["loss"][0],
            "streamed": len(list(one.weights())),
            **self.facts(one),
        }

    def case_variant(self, variant: str) -> Any:
        """Three steps, and the gradients before the first."""
        of_role, options = parted(self.variants[variant])
        one = self.make(self.here(**of_role), **options)
        self.first_gradients(one, variant, self.mine(0), TokenLoss())
        done = self.steps(one, range(3))
        self.keep(f"weights-{variant}", held(one))
        return {"steps": done}

    def case_images(self, image: str) -> Any:
        """Gradients of the first step and three steps, where one rank has images and the other none."""
        path = self.folder / "images"
        own = image_shares(image_batch(path, FAMILY), self.ranks)[self.rank]
        of_role, options = parted(self.images[image])
        spec = replace(self.here(**of_role), path=str(path), images=True)
        one, other = (self.make(spec, **options) for _ in range(2))
        self.first_gradients(one, f"images-{image}", own, NllLoss())
        done = [one.update(own, NllLoss(), {}, {})[1].grad_norm for _ in range(3)]
        self.keep(f"weights-images-{image}", held(one))
        one.save(self.folder / f"images-{image}")
        other.load(self.folder / f"images-{image}")
        return {"norms": done, "resumed": same(held(one), held(other))}

    def case_base(self, layout: str) -> Any:
        """The view without adapters, after the head was trained with them, and the head that it lends; also where the
        last layout resumed."""
        options: dict[str, Any] = {"lora": DORA, "ema_decay": 0.9}
        one = self.trainer(layout, **options)
        first, weights = one.forward(self.mine(9), ("logprobs",)), held(one, "base")
        lent = [h.weight_VH.clone() for h in one.lend_head("base")]
        self.steps(one, range(2))
        one.save(self.folder / f"base-{layout}")
        other = self.trainer([*self.layouts][-1], **options)
        other.load(self.folder / f"base-{layout}")
        found = []
        for of in (one, other):
            live = held(of)
            again = of.forward(self.mine(9), ("logprobs",), "base")
            found.append(
                {
                    "off": farthest(first, again),
                    "moved": sum(not torch.equal(live[n], t) for n, t in weights.items()),
                    "base": same(weights, held(of, "base")),
                    "live": same(live, held(of)) and same(live, held(one)),
                    "average": same(held(one, "ema"), held(of, "ema")),
                    "lent": all(torch.equal(a, h.weight_VH) for a, h in zip(lent, of.lend_head("base"), strict=True)),
                }
            )
        return found

    def case_dropout(self, layout: str) -> Any:
        """Gradients of several micro-batches per rank, each with its own mask."""
        one = self.trainer(layout, lora={"rank": 2, "dropout": 0.5})
        self.first_gradients(one, f"dropout-{layout}", self.mine(0), TokenLoss())
        return len(self.mine(0))

    def case_critic(self, layout: str) -> Any:
        """A scalar head that is not tied to the embedding, with a filler micro-batch on one rank."""
        one = self.trainer(layout, self.here(head="scalar"))
        few = self.mine(4, ValueLoss(), units=3, budget=12)
        self.first_gradients(one, f"critic-{layout}", few, ValueLoss())
        return {"fillers": ["filler" in m.unit for m in few], "steps": self.steps(one, range(3), ValueLoss())}

    def case_frozen(self, layout: str) -> Any:
        """A frozen role loads whole weights from a sender."""
        source = self.trainer(self.usual)
        self.steps(source, range(2))
        one, again = (self.trainer(layout, self.here(trained=False)) for _ in range(2))
        before = one.forward(self.mine(9), ("logprobs",))
        one.load_weights(source.weights(every_rank=True))
        after, want = (of.forward(self.mine(9), ("logprobs",)) for of in (one, source))
        one.save(self.folder / f"frozen-{layout}")
        again.load(self.folder / f"frozen-{layout}")
        return {
            "moved": farthest(before, want),
            "left": farthest(after, want),
            "bits": same(held(one), held(source)),
            "saved": same(held(one), held(again)),
            **self.facts(one),
        }

    def case_lent(self, layout: str) -> Any:
        """A frozen role lends its head, which is tied to the embedding. Each rank computes with it on its share."""
        lender = self.trainer(layout, replace(self.here(trained=False), path=str(self.folder / "lender")))
        one = self.trainer(layout, logits_chunk=500)
        heads = list(lender.lend_head())
        whole = heads or [None]
        torch.distributed.broadcast_object_list(whole, 0)
        one.borrow_head("lender", whole[0])
        micros = self.mine(0, LentLoss())
        hidden = [found["hidden"] for found in lender.forward(micros, ("hidden",))]
        micros = [m.with_column("tok", "lent_hidden", h) for m, h in zip(micros, hidden, strict=True)]
        sums = one.accumulate(micros, LentLoss(), {}, {})
        self.keep(f"gradients-lent-{layout}", one.gradients())
        return {"heads": len(heads), "loss": sums["loss"][0]}

    def case_experts(self, layout: str) -> Any:
        """Experts are one tensor here, divided over the ranks. They are sent and loaded one by one, as in
        checkpoints."""
        one = self.trainer(layout, replace(self.here(trained=False), path=str(self.folder / "experts")))
        once = held(one)
        self.keep(f"experts-{layout}", once)
        one.load_weights((name, 2 * tensor) for name, tensor in once.items())
        self.keep(f"experts-twice-{layout}", held(one))
        return len(one.parameters)

    def case_alone(self, layout: str) -> Any:
        """A recurrent model is computed one length at a time. The ranks have different numbers of lengths."""
        one = self.trainer(layout, replace(self.here(), path=str(self.folder / "recurrent")))
        first = self.mine(0)
        self.first_gradients(one, f"alone-{layout}", first, TokenLoss())
        return one.loaded.layout, [len(set(micro.lens_B.tolist())) for micro in first]

    def case_rows(self, row: str) -> Any:
        """Two ranks divide the tokens of rows."""
        return self.divided(row, 2)

    def case_four(self, parts: str, row: str) -> Any:
        """Two of four ranks divide the tokens of rows, or all four."""
        return self.divided(row, int(parts))

    def divided(self, row: str, parts: int) -> Any:
        options = self.layouts[self.rows.get(row, [*self.layouts][-1])]
        return run_case(row, partial(self.make, **options), self.here(), self.folder, parts)
