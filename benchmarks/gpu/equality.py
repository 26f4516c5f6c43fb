"""The same recorded batch on the device and on the processor: equal gradients, equal log-probs, and samples whose
log-probs agree with the trainer's.

The reference of all comparisons is fp32 on the processor, packed, with shared prefixes. README.md gives the reasons for
the tolerances.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from parts import Part, Section
from recorded import ALGORITHMS, Learnt, Recorded, distance
from sampled import check_transformers, check_vllm

GRADIENTS = {"fp32": 1e-5, "bf16": 5e-2}
"""Largest distance of gradients from the reference, relative to its norm."""
LAYOUT_BF16 = 5e-2
"""The same between two layouts of one batch in bf16: kernels and rounding differ, the mathematics does not."""
LOGPROBS = {"fp32": 1e-4, "bf16": 5e-2}
"""Largest mean difference of a token's log-prob from the reference."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed, prefixes shared": {},
    "packed, prefixes apart": {"trainer": {"shared_prefixes": False}},
    "one by one": {"trainer": {"shared_prefixes": False}, "policy": {"micro_tokens": 1}},
}
"""A unit longer than the token budget is alone in its micro-batch, so a budget of 1 packs nothing."""
PACKED = next(iter(LAYOUTS))
ON_CUDA: dict[str, dict[str, Any]] = {
    "packed, prefixes shared, kernel sdpa": {"trainer": {"attention": "sdpa"}},
    "packed, prefixes apart, kernel sdpa": {"trainer": {"attention": "sdpa", "shared_prefixes": False}},
}
"""Compared with the kernel that the trainer chooses on a GPU: one call per run of sequences of equal length."""


def run(section: Section) -> None:
    recorded = Recorded(section.work, section.small)
    references: dict[str, Learnt] = {}

    def reference(part: Part) -> None:
        for algorithm in ALGORITHMS:
            references[algorithm] = result = recorded.learn(algorithm, "cpu", "fp32")
            part.figures[algorithm] = {
                "tokens": len(result.logprobs_N),
                "gradient norm": sum(float(g.double().square().sum()) for g in result.gradients.values()) ** 0.5,
            }

    section.part("reference", reference)
    for dtype in ("fp32", "bf16"):
        name = f"gradients and log-probs, {dtype}"
        section.part(name, partial(compare, recorded, references, section.device, dtype))
    section.part("samples of transformers", partial(check_transformers, recorded, section.device))
    for dtype in ("bf16", "fp32"):
        run_it = partial(check_vllm, recorded, section.device, dtype)
        section.part(f"samples of vllm, {dtype}", run_it, needs=("vllm",), seconds=30)
    section.part("samples of vllm, bf16, compiled", partial(compiled, section, recorded), needs=("vllm",), seconds=90)


def compiled(section: Section, recorded: Recorded, part: Part) -> None:
    """The engine replays graphs that were captured before the sync."""
    section.needs_cuda()
    check_vllm(recorded, section.device, "bf16", part, eager=False)


def compare(recorded: Recorded, references: dict[str, Learnt], device: str, dtype: str, part: Part) -> None:
    if len(references) != len(ALGORITHMS):
        raise RuntimeError("there is no reference to compare with")
    for algorithm, reference in references.items():
        figures = part.figures[algorithm] = {}
        results = {}
        for layout, sections in (LAYOUTS | (ON_CUDA if device == "cuda" else {})).items():
            results[layout] = result = recorded.learn(algorithm, device, dtype, **sections)
            gap = distance(result.gradients, reference.gradients)
            difference_N = (result.logprobs_N - reference.logprobs_N).abs()
            figures[layout] = {
                "gradients apart": gap,
                "log-probs apart, mean": float(difference_N.mean()),
                "log-probs apart, most": float(difference_N.max()),
                "attention": result.kernels,
            }
            label = f"{algorithm}, {layout}"
            part.at_most(f"{label}: gradients apart from the reference", gap, GRADIENTS[dtype])
            part.at_most(f"{label}: log-probs apart, mean", float(difference_N.mean()), LOGPROBS[dtype])
            if layout != PACKED:
                packed_gap = distance(result.gradients, results[PACKED].gradients)
                figures[layout]["gradients apart from packed"] = packed_gap
                limit = LAYOUT_BF16 if dtype == "bf16" else GRADIENTS["fp32"]
                part.at_most(f"{label}: gradients apart from packed", packed_gap, limit)
        if dtype == "bf16" and device != "cpu":  # for scale: what the same precision costs elsewhere
            cpu_result = recorded.learn(algorithm, "cpu", "bf16")
            figures["bf16 on the processor"] = {"gradients apart": distance(cpu_result.gradients, reference.gradients)}
