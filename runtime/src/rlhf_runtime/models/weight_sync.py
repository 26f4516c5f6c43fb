"""Send new weights from the trainer to the generator, and prove that the generator samples with them.

After each sync three things must agree with the trainer: the version, the fingerprint of every tensor as each engine
received it, and the log-probs of a few random sequences (canaries). In runs with images, one canary has an image. The
canaries also detect errors after arrival, such as a packed copy that was not updated, or a tensor that was loaded into
the wrong place.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from rlhf.errors import CapabilityError, PluginInvalid, RolloutError, SyncError, brief, short_list
from rlhf.interfaces import ComponentConfig, EnginePool, Generator, GeneratorSpec, Proof, TakesModule, TakesTensors
from rlhf.interfaces.model import ADAPTERS, PARTS
from rlhf.ops.heads import resolve_head
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.seeds import derive_seed
from rlhf.types import GenerationRequest, Image, Turn
from torch import Tensor

from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.models.roles import Role

HOLDS_NOTHING = "accept:nothing"
"""Capability of a generator without weights, which needs no sync."""
CANARY_TOKENS = 48
"""Number of tokens of a canary, a random sequence whose log-probs are compared."""
FP32_TOLERANCE = 1e-4
BF16_TOLERANCE = 0.3
"""Larger than rounding and smaller than one wrong layer in a real model (``benchmarks/canaries.py``)."""
FP8_TOLERANCE = 0.8
"""Larger than rounding in a real model. The effect of one wrong layer may be smaller, so the generator checks its
layers by itself."""
SIDE = 64
"""Height and width of a canary's image, in pixels. A processor with large patches still makes several features of
it."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """The trainer's values that the generator's proof must equal."""

    version: int
    marks: Callable[[], list[Any]]
    """The fingerprints of all tensors that were sent, from the first rank. The items of other ranks are not read."""
    canaries: list[Canary]
    outputs: Callable[[], dict[str, Tensor]] | None
    """Log-probs of the canaries, if there are any."""


class WeightSync:
    """``push(version)`` sends the policy's weights to the generator.

    Args:
        longest: largest number of tokens of a sequence that the generator accepts.
        images: makes the tokens of images, if the run has images.
        adapters: whether the generator has :attr:`GeneratorSpec.adapters`. Then it gets the base only at the first sync
            and after it lost its weights, and otherwise the adapters alone.
    """

    def __init__(
        self,
        policy: Role,
        generator: Generator,
        section: SyncSection,
        seed: int,
        note: Callable[[str], None],
        longest: int = CANARY_TOKENS,
        images: ImageTokens | None = None,
        adapters: bool = False,
    ) -> None:
        self.policy, self.generator, self.section, self.seed, self.note = policy, generator, section, seed, note
        self.longest, self.images = longest, images
        self.adapters, self._base_proven = adapters, False
        self.version, self._pushes = 0, 0
        self.pause_seconds = 0.0
        """Seconds for which sampling was paused, summed over all syncs."""
        self.peak_memory: list[Mapping[str, int]] = []
        """Peak memory of each process of the generator at the last sync."""

    def refresh(self) -> None:
        """Send the current weights again, because the generator lost them or one of its engines was replaced."""
        self._base_proven = False
        self.push(self.version)

    def push(self, version: int) -> dict[str, float]:
        """Send the weights of ``version``, with which the generator samples from now on. Raises SyncError if the proof
        fails and ``sync.check`` does not allow that."""
        self.version, self._pushes = version, self._pushes + 1
        generator, worker = self.generator, self.policy.group.worker
        if HOLDS_NOTHING in generator.capabilities:
            generator.version = version
            return {}
        if isinstance(generator, TakesModule) and worker is not None:
            proof = generator.load(worker, version)
            if proof.version != version:
                raise SyncError(f"the generator reports weight version {proof.version} after a sync of {version}")
            return {"sync/version": float(version)}
        if not isinstance(generator, TakesTensors):
            location = "in this process" if worker is not None else "in another process"
            raise CapabilityError(
                f"generator {generator.name!r} ({type(generator).__name__}) cannot receive weights from the policy, "
                f"which is {location}. It must be an rlhf.interfaces.TakesTensors, or a TakesModule in the process of "
                "the policy."
            )
        start = time.perf_counter()
        if isinstance(generator, EnginePool):
            generator.pause()
        metrics = self._push_proven(generator, version)
        self.pause_seconds += time.perf_counter() - start
        if isinstance(generator, EnginePool):
            generator.resume()  # not after an error: nothing is sampled with weights that are not proven
        return metrics

    # ------------------------------------------------------------------------------- the parts of a push

    def _push_proven(self, generator: TakesTensors, version: int) -> dict[str, float]:
        tries = 2 if self.section.check == "retry" else 1
        for attempt in range(1, tries + 1):
            proofs: list[Proof] = []
            fit = True
            try:
                proofs, reference = self._send(generator, version)
            except SyncError as incomplete:  # the generator itself reports missing tensors
                fit, problems, difference = False, [str(incomplete)], float("nan")
            else:
                problems, difference = self._examine(generator, proofs, reference)
            metrics = {"sync/version": float(version), "sync/attempts": float(attempt), "sync/canary": difference}
            metrics["sync/MiB"] = sum(p.nbytes for p in proofs) / 2**20
            if proposed := sum(p.drafts[0] for p in proofs):
                metrics["sync/drafts_accepted"] = sum(p.drafts[1] for p in proofs) / proposed
            self.peak_memory = [proof.peak_memory for proof in proofs]
            if not problems:
                self._base_proven = True
                return metrics
            # So the next attempt sends the base, too.
            self._base_proven = False
            message = f"the weight sync of version {version} cannot be proven:\n  " + "\n  ".join(problems)
            if attempt < tries:
                self.note(f"{message}\nsending the weights again")
        if self.section.check == "warn" and fit:
            self.note(message)
            return metrics | {"sync/unproven": 1.0}
        on = (
            ' With sync.check = "warn" the run continues anyway.'
            if fit
            else " The generator cannot continue with only some of the weights."
        )
        raise SyncError(f"{message}\nThe run stops, because it would train on samples of other weights.{on}")

    def _send(self, generator: TakesTensors, version: int) -> tuple[list[Proof], _Reference]:
        generator.begin_load(version)
        for bucket in self._buckets(generator):
            generator.take(bucket)
        reference = self._reference(version)  # the trainer computes this while the generator prepares
        pushes = self._pushes
        proofs = proofs_of(generator)
        if self._pushes != pushes:  # an engine was replaced: these are the proofs of refresh(), which sent the base too
            reference = replace(reference, marks=self._marks())
        return proofs, reference

    def _marks(self) -> Callable[[], list[Any]]:
        return self.policy.group.begin("sent_fingerprints", [()] * self.policy.group.size)

    def _reference(self, version: int) -> _Reference:
        marks = self._marks()
        if not (count := self.section.canaries):
            return _Reference(version, marks, [], None)
        canaries = self._canaries(version, count)
        outputs = self.policy.begin_forward(pack([c.unit() for c in canaries]), [resolve_head("logprobs", None)])
        return _Reference(version, marks, canaries, outputs)

    def _canaries(self, version: int, count: int) -> list[Canary]:
        """``count`` canaries of text, followed by one with an image if the run has images."""
        draw = random.Random(derive_seed(self.seed, "canary", version))
        vocabulary = self.policy.facts.vocabulary
        canaries = [text_canary(draw, vocabulary, min(CANARY_TOKENS, self.longest)) for _ in range(count)]
        if self.images is not None:
            canary = image_canary(draw, vocabulary, self.images, self.longest)
            if canary is not None:
                return [*canaries, canary]
            self.note(
                f"syncs are proven without an image canary, which needs more than {self.longest} tokens "
                "(data.max_tokens)"
            )
            self.images = None
        return canaries

    def _buckets(self, generator: TakesTensors) -> Iterator[Any]:
        limit, timeout = self.section.bucket_mb * 2**20, self.section.timeout
        view = "live"
        if self.adapters:
            view = ADAPTERS if self._base_proven and generator.has_base else PARTS
        return self.policy.group.send_buckets(view, limit, timeout)

    def _examine(
        self, generator: TakesTensors, proofs: Sequence[Proof], reference: _Reference
    ) -> tuple[list[str], float]:
        """(problems, largest difference of a canary)."""
        marks = reference.marks()[0]
        problems = []
        for proof in proofs:
            if proof.version != reference.version:
                problems.append(f"{proof.receiver} reports version {proof.version}")
            missing = [name for name in marks if name not in proof.received]
            other = [name for name, mark in proof.received.items() if marks.get(name, mark) != mark]
            unknown = [name for name in proof.received if name not in marks]
            for names, verb in ((missing, "did not receive"), (other, "received other values of"), (unknown, "got")):
                if names:
                    problems.append(f"{proof.receiver} {verb} {short_list(names, 8)}")
        if reference.outputs is None:
            return problems, 0.0
        images = [c.images for c in reference.canaries]
        answers = generator.logprobs([c.ids for c in reference.canaries], *([images] if any(images) else []))
        check_answers(generator, answers, reference.canaries)
        formats = {self.policy.facts.dtype, *(p.dtype for p in proofs)}
        default = FP8_TOLERANCE if "fp8" in formats else BF16_TOLERANCE if "bf16" in formats else FP32_TOLERANCE
        tolerance, coarse = self.section.tolerance or default, default != FP32_TOLERANCE
        differences = canary_differences(reference.canaries, reference.outputs()["logprobs"], answers, coarse)
        # Not `gap > tolerance`, which is False for NaN.
        wrong = [canary for canary, gap in zip(reference.canaries, differences, strict=True) if not gap <= tolerance]
        largest = float(torch.tensor(differences).max())  # NaN, if one is
        if wrong:
            label = "the canary with an image" if all(c.images for c in wrong) else "the canaries"
            over = "in the median" if coarse else "on average"
            problems.append(
                f"log-probs of {label} differ from the trainer's by {largest:.2g} {over}; at most {tolerance:g} is "
                f"allowed (sync.tolerance). {self._suspects(generator)}"
            )
        return problems, largest

    def _suspects(self, generator: TakesTensors) -> str:
        """After a canary failed, send the weights once more, for comparison only."""
        stale: list[str] = []
        for bucket in self._buckets(generator):
            stale += generator.stale(bucket)
        if not stale:
            return "No single tensor could be shown to be stale: look for differences in arithmetic (dtype, attention)."
        return f"Stale in the generator: {short_list(stale, 8)}."


class NoGenerator(Generator):
    """The generator of a run whose rollout generates nothing (``Rollout.needs_generator`` is false). It has a version
    but no weights."""

    name = "none"
    capabilities = frozenset({HOLDS_NOTHING})

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config = ComponentConfig()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        raise RolloutError("the rollout asked for tokens, but it declares needs_generator = False; set it to True")


def proofs_of(generator: TakesTensors) -> list[Proof]:
    """The proofs of a load. Without one, nothing would show that the weights arrived."""
    name, proofs = getattr(generator, "name", ""), generator.end_load()
    if not isinstance(proofs, list | tuple) or not proofs or not all(isinstance(proof, Proof) for proof in proofs):
        raise PluginInvalid(
            f"end_load() of generator {name!r} returned {brief(proofs)}; allowed: a list with one Proof for "
            "each process that holds weights"
        )
    return [*proofs]


def check_answers(generator: TakesTensors, answers: Any, canaries: Sequence[Canary]) -> None:
    """Raises PluginInvalid if the generator's log-probs are not one number for each token of each canary."""
    sizes = [len(canary.ids) - 1 for canary in canaries]
    engines: Any = answers if isinstance(answers, Sized) and len(answers) else [[]]
    rows = [engine if isinstance(engine, Iterable) else [] for engine in engines]
    if not all([len(row) if isinstance(row, Sized) else -1 for row in engine] == sizes for engine in rows):
        name = getattr(generator, "name", "")
        raise PluginInvalid(
            f"logprobs() of generator {name!r} returned {brief(answers)} for {len(sizes)} sequences; allowed: "
            "[engine][sequence][token - 1], one number for each token of a sequence except the first"
        )


@dataclass(frozen=True, slots=True)
class Canary:
    ids: Sequence[int]
    images: tuple[Image, ...] = ()
    first: int = 1
    """Position of the first token whose log-prob is compared: after the image, if there is one. Tokens before an image
    do not depend on it and would only lower the mean. Tokens of the image are never trained on."""

    def unit(self) -> UnitData:
        """The canary as a unit of a batch for the trainer."""
        mask = [i >= self.first for i in range(len(self.ids))]
        return UnitData([SequenceData(self.ids, {"loss_mask": mask}, images=self.images)])


def text_canary(draw: random.Random, vocabulary: int, tokens: int) -> Canary:
    """Random tokens."""
    return Canary([draw.randrange(vocabulary) for _ in range(tokens)])


def image_canary(draw: random.Random, vocabulary: int, place: ImageTokens, longest: int) -> Canary | None:
    """One random token, an image of noise with the tokens that the run's data would have for it, and random tokens.

    None if ``longest`` tokens leave no room after the image.
    """
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.frombytes("RGB", (SIDE, SIDE), draw.randbytes(SIDE * SIDE * 3)).save(file, "PNG")
    image_ids, _, [image] = place.place([place.placeholder], [file.getvalue()])
    first = 1 + len(image_ids)
    if longest <= first:
        return None
    front, *after = (draw.randrange(vocabulary) for _ in range(1 + min(CANARY_TOKENS, longest - first)))
    return Canary([front, *image_ids, *after], (image.moved(1),), first)


def canary_differences(
    canaries: Sequence[Canary], logprobs_N: Tensor, engines: Sequence[Sequence[Sequence[float]]], coarse: bool
) -> list[float]:
    """For each canary, the |difference| of log-probs of the engine that differs most; NaN if either side is not finite.
    In fp32 it is the mean over the canary's tokens, because a wrong expert moves few tokens. In bf16 and fp8 it is the
    median over the tokens of all canaries with images, or without, because rounding moves single tokens of a real model
    by several nats, and at times most tokens of one canary.

    Args:
        logprobs_N: the trainer's log-probs of all tokens.
        engines: the answers of :meth:`rlhf.interfaces.TakesTensors.logprobs`.
        coarse: whether either side computes in bf16 or fp8.
    """
    logprobs = logprobs_N.split([len(c.ids) for c in canaries])
    gaps = [
        torch.stack([(torch.tensor(engine[i][c.first - 1 :]) - logprobs_T[c.first :]).abs() for engine in engines])
        for i, (c, logprobs_T) in enumerate(zip(canaries, logprobs, strict=True))
    ]  # of each canary [engine, token]
    if coarse:
        kinds = [bool(c.images) for c in canaries]
        gaps = [torch.cat([x for x, other in zip(gaps, kinds, strict=True) if other == kind], 1) for kind in kinds]
    ends = [(x.median(1).values if coarse else x.mean(1)) + 0 * x.sum(1) for x in gaps]  # NaN if a token is not finite
    return [float(x.max()) for x in ends]
