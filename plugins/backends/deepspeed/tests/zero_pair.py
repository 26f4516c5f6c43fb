"""One of two ranks. It runs every case for two ranks in one process (:mod:`rank_case`)."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from rank_case import FOLDER, PORT, RANK, Cases, adder, held, here, keep, run, same, stepper
from rlhf.errors import RlhfError, WorkerError
from rlhf_testing.image_batches import image_batch, image_shares
from rlhf_testing.suite_losses import InfiniteGradient, InfiniteLoss, LentLoss, NllLoss, TokenLoss, ValueLoss
from rlhf_testing.token_parts import CASES as CASES_ON_PARTS
from rlhf_testing.token_parts import run_case
from safetensors.torch import save_file
from zero_cases import STEPS, batch, shares, spec, trainer
from zero_pair_names import DORA, IMAGES, PARTS_STAGE, STAGES, VARIANTS

CASES: Cases = {}
case = adder(CASES)


def mine(number: int, loss: Any = None, units: int = 7, budget: int = 40) -> list[Any]:
    return shares(batch(number, loss, units), 2, budget)[RANK]


steps = stepper(mine)


def whole_weights(of: Any) -> dict[str, torch.Tensor]:
    """The whole weights, on both ranks."""
    found = [held(of)]
    torch.distributed.broadcast_object_list(found, 0)
    return found[0]


@case("nobody")
def nobody() -> Any:
    """Each rank waits for the other at a different address. This case is the first, because it needs no group."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = str(place.getsockname()[1])
    try:
        trainer(spec(FOLDER, RANK, 2, port), stage=2, timeout=2.0)
    except WorkerError as error:
        return str(error)
    return "nothing was raised"


for stage in STAGES:

    @case(f"equal-{stage}")
    def equal(stage: int = stage) -> Any:
        """Gradients of the first step, five steps, scores, and coverage."""
        one = trainer(here(), stage=stage, ema_decay=0.9, weight_decay=0.1, logits_chunk=500)
        first = mine(0)
        one.accumulate(first, TokenLoss(), {}, {})
        gradients = one.gradients()
        keep(f"gradients-{stage}", gradients)
        one.zero_grad()
        done = steps(one, range(STEPS))
        keep(f"weights-{stage}", held(one))
        keep(f"average-{stage}", held(one, "ema"))
        scores = one.forward(mine(9), ("logprobs",))
        save_file({str(n): s["logprobs"] for n, s in enumerate(scores)}, FOLDER / f"scores-{stage}-{RANK}.safetensors")
        evaluated = one.evaluate(mine(9), TokenLoss(), {}, {})["loss"][0]
        return {
            "steps": done,
            "micros": len(first),
            "names": sorted(gradients),
            "coverage": one.coverage(),
            "evaluated": evaluated,
        }


SPEC = ("gradient_checkpointing", "dtype", "storage")
for variant, options in VARIANTS.items():

    @case(f"variant-{variant}")
    def varied(variant: str = variant, options: dict[str, Any] = options) -> Any:
        """Three steps, and the gradients before the first."""
        of_spec = {k: v for k, v in options.items() if k in SPEC}
        one = trainer(here(**of_spec), **{k: v for k, v in options.items() if k not in SPEC})
        one.accumulate(mine(0), TokenLoss(), {}, {})
        keep(f"gradients-{variant}", one.gradients())
        one.zero_grad()
        done = steps(one, range(3))
        keep(f"weights-{variant}", held(one))
        return {"steps": done}


for images, image_options in IMAGES.items():

    @case(f"images-{images}")
    def with_images(options: dict[str, Any] = image_options, images: str = images) -> Any:
        """Gradients of the first step and three steps, where one rank has images and the other none."""
        path = FOLDER / "images"
        own = image_shares(image_batch(path, "qwen3_vl"), 2)[RANK]
        one = trainer(replace(here(), path=str(path), images=True), **options)
        one.accumulate(own, NllLoss(), {}, {})
        keep(f"gradients-images-{images}", one.gradients())
        one.zero_grad()
        done = [one.update(own, NllLoss(), {}, {})[1].grad_norm for _ in range(3)]
        keep(f"weights-images-{images}", held(one))
        one.save(FOLDER / f"images-{images}")
        other = trainer(replace(here(), path=str(path), images=True), **options)
        other.load(FOLDER / f"images-{images}")
        return {"norms": done, "resumed": same(held(one), held(other))}


@case("base")
def base() -> Any:
    """The view without adapters, after the head was trained with them; the head that it lends; resumed in stage 3."""
    one = trainer(here(), stage=2, lora=DORA, ema_decay=0.9)
    first, weights = one.forward(mine(9), ("logprobs",)), held(one, "base")
    lent = [h.weight_VH.clone() for h in one.lend_head("base")]
    steps(one, range(2))
    one.save(FOLDER / "base")
    other = trainer(here(), stage=3, lora=DORA, ema_decay=0.9)
    other.load(FOLDER / "base")
    found = []
    for of in (one, other):
        live, again = held(of), of.forward(mine(9), ("logprobs",), "base")
        found.append(
            {
                "off": max(
                    float((a["logprobs"] - b["logprobs"]).abs().max()) for a, b in zip(first, again, strict=True)
                ),
                "base": same(weights, held(of, "base")),
                "lent": all(torch.equal(a, h.weight_VH) for a, h in zip(lent, of.lend_head("base"), strict=True)),
                "live": same(live, held(of)) and same(live, held(one)),
                "average": same(held(one, "ema"), held(of, "ema")),
                "moved": sum(not torch.equal(live[n], t) for n, t in weights.items()),
            }
        )
    return found


@case("dropout")
def dropout() -> Any:
    """Gradients of several micro-batches per rank, each with its own mask."""
    one = trainer(here(), stage=2, lora={"rank": 2, "dropout": 0.5})
    one.accumulate(mine(0), TokenLoss(), {}, {})
    keep("gradients-dropout", one.gradients())
    return len(mine(0))


@case("critic")
def critic() -> Any:
    """A scalar head that is not tied to the embedding, in stage 3, with a filler micro-batch on one rank."""
    one = trainer(here(head="scalar"), stage=3)
    few = mine(4, ValueLoss(), units=3, budget=12)
    one.accumulate(few, ValueLoss(), {}, {})
    keep("gradients-critic", one.gradients())
    one.zero_grad()
    return {
        "micros": len(few),
        "fillers": ["filler" in m.unit for m in few],
        "steps": steps(one, range(3), ValueLoss()),
    }


@case("frozen")
def frozen() -> Any:
    """A frozen role is divided in stage 3. It loads whole weights from a sender."""
    found = {}
    for stage in (2, 3):
        source = trainer(here(), stage=2)
        steps(source, range(2))
        weights = {n: t.detach().clone() for n, t in source.tensors.objects.items()}
        one = trainer(here(trained=False), stage=stage)
        before = one.forward(mine(9), ("logprobs",))
        one.load_weights(iter(weights.items()))
        after = one.forward(mine(9), ("logprobs",))
        want = source.forward(mine(9), ("logprobs",))
        folder = FOLDER / f"frozen-{stage}"
        one.save(folder)
        again = trainer(here(trained=False), stage=stage)
        again.load(folder)
        found[stage] = {
            "moved": max(float((a["logprobs"] - b["logprobs"]).abs().max()) for a, b in zip(before, want, strict=True)),
            "left": max(float((a["logprobs"] - b["logprobs"]).abs().max()) for a, b in zip(after, want, strict=True)),
            "divided": max(p.numel() for p in one.parameters.values()),
            "saved": same(held(one), held(again)),
        }
    return found


for stage in STAGES:

    @case(f"lent-{stage}")
    def lent(stage: int = stage) -> Any:
        """A frozen role lends its head, which is tied to the embedding. Each rank computes with it on its share."""
        lender = trainer(replace(here(trained=False), path=str(FOLDER / "lender")), stage=stage)
        one = trainer(here(), stage=stage, logits_chunk=500)
        heads = list(lender.lend_head())
        whole = heads or [None]
        torch.distributed.broadcast_object_list(whole, 0)
        one.borrow_head("lender", whole[0])
        micros = mine(0, LentLoss())
        hidden = [found["hidden"] for found in lender.forward(micros, ("hidden",))]
        micros = [m.with_column("tok", "lent_hidden", h) for m, h in zip(micros, hidden, strict=True)]
        sums = one.accumulate(micros, LentLoss(), {}, {})
        keep(f"gradients-lent-{stage}", one.gradients())
        return {"heads": len(heads), "loss": sums["loss"][0]}


@case("hpz")
def hpz() -> Any:
    """In one process: policy, critic and reference with second copies of their weights, and a policy without."""
    options = {"stage": 3, "hpz_partition_size": 2}
    plain, policy, critic = (
        trainer(here(), stage=3),
        trainer(here(), **options),
        trainer(here(head="scalar"), **options),
    )
    reference = trainer(here(trained=False), **options)
    before = reference.forward(mine(9), ("logprobs",))
    done = steps(plain, range(2)), steps(policy, range(2)), steps(critic, range(2), ValueLoss())
    keep("weights-hpz-critic", held(critic))
    unmoved = reference.forward(mine(9), ("logprobs",))
    reference.load_weights(iter(whole_weights(policy).items()))
    after, want = (of.forward(mine(9), ("logprobs",)) for of in (reference, policy))
    everyone = (plain, policy, critic, reference)
    return {
        "steps": done,
        "same": same(held(plain), held(policy)),
        "unmoved": all(torch.equal(a["logprobs"], b["logprobs"]) for a, b in zip(before, unmoved, strict=True)),
        "left": max(float((a["logprobs"] - b["logprobs"]).abs().max()) for a, b in zip(after, want, strict=True)),
        "copies": [sum(p.ds_secondary_tensor is not None for p in of.parameters.values()) for of in everyone],
        "parameters": [len(of.parameters) for of in everyone],
    }


for stage in STAGES:

    @case(f"skip-{stage}")
    def skip(stage: int = stage) -> Any:
        """A non-finite loss, and in the next step a non-finite gradient, on rank 1 only."""
        one = trainer(here(), stage=stage, ema_decay=0.5)
        twin = trainer(here(), stage=stage, ema_decay=0.5)
        found = {}
        for broken in (InfiniteLoss(), InfiniteGradient()):
            before = held(one)
            one.accumulate(mine(0), TokenLoss(), {}, {})
            one.accumulate(mine(1), broken if RANK else TokenLoss(), {}, {})
            result = one.apply()
            found[broken.name] = [result.skipped, same(before, held(one)), one.skipped, one.coverage()]
        steps(twin, [0])
        twin.updates = one.updates = 2
        done = steps(one, [0])
        found["after"] = [done[0][3], same(held(one), held(twin)) and same(held(one, "ema"), held(twin, "ema"))]
        return found


for stage in STAGES:

    @case(f"resume-{stage}")
    def resume(stage: int = stage) -> Any:
        """Save after two steps, load into a trainer that was trained on other data, and continue with both."""
        options = {"stage": stage, "ema_decay": 0.9, "schedule": "cosine"}
        one = trainer(here(), **options)
        steps(one, range(2))
        folder = FOLDER / f"saved-{stage}"
        one.save(folder)
        other = trainer(here(), **options)
        steps(other, [7])
        other.load(folder)
        bits = same(held(one), held(other)) and same(held(one, "ema"), held(other, "ema"))
        one.offload()
        one.reload()
        numbers = steps(one, range(2, 5)), steps(other, range(2, 5))
        bits = bits and same(held(one), held(other)) and same(held(one, "ema"), held(other, "ema"))
        files = sorted(p.name for p in folder.iterdir())
        return {"bits": bits, "steps": numbers, "files": files, "updates": other.updates}


@case("from_one")
def from_one() -> Any:
    """Load the checkpoint that one rank saved in stage 2 on two ranks, in every stage."""
    found = {}
    for stage in STAGES:
        one = trainer(here(), stage=stage, ema_decay=0.9)
        one.load(FOLDER / "from_one")
        found[stage] = steps(one, range(2, 5))
    return found


@case("export")
def export() -> Any:
    one = trainer(here(), stage=3, ema_decay=0.9, export_shard_bytes=10_000, bucket=2000)
    steps(one, range(2))
    whole, gathered = [], one.zero.gathered
    one.zero.gathered = lambda parameters: whole.append(sum(p.ds_numel for p in parameters)) or gathered(parameters)
    one.export(FOLDER / "export")
    one.export(FOLDER / "export_ema", "ema")
    one.zero.gathered = gathered
    exported = dict(one.weights())
    keep("exported", exported)
    return {"names": sorted(exported), "whole": max(whole)}


@case("experts")
def experts() -> Any:
    """Experts are one tensor here, divided over the ranks. They are sent and loaded one by one, as in checkpoints."""
    one = trainer(replace(here(trained=False), path=str(FOLDER / "experts")), stage=3)
    keep("experts", held(one))
    one.load_weights((name, 2 * tensor) for name, tensor in whole_weights(one).items())
    keep("experts-twice", held(one))
    return len(one.parameters)


@case("alone")
def alone() -> Any:
    """A recurrent model is computed one length at a time. The ranks have different numbers of lengths."""
    one = trainer(replace(here(), path=str(FOLDER / "recurrent")), stage=3)
    first = mine(0)
    one.accumulate(first, TokenLoss(), {}, {})
    keep("gradients-alone", one.gradients())
    return one.loaded.layout, [len(set(micro.lens_B.tolist())) for micro in first]


@case("refused")
def refused() -> Any:
    """Another group, an unknown view, and gradients that were read already."""
    found = []
    for wrong in (spec(FOLDER), spec(FOLDER, RANK, 2, "1"), spec(FOLDER, RANK, 3, PORT)):
        try:
            trainer(wrong, stage=0)
        except RlhfError as error:
            found.append(f"{type(error).__name__}: {error}")
    try:
        trainer(spec(FOLDER, RANK, 2, PORT, head="scalar" if RANK else "lm"), stage=0)
    except RlhfError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


for kind in CASES_ON_PARTS:

    @case(f"parts-2-{kind}")
    def on_parts(kind: str = kind) -> Any:
        return run_case(kind, partial(trainer, stage=PARTS_STAGE.get(kind, 3)), here(), FOLDER, 2)


@case("parts-resume")
def resume_parts() -> Any:
    """Continue the checkpoint of one rank with rows that are divided over two ranks, and save."""
    one = trainer(here(), stage=1, ema_decay=0.9, sequence_parallel=2)
    one.load(FOLDER / "from_one")
    done = [one.update(shares(batch(n), 1)[0], TokenLoss(), {}, {})[1].grad_norm for n in range(2, 4)]
    one.save(FOLDER / "saved_parts")
    keep("resumed-parts", held(one))
    return done


@case("timeout")
def timeout() -> Any:
    """Rank 1 makes no call while rank 0 waits for it. This case is the last, because it breaks the group. Only the
    group that was joined gets a short timeout, to show that DeepSpeed waits in no other group."""
    one = trainer(here(), stage=2)
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
    done = FOLDER / "rank-0-is-done"
    if RANK:
        while not done.exists():
            time.sleep(0.1)
        return ""
    try:
        one.accumulate(mine(0), TokenLoss(), {}, {})
    except WorkerError as error:
        return str(error)
    finally:
        done.touch()
    return "nothing was raised"


if __name__ == "__main__":
    run(CASES)
