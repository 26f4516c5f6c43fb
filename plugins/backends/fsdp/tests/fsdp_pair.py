"""One of two ranks: ``python fsdp_pair.py RANK 2 PORT FOLDER``. It runs every case for two ranks in one process.

A case is a function. Tests read its return value (JSON) by its name; tensors are in files. Both ranks run the same
cases in the same order.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from fsdp_cases import DORA, IMAGES, OF_ROLE, STORED, VARIANTS, trainer
from rlhf.errors import WorkerError
from rlhf_testing.image_batches import image_batch, image_shares
from rlhf_testing.rank_batches import STEPS, batch, shares, spec
from rlhf_testing.suite_losses import InfiniteGradient, InfiniteLoss, LentLoss, NllLoss, TokenLoss, ValueLoss
from rlhf_testing.token_parts import CASES as CASES_ON_PARTS
from rlhf_testing.token_parts import kept_bytes, run_case
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RANK, RANKS, PORT, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
CASES: dict[str, Callable[[], Any]] = {}


def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[name] = function
        return function

    return add


def here(**options: Any) -> Any:
    return spec(FOLDER, RANK, RANKS, PORT, **options)


def mine(number: int, loss: Any = None, units: int = 7, budget: int = 40) -> list[Any]:
    return shares(batch(number, loss, units), RANKS, budget)[RANK]


def keep(name: str, tensors: Mapping[str, Tensor]) -> None:
    if RANK == 0:
        save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, FOLDER / f"{name}.safetensors")


def steps(of: Any, numbers: Any, loss: Any = None) -> list[Any]:
    """[loss on this rank, norm, rate, reason of a skip] of each step."""
    loss, done = loss or TokenLoss(), []
    for number in numbers:
        sums, result = of.update(mine(number, loss), loss, {}, {})
        done.append([sums["loss"][0], result.grad_norm, result.lr, result.skipped])
    return done


def held(of: Any, view: str = "live") -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in of.weights(view, every_rank=True)}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


class GatheredBytes(TorchDispatchMode):
    """Bytes of the buffers into which this rank gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func)
        if "_allgather_base_" in name:  # of FSDP
            self.bytes += args[0].nbytes
        elif "all_gather_into_tensor" in name:  # of DTensor.full_tensor
            self.bytes += result.nbytes
        return result


@case("equal")
def equal() -> Any:
    """Gradients of the first step, five steps, scores, and coverage."""
    one = trainer(here(), ema_decay=0.9, weight_decay=0.1, logits_chunk=500)
    first = mine(0)
    one.accumulate(first, TokenLoss(), {}, {})
    gradients = one.gradients()
    keep("gradients", gradients)
    one.zero_grad()
    done = steps(one, range(STEPS))
    keep("weights", held(one))
    keep("average", held(one, "ema"))
    scores = one.forward(mine(9), ("logprobs",))
    save_file({str(n): s["logprobs"] for n, s in enumerate(scores)}, FOLDER / f"scores-{RANK}.safetensors")
    return {
        "steps": done,
        "micros": len(first),
        "names": sorted(gradients),
        "coverage": one.coverage(),
        "evaluated": one.evaluate(mine(9), TokenLoss(), {}, {})["loss"][0],
        "streamed": len(list(one.weights())),
        "elements": sum(p.to_local().numel() for p in one.parameters.values()),
    }


for variant, options in VARIANTS.items():

    @case(f"variant-{variant}")
    def varied(variant: str = variant, options: dict[str, Any] = options) -> Any:
        """Three steps, and the gradients before the first."""
        of_role = {k: v for k, v in options.items() if k in OF_ROLE}
        one = trainer(here(**of_role), **{k: v for k, v in options.items() if k not in OF_ROLE})
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
        own = image_shares(image_batch(path, "qwen3_vl"), RANKS)[RANK]
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
    """The view without adapters, after the head was trained with them, and the head that it lends."""
    one = trainer(here(), lora=DORA)
    first, weights = one.forward(mine(9), ("logprobs",)), held(one, "base")
    lent = [h.weight_VH.clone() for h in one.lend_head("base")]
    steps(one, range(2))
    live, again = held(one), one.forward(mine(9), ("logprobs",), "base")
    one.save(FOLDER / "base")
    other = trainer(here(), lora=DORA)
    other.load(FOLDER / "base")
    return {
        "off": max(float((a["logprobs"] - b["logprobs"]).abs().max()) for a, b in zip(first, again, strict=True)),
        "moved": sum(not torch.equal(live[n], t) for n, t in weights.items()),
        "base": same(weights, held(one, "base")) and same(weights, held(other, "base")),
        "live": same(live, held(one)) and same(live, held(other)),
        "lent": all(torch.equal(a, h.weight_VH) for a, h in zip(lent, one.lend_head("base"), strict=True)),
    }


@case("critic")
def critic() -> Any:
    """A scalar head of one row, which is on one rank only, with a filler micro-batch on one rank."""
    one = trainer(here(head="scalar"))
    few = mine(4, ValueLoss(), units=3, budget=12)
    one.accumulate(few, ValueLoss(), {}, {})
    keep("gradients-critic", one.gradients())
    one.zero_grad()
    done = steps(one, range(3), ValueLoss())
    one.save(FOLDER / "critic-saved")
    again = trainer(here(head="scalar"))
    again.load(FOLDER / "critic-saved")
    numbers = steps(one, [3], ValueLoss()), steps(again, [3], ValueLoss())
    return {"steps": done, "resumed": numbers[0] == numbers[1] and same(held(one), held(again))}


@case("frozen")
def frozen() -> Any:
    """A frozen role is divided. It loads whole weights from a sender."""
    source = trainer(here())
    steps(source, range(2))
    one = trainer(here(trained=False))
    before = one.forward(mine(9), ("logprobs",))
    one.load_weights(source.weights(every_rank=True))
    after = one.forward(mine(9), ("logprobs",))
    want = source.forward(mine(9), ("logprobs",))
    one.save(FOLDER / "frozen")
    again = trainer(here(trained=False))
    again.load(FOLDER / "frozen")

    def distance(a: list[Any], b: list[Any]) -> float:
        return max(float((x["logprobs"] - y["logprobs"]).abs().max()) for x, y in zip(a, b, strict=True))

    return {
        "moved": distance(before, want),
        "left": distance(after, want),
        "saved": same(held(one), held(again)),
    }


@case("lent")
def lent() -> Any:
    """A frozen role lends its head, which is tied to the embedding. Each rank computes with it on its share."""
    lender = trainer(replace(here(trained=False), path=str(FOLDER / "lender")))
    one = trainer(here(), logits_chunk=500)
    heads = list(lender.lend_head())
    whole = heads or [None]
    torch.distributed.broadcast_object_list(whole, 0)
    one.borrow_head("lender", whole[0])
    micros = mine(0, LentLoss())
    hidden = [found["hidden"] for found in lender.forward(micros, ("hidden",))]
    micros = [m.with_column("tok", "lent_hidden", h) for m, h in zip(micros, hidden, strict=True)]
    sums = one.accumulate(micros, LentLoss(), {}, {})
    keep("gradients-lent", one.gradients())
    return {"heads": len(heads), "loss": sums["loss"][0]}


@case("skip")
def skip() -> Any:
    """A non-finite loss, and in the next step a non-finite gradient, on rank 1 only."""
    one, twin = trainer(here(), ema_decay=0.5), trainer(here(), ema_decay=0.5)
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


@case("resume")
def resume() -> Any:
    """Save after two steps, load into a trainer that was trained on other data, and continue with both."""
    options = {"ema_decay": 0.9, "schedule": "cosine"}
    one = trainer(here(), **options)
    steps(one, range(2))
    one.save(FOLDER / "saved")
    other = trainer(here(), **options)
    steps(other, [7])
    other.load(FOLDER / "saved")
    bits = same(held(one), held(other)) and same(held(one, "ema"), held(other, "ema"))
    one.offload()
    one.reload()
    numbers = steps(one, range(2, 5)), steps(other, range(2, 5))
    bits = bits and same(held(one), held(other)) and same(held(one, "ema"), held(other, "ema"))
    return {"bits": bits, "steps": numbers, "files": sorted(p.name for p in (FOLDER / "saved").iterdir())}


@case("resume-stored")
def resume_stored() -> Any:
    """With weights that are stored in bf16: the masters are saved, and loaded from one rank's files."""
    one, other = (trainer(here(**STORED), ema_decay=0.9) for _ in range(2))
    steps(one, range(2))
    one.save(FOLDER / "saved-stored")
    save_file(own_masters(one), FOLDER / f"masters-{RANK}.safetensors")
    other.load(FOLDER / "saved-stored")
    numbers = steps(one, range(2, 5)), steps(other, range(2, 5))
    pairs = [(own_masters(one), own_masters(other)), *((held(one, v), held(other, v)) for v in one.views)]
    other.load(FOLDER / "from_one_stored")
    save_file(own_masters(other), FOLDER / f"masters-from-one-{RANK}.safetensors")
    return {"steps": numbers, "bits": all(same(a, b) for a, b in pairs)}


def own_masters(of: Any) -> dict[str, Tensor]:
    return {f"{p.name}:{p.start}": flat.data.clone() for flat in of.partition.flats for p in flat.pieces}


@case("bytes")
def gathered_bytes() -> Any:
    """{number format: [bytes that an update's passes gather, bytes that a sync gathers, bytes that it sends]}."""
    found = {}
    for stored in ("fp32", "bf16"):
        one = trainer(here(dtype="bf16", storage=stored))
        with GatheredBytes() as passes:
            one.accumulate(mine(0), TokenLoss(), {}, {})
        with GatheredBytes() as sync:
            sent = sum(t.nbytes for _, t in one.weights(every_rank=True))
        found[stored] = [passes.bytes, sync.bytes, sent]
    return found


for kind in CASES_ON_PARTS:

    @case(f"parts-2-{kind}")
    def on_parts(kind: str = kind) -> Any:
        return run_case(kind, trainer, here(), FOLDER, 2)


@case("parts-kept")
def kept() -> Any:
    """Bytes that are kept for the backward pass of a row that each rank computes whole, and of its half."""
    row = batch(0, units=40)
    return [kept_bytes(trainer(here(), sequence_parallel=parts), [row], TokenLoss()) for parts in (1, 2)]


@case("parts-resume")
def resume_parts() -> Any:
    """Continue the checkpoint of one rank with rows that are divided over two ranks, and save."""
    one = trainer(here(), ema_decay=0.9, sequence_parallel=2)
    one.load(FOLDER / "from_one")
    done = [one.update(shares(batch(n), 1)[0], TokenLoss(), {}, {})[1].grad_norm for n in range(2, 4)]
    one.save(FOLDER / "saved_parts")
    keep("resumed-parts", held(one))
    return done


@case("from_one")
def from_one() -> Any:
    """Load the checkpoint that one rank saved on two ranks."""
    one = trainer(here(), ema_decay=0.9)
    one.load(FOLDER / "from_one")
    return steps(one, range(2, 5))


@case("lora")
def lora() -> Any:
    """Views, export and checkpoint of adapters."""
    one = trainer(here(), lora={"rank": 4}, ema_decay=0.5)
    base = held(one, "base")
    steps(one, range(2))
    one.save(FOLDER / "lora-saved")
    one.export(FOLDER / "lora-exported")
    keep("lora-weights", held(one))
    return {"base": same(base, held(one, "base")), "merged": not same(base, held(one))}


@case("export")
def export() -> Any:
    one = trainer(here(), ema_decay=0.9, export_shard_bytes=10_000)
    steps(one, range(2))
    gathered, whole = type(one.tensors).whole, []

    def counted(self: Any, name: str) -> Tensor:
        found = gathered(self, name)
        whole.append(found.numel())
        return found

    type(one.tensors).whole = counted
    one.export(FOLDER / "export")
    one.export(FOLDER / "export_ema", "ema")
    type(one.tensors).whole = gathered
    exported = dict(one.weights())
    keep("exported", exported)
    return {"names": sorted(exported), "whole": max(whole)}


@case("experts")
def experts() -> Any:
    """Experts are one tensor here, divided over the ranks. They are sent and loaded one by one, as in checkpoints."""
    one = trainer(replace(here(trained=False), path=str(FOLDER / "experts")))
    keep("experts", held(one))
    one.load_weights((name, 2 * tensor) for name, tensor in held(one).items())
    keep("experts-twice", held(one))
    return len(one.parameters)


@case("alone")
def alone() -> Any:
    """A recurrent model is computed one length at a time. The ranks have different numbers of lengths."""
    one = trainer(replace(here(), path=str(FOLDER / "recurrent")))
    first = mine(0)
    one.accumulate(first, TokenLoss(), {}, {})
    keep("gradients-alone", one.gradients())
    return one.loaded.layout, [len(set(micro.lens_B.tolist())) for micro in first]


@case("timeout")
def timeout() -> Any:
    """Rank 1 makes no call while rank 0 waits for it. This case is the last, because it breaks the group."""
    one = trainer(here())
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
    only = tuple(sys.argv[5:])
    results = {}
    for name, function in CASES.items():
        if not only or name.startswith(only):
            start = time.process_time()
            results[name] = function()
            print(name, f"{time.process_time() - start:.1f} s of processor", flush=True)
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # a case may have broken the process group, and a normal exit could hang
