"""NEFTune: size and time of the noise on embeddings, and equality with transformers' noise for one sequence."""

from __future__ import annotations

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_modeling.embedding_noise import EmbeddingNoise
from rlhf_modeling.model import load_model
from rlhf_modeling.token_parts import RowPart, TokenGroup
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM

LENS = [6, 15, 9, 30, 4]


@pytest.fixture
def loaded(model_path):
    return load_model(ModelSpec(RoleSpec("policy", trained=True), str(model_path)), torch.device("cpu"))


def test_the_noise_of_one_sequence_equals_that_of_transformers(model_path, loaded, make_batch):
    from transformers.integrations.neftune import neftune_post_forward_hook  # imports all of peft

    batch = make_batch([12])
    module, reference = loaded.module, AutoModelForCausalLM.from_pretrained(model_path).train()
    noise, loaded.computing = EmbeddingNoise(loaded, 7.0), [12]
    table = reference.get_input_embeddings()
    table.neftune_noise_alpha = 7.0
    table.register_forward_hook(neftune_post_forward_hook)
    embeddings = []
    for model in (module, reference):
        torch.manual_seed(3)
        with noise.added():
            embeddings.append(model.get_input_embeddings()(batch.ids_N[None]))
    assert torch.allclose(*embeddings, atol=1e-6)
    assert not torch.equal(embeddings[0], module.get_input_embeddings()(batch.ids_N[None])), (
        "no noise outside of training"
    )


def test_the_noise_is_scaled_by_the_length_of_each_sequence(loaded, make_batch):
    batch, table = make_batch(LENS), loaded.module.get_input_embeddings()
    noise, loaded.computing = EmbeddingNoise(loaded, 5.0), LENS
    plain = table(batch.ids_N[None])[0]
    with noise.added():
        added = table(batch.ids_N[None])[0] - plain
    for start, n in zip(batch.starts_B.tolist(), LENS, strict=True):
        bound = 5.0 / (n * plain.shape[1]) ** 0.5
        part_TH = added[start : start + n]
        assert 0.9 * bound < part_TH.abs().max() <= bound * (1 + 1e-5)
        assert part_TH.square().mean().item() == pytest.approx(bound**2 / 3, rel=0.3)


def test_a_rank_that_computes_a_part_of_a_row_scales_by_whole_sequences(loaded, make_batch):
    batch, table = make_batch(LENS), loaded.module.get_input_embeddings()
    noise, loaded.computing = EmbeddingNoise(loaded, 5.0), LENS
    plain, parts = table(batch.ids_N[None])[0], []
    for rank in range(3):
        loaded.part = RowPart(TokenGroup(None, rank, 3), batch.tokens)
        with noise.added():
            parts.append(table(loaded.part.local_rows(batch.ids_N)[None])[0])
    assert [len(part) for part in parts] == [21, 21, 22]
    added = torch.cat(parts) - plain
    for start, n in zip(batch.starts_B.tolist(), LENS, strict=True):
        bound = 5.0 / (n * plain.shape[1]) ** 0.5
        assert 0.9 * bound < added[start : start + n].abs().max() <= bound * (1 + 1e-5)


def test_noise_is_added_only_in_training_and_a_rerun_is_equal(make_trainer, make_batch, nll):
    batch = make_batch(LENS, loss=nll)
    gradients, logprobs = [], []
    for alpha in (None, 5.0, 5.0, 6.0):
        trainer = make_trainer(neftune_alpha=alpha)
        logprobs.append(trainer.forward([batch], ["logprobs"])[0]["logprobs"])
        trainer.accumulate([batch], nll, {}, {})
        gradients.append(torch.cat([g.flatten() for g in trainer.gradients().values()]))
        trainer.zero_grad()
        assert torch.equal(trainer.forward([batch], ["logprobs"])[0]["logprobs"], logprobs[0])
    assert torch.equal(gradients[1], gradients[2])
    assert not torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[1], gradients[3])


def test_each_sequence_with_a_common_prefix_has_its_own_noise(tmp_path, make_trainer, make_batch, nll):
    path = tiny_model(tmp_path / "m")
    batch = make_batch([40], loss=None)
    pair = batch.select([0, 0])
    for alpha, shares in ((None, True), (5.0, False)):
        trainer = make_trainer(path, neftune_alpha=alpha)
        assert trainer.packed.shares_prefixes is shares
        assert trainer.facts().shares_prefixes is shares
        outputs = []
        trainer.module.get_input_embeddings().register_forward_hook(
            lambda m, a, out, outputs=outputs: outputs.append(out[0])
        )
        trainer.accumulate([weigh(pair, nll.reduce())], nll, {}, {})
        assert len(outputs[0]) == (40 if shares else 80)
        if not shares:
            assert not torch.equal(outputs[0][:40], outputs[0][40:])
    frozen = make_trainer(path, trained=False, neftune_alpha=5.0)
    assert frozen.noise is None
