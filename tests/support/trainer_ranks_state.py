"""The tests of checkpoints, exports, skipped steps and lost ranks in the suite of trainers of several ranks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.errors import CheckpointError
from rlhf.interfaces.model import ADAPTERS, PARTS
from rlhf_modeling.adapter_files import FOLDER as ADAPTER
from rlhf_testing.contract import expect
from rlhf_testing.suite_losses import TokenLoss
from safetensors.torch import load_file
from torch import Tensor

from tests.support.rank_batches import batch, spec
from tests.support.rank_processes import Ranks
from tests.support.rank_tests import RankTests, reads
from tests.support.trainer_rank_cases import TrainerRankCases
from tests.support.trainer_rank_checks import check_steps, equal, near, same_bits

EXACT = (1e-6, 1e-5, 1e-12)
"""Tolerances of steps that continue the same state: loss, norm, loss near zero."""


class StateOfRanks(RankTests):
    """A part of :class:`tests.support.trainer_ranks.TrainerRanksContract`."""

    cases: type[TrainerRankCases]
    one_rank: Any
    kinds: frozenset[str] = frozenset({"weight", "average", "optimizer.exp_avg", "optimizer.exp_avg_sq"})
    """What a rank's file of a checkpoint holds of each parameter (AdamW with an average)."""
    gathered: int = 0
    """Elements that an export may gather at a time, if no tensor has more."""

    @property
    def files(self) -> list[str]:
        """The files of the ranks in a checkpoint."""
        return [f"rank-{rank}-of-{self.world}.safetensors" for rank in range(self.world)]

    def alone(self, ranks: Ranks, checkpoint: str, layout: str, **options: Any) -> Any:
        """The trainer on one rank that has loaded a checkpoint."""
        trainer = self.cases.make(spec(ranks.folder), **self.cases.layouts[layout], **options)
        trainer.load(ranks.folder / checkpoint)
        return trainer

    # ----------------------------------------------------------------------------- skips and waits

    @reads("skip")
    def test_a_non_finite_loss_or_gradient_on_one_rank_skips_the_step_on_both(self, ranks: Ranks, layout: str) -> None:
        results = ranks("skip", layout)
        equal(results, results[:1] * self.world, "what the ranks say of the steps")
        (of_loss, *loss), (of_gradient, *gradient) = (
            results[0][kind] for kind in ("suite_infinite", "suite_infinite_gradient")
        )
        start, end = "non-finite loss (nan) of 'suite_infinite'", f"on rank {self.world - self.cases.share}"
        names_loss = of_loss.startswith(start) and of_loss.endswith(end)
        expect(names_loss, f"the reason must name the loss, and say {end!r}, got {of_loss!r}")
        expect(of_gradient.startswith("non-finite gradient (norm "), f"got the reason {of_gradient!r}")
        equal((loss, gradient), ([True, 1, {}], [True, 2, {}]), "weights are unchanged, skipped steps, coverage")
        equal(results[0]["after"], ["", True], "the step after the skipped ones is as without them")

    @reads("timeout")
    def test_a_rank_that_makes_no_call_is_an_error_after_the_timeout(self, ranks: Ranks, layout: str) -> None:
        message = ranks("timeout", layout)[0]
        start, end = "role 'policy', rank 0 of 2: accumulate() lost the other ranks", "trainer.timeout is 120 s"
        expect(
            message.startswith(start) and end in message, f"the error must name role, rank and call, got {message!r}"
        )

    # -------------------------------------------------------------------------------- checkpoints

    @reads("resume")
    def test_resume_with_the_same_number_of_ranks_is_exact(self, ranks: Ranks, layout: str) -> None:
        for report in ranks("resume", layout):
            expect(report["bits"], "weights or averages after load() differ, or after the steps that follow")
            equal(report["steps"][1], report["steps"][0], "the steps after load()")
            equal(report["files"], [*self.files, "trainer.json"], "the files of a checkpoint")
            equal(report["updates"], 5, "updates after load() and three steps")

    @reads("resume")
    def test_a_rank_writes_its_part_only(self, ranks: Ranks, layout: str) -> None:
        first, *_ = files = [ranks.folder / f"saved-{layout}" / name for name in self.files]
        for file in files:
            near(file.stat().st_size, float(first.stat().st_size), 0.1, f"the size of {file.name}")
            equal({name.partition("/")[0] for name in load_file(file)}, self.kinds, f"what {file.name} holds")

    @reads("resume")
    def test_two_ranks_resume_as_one_in_any_layout(self, ranks: Ranks, layout: str) -> None:
        steps = [rank["steps"][0] for rank in ranks("resume", layout)]
        for into in self.cases.layouts:
            trainer = self.alone(ranks, f"saved-{layout}", into, ema_decay=0.9, schedule="cosine")
            self.check_exact(steps, trainer)

    @reads("from_one")
    def test_one_rank_resumes_as_two(self, ranks: Ranks, layout: str) -> None:
        trainer = self.alone(ranks, "from_one", self.cases.default_layout, ema_decay=0.9)
        self.check_exact(ranks("from_one", layout), trainer)

    def check_exact(self, steps: Sequence[Any], trainer: Any) -> None:
        """``steps``: [rank][step], the third to fifth."""
        want = [trainer.update([batch(number)], TokenLoss(), {}, {}) for number in range(2, 5)]
        check_steps(steps, want, *EXACT, share=self.cases.share)

    @reads("critic_state")
    def test_a_critic_resumes_exactly(self, ranks: Ranks, layout: str) -> None:
        equal(ranks("critic_state", layout), [True, True], "whether the step after load() is the uninterrupted one")

    @reads("resume")
    def test_files_that_lack_a_part_are_refused(self, ranks: Ranks, tmp_path: Path, layout: str) -> None:
        saved = tmp_path / "saved"
        shutil.copytree(ranks.folder / f"saved-{layout}", saved)
        options = {**self.cases.layouts[layout], "ema_decay": 0.9}
        trainer, (first, second) = (
            self.cases.make(spec(ranks.folder), **options),
            (saved / name for name in self.files[:2]),
        )
        second.write_bytes(first.read_bytes())
        lacks = r"does not have each of the \d+ elements of 'model.embed_tokens.weight' \(weight\)"
        if layout != [*self.cases.layouts][-1]:  # a rank may have whole tensors alone
            lacks += r"|is of another model: missing \['model"
        with pytest.raises(CheckpointError, match=lacks):
            trainer.load(saved)
        second.unlink()
        with pytest.raises(CheckpointError, match=re.escape(second.name)):
            trainer.load(saved)

    @reads("rows_resume")
    def test_a_checkpoint_continues_with_divided_rows_and_back(self, ranks: Ranks, layout: str) -> None:
        trainer = self.alone(ranks, "from_one", layout, ema_decay=0.9)
        norms = [trainer.update([batch(number)], TokenLoss(), {}, {})[1].grad_norm for number in (2, 3)]
        for norms_of_rank in ranks("rows_resume", layout):
            near(norms_of_rank, norms, 1e-5, "the norms of two steps")
        trainer.load(ranks.folder / f"saved-rows-{layout}")
        same_bits(ranks.tensors(f"resumed-rows-{layout}"), trainer.weights(), "weights on one rank after load()")

    # ------------------------------------------------------------------------------------ exports

    @reads("lora")
    def test_adapters_are_views_of_one_model(self, ranks: Ranks, tmp_path: Path, layout: str) -> None:
        """Two ranks save adapters, one rank loads them: the same merged weights."""
        equal(ranks("lora", layout), [{"base": True, "merged": True}] * 2, "the base is unchanged, weights are merged")
        want = ranks.tensors(f"lora-weights-{layout}")
        trainer = self.alone(ranks, f"lora-saved-{layout}", layout, lora={"rank": 4}, ema_decay=0.5)
        weights = dict(trainer.weights())
        equal(weights.keys(), want.keys(), "the weights that one rank loads")
        same_bits(weights, want.items(), "weights on one rank after load()")
        same_bits(_load_export(ranks.folder / f"lora-exported-{layout}"), want.items(), "the exported weights")
        trainer.export(tmp_path / "one")
        file = f"{ADAPTER}/adapter_model.safetensors"
        reference, exported = (
            load_file(f / file) for f in (tmp_path / "one", ranks.folder / f"lora-exported-{layout}")
        )
        same_bits(exported, reference.items(), "the exported adapter")
        parts, adapters = dict(trainer.weights(PARTS)), dict(trainer.weights(ADAPTERS))
        same_bits(parts, ranks.tensors(f"lora-parts-{layout}").items(), "the base and its adapters")
        same_bits(adapters, exported.items(), "the adapters alone, under PEFT's names")
        equal(parts.keys() - adapters.keys(), weights.keys(), "the names of the base")
        trainer.use_view("ema")
        average = load_file(ranks.folder / f"lora-average-{layout}" / file)
        same_bits(average, trainer.weights(ADAPTERS), "the exported adapter of the average")

    @reads("export")
    def test_an_export_gathers_few_tensors_at_a_time_and_loads_in_transformers(
        self, ranks: Ranks, tmp_path: Path, layout: str
    ) -> None:
        from transformers import AutoTokenizer

        folder, results = ranks.folder / f"export-{layout}", ranks("export", layout)
        want = ranks.tensors(f"exported-{layout}")
        largest = max(tensor.numel() for tensor in want.values())
        for rank in results:
            maximum, elements = max(self.gathered, largest), rank["whole"]
            expect(
                largest <= elements <= maximum,
                f"{elements} elements are whole on a rank; allowed are {largest} to {maximum}",
            )
        expect(3 * maximum < sum(tensor.numel() for tensor in want.values()), "this test needs a larger model")
        equal(results[1]["names"], [], "weights that rank 1 streams")
        files = sorted(folder.glob("*.safetensors"))
        sizes = [file.stat().st_size for file in files]
        expect(len(files) > 3 and max(sizes) < 30_000, f"the files have {sizes} bytes, for shards of 10,000")
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        equal({n: file.name for file in files for n in load_file(file)}, index, "the index of the files")
        model, average = _load_export(folder), _load_export(ranks.folder / f"export-ema-{layout}")
        same_bits(model, want.items(), "the exported weights")
        same_bits(model, [("lm_head.weight", want["model.embed_tokens.weight"])], "the tied head")
        norm = "model.norm.weight"
        expect(not torch.equal(average[norm], model[norm]), "the exported average is the live model")
        equal(AutoTokenizer.from_pretrained(folder).eos_token, "<eos>", "the tokenizer's end token")
        self.one_rank(spec(ranks.folder)).export(tmp_path / "one")
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            equal((folder / name).read_text(), (tmp_path / "one" / name).read_text(), name)


def _load_export(folder: Path) -> Mapping[str, Tensor]:
    """The weights of an export, as transformers loads them."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()
