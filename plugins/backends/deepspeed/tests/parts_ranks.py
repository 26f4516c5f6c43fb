"""One rank of 2 or 4 that divide layers in two. It runs the cases one after another (:mod:`rank_case`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from parts_names import LORA, LORA_STAGE, MODELS, MUON, REFUSED, STAGES, VARIANTS
from rank_case import FOLDER, RANK, RANKS, Cases, adder, held, here, keep, run, same, stepper
from rlhf.errors import CapabilityError
from rlhf.interfaces import ModelSpec
from rlhf.weights.fingerprint import fingerprint
from rlhf_modeling.adapters import LoraOptions
from rlhf_testing.suite_losses import InfiniteGradient, InfiniteLoss, LentLoss, TokenLoss, ValueLoss
from safetensors.torch import save_file
from zero_cases import STEPS, batch, shares
from zero_cases import trainer as any_trainer

PARTS = 2
REPLICA, REPLICAS = RANK // PARTS, RANKS // PARTS
BOTH: Cases = {}
PAIR: Cases = {}
on_both, on_pair = adder(BOTH), adder(PAIR)


def trainer(of: ModelSpec, **options: Any) -> Any:
    return any_trainer(of, tensor_parallel=PARTS, **options)


def mine(number: int, loss: Any = None) -> list[Any]:
    """The micro-batches of this rank: the same on all ranks of a replica."""
    return shares(batch(number, loss), REPLICAS)[REPLICA]


steps = stepper(mine)


def first_gradients(of: Any, name: str, loss: Any = None) -> None:
    loss = loss or TokenLoss()
    of.accumulate(mine(0, loss), loss, {}, {})
    keep(f"gradients-{name}", of.gradients())
    of.zero_grad()


def own_prints(of: Any) -> dict[str, str]:
    return {name: fingerprint(p.detach()) for name, p in of.parameters.items()}


for stage in STAGES:

    @on_both(f"equal-{stage}")
    def equal(stage: int = stage) -> Any:
        """Gradients of the first step, five steps, scores, and the tensors that a rank holds."""
        one = trainer(here(), stage=stage, ema_decay=0.9, weight_decay=0.1, logits_chunk=500)
        first_gradients(one, f"{stage}")
        done = steps(one, range(STEPS))
        keep(f"weights-{stage}", held(one))
        keep(f"average-{stage}", held(one, "ema"))
        scores = one.forward(mine(9), ("logprobs",))
        save_file({str(n): s["logprobs"] for n, s in enumerate(scores)}, FOLDER / f"scores-{stage}-{RANK}.safetensors")
        return {
            "steps": done,
            "micros": len(mine(0)),
            "share": one.facts().ranks_per_share,
            "coverage": one.coverage(),
            "evaluated": one.evaluate(mine(9), TokenLoss(), {}, {})["loss"][0],
            "shapes": {name: list(p.shape) for name, p in one.parameters.items()},
            "prints": own_prints(one),
            "weights": len(held(one)),
        }


for stage in STAGES:

    @on_both(f"resume-{stage}")
    def resume(stage: int = stage) -> Any:
        """Save after two steps, load into a trainer that was trained on other data, and continue. Also continue from
        the checkpoint of one rank."""
        options = {"stage": stage, "ema_decay": 0.9}
        one = trainer(here(), **options)
        steps(one, range(2))
        folder = FOLDER / f"saved-{stage}"
        one.save(folder)
        other = trainer(here(), **options)
        steps(other, [7])
        other.load(folder)
        numbers = steps(one, range(2, 5)), steps(other, range(2, 5))
        bits = same(held(one), held(other)) and same(held(one, "ema"), held(other, "ema"))
        other.load(FOLDER / "from_one")
        return {"bits": bits, "steps": numbers, "from_one": steps(other, range(2, 5))}


SPEC = ("gradient_checkpointing", "dtype", "storage")
for variant, options in VARIANTS.items():

    @on_pair(f"variant-{variant}")
    def varied(variant: str = variant, options: dict[str, Any] = options) -> Any:
        one = trainer(
            here(**{k: v for k, v in options.items() if k in SPEC}),
            **{k: v for k, v in options.items() if k not in SPEC},
        )
        first_gradients(one, variant)
        done = steps(one, range(3))
        keep(f"weights-{variant}", held(one))
        return {"steps": done}


for kind in MODELS:

    @on_pair(f"model-{kind}")
    def model(kind: str = kind) -> Any:
        one = trainer(replace(here(), path=str(FOLDER / kind)), stage=2)
        first_gradients(one, kind)
        done = steps(one, range(2))
        keep(f"weights-{kind}", held(one))
        return {"steps": done}


for name in LORA:

    @on_both(f"lora-{name}")
    def adapted(name: str = name) -> Any:
        """Gradients after a first step (before it one factor has none), further steps, the tensors of a rank."""
        options = {"stage": LORA_STAGE[name], "lora": LoraOptions(**LORA[name])}
        one = trainer(here(), ema_decay=0.9, weight_decay=0.1, **options)
        first = steps(one, [0])
        first_gradients(one, f"lora-{name}")
        done = first + steps(one, range(1, 4))
        keep(f"weights-lora-{name}", held(one))
        keep(f"average-lora-{name}", held(one, "ema"))
        one.save(FOLDER / f"saved-lora-{name}")
        return {
            "steps": done,
            "coverage": one.coverage(),
            "prints": own_prints(one),
            "shapes": {n: list(p.shape) for n, p in one.parameters.items()},
        }


@on_pair("adapters")
def adapters() -> Any:
    """The weights and the export of a checkpoint that one rank saved."""
    one = trainer(here(), stage=2, lora=LoraOptions(**LORA["all"]))
    one.load(FOLDER / "adapters")
    one.export(FOLDER / "export-lora")
    keep("base", held(one, "base"))
    scores = [one.forward(mine(9), ("logprobs",), view)[0]["logprobs"] for view in ("live", "base")]
    keep("scores-lora", dict(zip(("live", "base"), scores, strict=True)))
    list(one.buckets())
    return one.sent()


for name, options in MUON.items():

    @on_both(f"muon-{name}")
    def muon(name: str = name, options: dict[str, Any] = options) -> Any:
        options = {**options, **({"lora": LoraOptions(**options["lora"])} if "lora" in options else {})}
        one = trainer(here(), optimizer="muon", weight_decay=0.1, **options)
        done = steps(one, range(3))
        keep(f"weights-muon-{name}", held(one))
        return {"steps": done}


@on_pair("critic")
def critic() -> Any:
    one = trainer(here(head="scalar"), stage=2)
    first_gradients(one, "critic", ValueLoss())
    return {"steps": steps(one, range(3), ValueLoss())}


@on_pair("frozen")
def frozen() -> Any:
    """A frozen role holds parts too. It loads whole weights from a sender, and lends its head."""
    source = trainer(here(), stage=2)
    steps(source, range(2))
    found: list[Any] = [held(source)]
    torch.distributed.broadcast_object_list(found, 0)
    one = trainer(here(trained=False), stage=2)
    before, want = (of.forward(mine(9), ("logprobs",)) for of in (one, source))
    one.load_weights(iter(found[0].items()))
    after = one.forward(mine(9), ("logprobs",))

    def apart(a: Any, b: Any) -> float:
        return max(float((x["logprobs"] - y["logprobs"]).abs().max()) for x, y in zip(a, b, strict=True))

    return {
        "moved": apart(before, want),
        "left": apart(after, want),
        "prints": own_prints(one) == own_prints(source),
        "every_rank": len(list(one.weights(every_rank=True))),
    }


@on_pair("lent")
def lent() -> Any:
    lender = trainer(replace(here(trained=False), path=str(FOLDER / "lender")), stage=2)
    one = trainer(here(), stage=2)
    whole = list(lender.lend_head()) or [None]
    torch.distributed.broadcast_object_list(whole, 0)
    one.borrow_head("lender", whole[0])
    micros = mine(0, LentLoss())
    hidden = [found["hidden"] for found in lender.forward(micros, ("hidden",))]
    micros = [m.with_column("tok", "lent_hidden", h) for m, h in zip(micros, hidden, strict=True)]
    sums = one.accumulate(micros, LentLoss(), {}, {})
    keep("gradients-lent", one.gradients())
    return {"loss": sums["loss"][0]}


@on_both("skip")
def skip() -> Any:
    """A non-finite loss, and in the next step a non-finite gradient, on the last replica only."""
    one, twin = (trainer(here(), stage=2, ema_decay=0.5) for _ in range(2))
    found = []
    for broken in (InfiniteLoss(), InfiniteGradient()):
        before = held(one)
        one.accumulate(mine(0), TokenLoss(), {}, {})
        one.accumulate(mine(1), broken if REPLICA == REPLICAS - 1 else TokenLoss(), {}, {})
        result = one.apply()
        found.append([result.skipped, same(before, held(one))])
    steps(twin, [0])
    twin.updates = one.updates = 2
    done = steps(one, [0])
    return [*found, [done[0][3], same(held(one), held(twin))]]


@on_pair("export")
def export() -> Any:
    one = trainer(here(), stage=2, ema_decay=0.9)
    one.export(FOLDER / "export")
    list(one.buckets())
    return one.sent()


@on_pair("beside")
def beside() -> Any:
    """Roles with and without divided layers in one process, in both orders."""
    divided, plain = trainer(here(), stage=2), any_trainer(here(), stage=2)
    both = [steps(divided, [0]), plain.update(shares(batch(0), RANKS)[RANK], TokenLoss(), {}, {})[1].grad_norm]
    return [both[0][0][1], both[1], steps(divided, [1])[0][1], steps(trainer(here(), stage=1), [0])[0][1]]


@on_pair("refused")
def refused() -> Any:
    found = {}
    for name in REFUSED:
        try:
            trainer(replace(here(), path=str(FOLDER / name)), stage=2)
        except CapabilityError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    run(BOTH if RANKS > PARTS else {**BOTH, **PAIR})
