"""The cases that two ranks of a trainer run for :class:`tests.support.trainer_ranks.TrainerRanksContract`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rlhf_testing.suite_losses import LentLoss, TokenLoss, ValueLoss
from safetensors.torch import save_file

from tests.support.image_batches import image_batch, image_shares
from tests.support.losses import NllLoss
from tests.support.rank_batches import STEPS
from tests.support.rank_case import farthest, held, same
from tests.support.token_parts import run_case
from tests.support.trainer_rank_setup import DORA as DORA
from tests.support.trainer_rank_setup import FAMILY, parted
from tests.support.trainer_rank_state import StateCases


class TrainerRankCases(StateCases):
    """Subclass it in a module that is also the ranks' program (:meth:`~tests.support.rank_case.RankCases.main`)."""

    def case_equal(self, layout: str) -> Any:
        """Gradients of the first step, five steps, scores, and coverage."""
        trainer = self.trainer(layout, ema_decay=0.9, weight_decay=0.1, logits_chunk=500)
        first = self.mine(0)
        names = self.first_gradients(trainer, layout, first, TokenLoss())
        steps = self.steps(trainer, range(STEPS))
        self.keep(f"weights-{layout}", held(trainer))
        self.keep(f"average-{layout}", held(trainer, "ema"))
        scores = {str(n): s["logprobs"] for n, s in enumerate(trainer.forward(self.mine(9), ("logprobs",)))}
        save_file(scores, self.folder / f"scores-{layout}-{self.rank}.safetensors")
        return {
            "steps": steps,
            "micros": len(first),
            "names": names,
            "coverage": trainer.coverage(),
            "evaluated": trainer.evaluate(self.mine(9), TokenLoss(), {}, {})["loss"][0],
            "streamed": len(list(trainer.weights())),
            "trained": trainer.facts().trained_parameters,
            **self.facts(trainer),
        }

    def case_variant(self, variant: str) -> Any:
        """Three steps, and the gradients before the first."""
        of_role, options = parted(self.variants[variant])
        trainer = self.make(self.here(**of_role), **options)
        self.first_gradients(trainer, variant, self.mine(0), TokenLoss())
        steps = self.steps(trainer, range(3))
        self.keep(f"weights-{variant}", held(trainer))
        return {"steps": steps}

    def case_images(self, image: str) -> Any:
        """Gradients of the first step and three steps, where one rank has images and the other none."""
        path = self.folder / "images"
        micros = image_shares(image_batch(path, FAMILY), self.ranks)[self.rank]
        of_role, options = parted(self.images[image])
        spec = replace(self.here(**of_role), path=str(path), images=True)
        trainer, other = (self.make(spec, **options) for _ in range(2))
        self.first_gradients(trainer, f"images-{image}", micros, NllLoss())
        norms = [trainer.update(micros, NllLoss(), {}, {})[1].grad_norm for _ in range(3)]
        self.keep(f"weights-images-{image}", held(trainer))
        trainer.save(self.folder / f"images-{image}")
        other.load(self.folder / f"images-{image}")
        return {"norms": norms, "resumed": same(held(trainer), held(other))}

    def case_base(self, layout: str) -> Any:
        """The view without adapters, after the head was trained with them, and the head that it lends; also where the
        last layout resumed."""
        options: dict[str, Any] = {"lora": DORA, "ema_decay": 0.9}
        trainer = self.trainer(layout, **options)
        first, weights = trainer.forward(self.mine(9), ("logprobs",)), held(trainer, "base")
        heads = [h.weight_VH.clone() for h in trainer.lend_head("base")]
        self.steps(trainer, range(2))
        trainer.save(self.folder / f"base-{layout}")
        other = self.trainer([*self.layouts][-1], **options)
        other.load(self.folder / f"base-{layout}")
        reports = []
        for instance in (trainer, other):
            live = held(instance)
            repeat = instance.forward(self.mine(9), ("logprobs",), "base")
            reports.append(
                {
                    "off": farthest(first, repeat),
                    "moved": sum(not torch.equal(live[n], t) for n, t in weights.items()),
                    "base": same(weights, held(instance, "base")),
                    "live": same(live, held(instance)) and same(live, held(trainer)),
                    "average": same(held(trainer, "ema"), held(instance, "ema")),
                    "lent": all(
                        torch.equal(a, h.weight_VH) for a, h in zip(heads, instance.lend_head("base"), strict=True)
                    ),
                }
            )
        return reports

    def case_dropout(self, layout: str) -> Any:
        """Gradients of several micro-batches per rank, each with its own mask."""
        trainer = self.trainer(layout, lora={"rank": 2, "dropout": 0.5})
        self.first_gradients(trainer, f"dropout-{layout}", self.mine(0), TokenLoss())
        return len(self.mine(0))

    def case_critic(self, layout: str) -> Any:
        """A scalar head that is not tied to the embedding, with a filler micro-batch on one rank."""
        trainer = self.trainer(layout, self.here(head="scalar"))
        few = self.mine(4, ValueLoss(), units=3, budget=12)
        self.first_gradients(trainer, f"critic-{layout}", few, ValueLoss())
        return {"fillers": ["filler" in m.unit for m in few], "steps": self.steps(trainer, range(3), ValueLoss())}

    def case_frozen(self, layout: str) -> Any:
        """A frozen role loads whole weights from a sender."""
        source = self.trainer(self.default_layout)
        self.steps(source, range(2))
        trainer, copy = (self.trainer(layout, self.here(trained=False)) for _ in range(2))
        first = trainer.forward(self.mine(9), ("logprobs",))
        trainer.load_weights(source.weights(every_rank=True))
        after, want = (instance.forward(self.mine(9), ("logprobs",)) for instance in (trainer, source))
        trainer.save(self.folder / f"frozen-{layout}")
        copy.load(self.folder / f"frozen-{layout}")
        return {
            "moved": farthest(first, want),
            "left": farthest(after, want),
            "bits": same(held(trainer), held(source)),
            "saved": same(held(trainer), held(copy)),
            **self.facts(trainer),
        }

    def case_lent(self, layout: str) -> Any:
        """A frozen role lends its head, which is tied to the embedding. Each rank computes with it on its share."""
        lender = self.trainer(layout, replace(self.here(trained=False), path=str(self.folder / "lender")))
        trainer = self.trainer(layout, logits_chunk=500)
        heads = list(lender.lend_head())
        objects = heads or [None]
        torch.distributed.broadcast_object_list(objects, 0)
        trainer.borrow_head("lender", objects[0])
        micros = self.mine(0, LentLoss())
        hidden = [outputs["hidden"] for outputs in lender.forward(micros, ("hidden",))]
        micros = [m.with_column("tok", "lent_hidden", h) for m, h in zip(micros, hidden, strict=True)]
        sums = trainer.accumulate(micros, LentLoss(), {}, {})
        self.keep(f"gradients-lent-{layout}", trainer.gradients())
        return {"heads": len(heads), "loss": sums["loss"][0]}

    def case_experts(self, layout: str) -> Any:
        """Experts are one tensor here, divided over the ranks. They are sent and loaded one by one, as in
        checkpoints."""
        trainer = self.trainer(layout, replace(self.here(trained=False), path=str(self.folder / "experts")))
        initial = held(trainer)
        self.keep(f"experts-{layout}", initial)
        trainer.load_weights((name, 2 * tensor) for name, tensor in initial.items())
        self.keep(f"experts-twice-{layout}", held(trainer))
        return len(trainer.parameters)

    def case_alone(self, layout: str) -> Any:
        """A recurrent model is computed one length at a time. The ranks have different numbers of lengths."""
        trainer = self.trainer(layout, replace(self.here(), path=str(self.folder / "recurrent")))
        first = self.mine(0)
        self.first_gradients(trainer, f"alone-{layout}", first, TokenLoss())
        return trainer.loaded_model.layout, [len(set(micro.lens_B.tolist())) for micro in first]

    def case_rows(self, row: str) -> Any:
        """Two ranks divide the tokens of rows."""
        return self.divided(row, 2)

    def case_four(self, parts: str, row: str) -> Any:
        """Two of four ranks divide the tokens of rows, or all four."""
        return self.divided(row, int(parts))

    def divided(self, row: str, parts: int) -> Any:
        options = self.layouts[self.rows.get(row, [*self.layouts][-1])]
        return run_case(row, partial(self.make, **options), self.here(), self.folder, parts)
