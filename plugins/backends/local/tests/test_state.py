"""Save and load without pickle, bit-exact; exports that load with transformers."""

from __future__ import annotations

import json

import pytest
import torch
from rlhf.errors import CheckpointError, ConfigError
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig


def same(a, b, view="live"):
    pairs = zip(a.weights(view), b.weights(view), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_six_steps_equal_three_and_three_after_a_restart(tmp_path, make_trainer, make_batch, nll, dtype, dropout):
    path = tiny_model(tmp_path / "model", attention_dropout=dropout)
    options = {"ema_decay": 0.9, "schedule": "cosine", "warmup_steps": 2, "total_updates": 6, "dtype": dtype}
    batches = [make_batch([5 + i, 20, 9, 3 * i + 3], seed=i, loss=nll) for i in range(6)]

    def steps(trainer, part):
        return [trainer.update([b.select([0, 1]), b.select([2, 3])], nll, {}, {}) for b in part]

    reference = make_trainer(path, **options)
    results = steps(reference, batches)
    first = make_trainer(path, **options)
    steps(first, batches[:3])
    first.save(tmp_path / "state")
    torch.manual_seed(123)
    second = make_trainer(path, **options)
    second.load(tmp_path / "state")
    assert steps(second, batches[3:]) == results[3:]
    assert same(reference, second)
    assert same(reference, second, "ema")
    assert second.updates == 6
    assert second.coverage() == reference.coverage()


def test_no_pickle_and_a_readable_summary(tmp_path, make_trainer, make_batch, nll):
    trainer = make_trainer()
    trainer.update([make_batch([9, 9], loss=nll)], nll, {}, {})
    trainer.save(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model.safetensors", "optimizer.safetensors", "trainer.json"]
    facts = json.loads((tmp_path / "trainer.json").read_text())
    assert (facts["role"], facts["updates"], facts["precision"]) == ("policy", 1, "fp32")


def test_a_frozen_role_saves_weights_only(tmp_path, make_trainer):
    trainer = make_trainer(trained=False)
    trainer.save(tmp_path)
    assert not (tmp_path / "optimizer.safetensors").exists()
    other = make_trainer(tiny_model(tmp_path / "other", seed=9), trained=False)
    other.load(tmp_path)
    assert same(trainer, other)


def test_checkpoints_of_another_model_or_damaged_ones_are_refused(tmp_path, make_trainer):
    make_trainer().save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="is of another model: missing"):
        make_trainer(tiny_model(tmp_path / "deep", layers=3)).load(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"'model.embed_tokens.weight' has shape \(99, 32\), expected \(99, 16\)"):
        make_trainer(tiny_model(tmp_path / "thin", hidden=16, head_dim=8)).load(tmp_path / "a")
    with pytest.raises(ConfigError, match="was saved with ema = False; this run has ema = True"):
        make_trainer(ema_decay=0.9).load(tmp_path / "a")
    with pytest.raises(CheckpointError, match="Is this a trainer's folder"):
        make_trainer().load(tmp_path)
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cannot read .*model.safetensors.*incomplete or damaged"):
        make_trainer().load(tmp_path / "a")


def test_automatic_precision_follows_the_checkpoint(tmp_path, make_trainer):
    saved = make_trainer(dtype="auto")
    other = {"fp32": "bf16", "bf16": "fp32"}[saved.precision.name]
    make_trainer(dtype=other).save(tmp_path)
    saved.load(tmp_path)
    assert saved.precision.note == f"{other} on cpu: as in the resumed run"


def test_an_explicit_precision_is_kept_on_resume(tmp_path, make_trainer):
    make_trainer(dtype="bf16").save(tmp_path)
    trainer = make_trainer(dtype="fp32")
    trainer.load(tmp_path)
    assert (trainer.precision.name, trainer.precision.note) == ("fp32", "fp32 on cpu: as requested")


def test_a_checkpoint_in_another_format_is_refused(tmp_path, make_trainer):
    make_trainer().save(tmp_path)
    facts = json.loads((tmp_path / "trainer.json").read_text())
    assert facts["format"] == 1
    (tmp_path / "trainer.json").write_text(json.dumps({**facts, "format": 2}))
    with pytest.raises(CheckpointError, match=r"trainer\.json' has format 2; this version reads 1"):
        make_trainer().load(tmp_path)


@pytest.mark.parametrize(("tied", "view"), [(True, "ema"), (False, "live")])
def test_exports_load_with_transformers(tmp_path, make_trainer, make_batch, nll, tied, view):
    path = tiny_model(tmp_path / "model", tied=tied, chat_template="default")
    trainer, batch = make_trainer(path, ema_decay=0.5), make_batch([12], loss=nll)
    trainer.update([batch], nll, {}, {})
    trainer.export(tmp_path / "out", view)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "rlhf" not in (tmp_path / "out" / "config.json").read_text()
    [outputs] = trainer.forward([batch], ["logprobs"], view)
    with torch.no_grad():
        logp = model(input_ids=batch.ids_N[None]).logits[0].log_softmax(-1)
    expected = logp[:-1].gather(1, batch.ids_N[1:, None])[:, 0]
    assert (outputs["logprobs"][2:] - expected[1:]).abs().max() < 5e-6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("1 + 1 =  2\n")) == "1 + 1 =  2\n"
    assert tokenizer.chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 1
    trainer.forward([batch], ["logprobs"])  # still packed after the export


def test_a_scalar_role_exports_a_classifier(tmp_path, make_trainer):
    trainer = make_trainer(head="scalar")
    trainer.export(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert model.config.num_labels == 1
    assert torch.equal(model.score.weight, trainer.loaded_model.head.weight)
