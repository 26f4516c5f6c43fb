"""Options of a step in whole runs: a named chat template, a reference that follows, masks."""

from __future__ import annotations

import pytest
import torch
from rlhf_runtime.data.tokenizer import load_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.runs import Finished, Workshop

TEMPLATE = "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
OPENING = "{% if add_generation_prompt %}a:{% endif %}"


def test_a_named_chat_template_is_trained_with_and_exported(shop: Workshop) -> None:
    file = shop.file("own.jinja", TEMPLATE + OPENING)
    plain = shop.train("sft", "plain", run={"steps": 1})
    run = shop.train("sft", "run", run={"steps": 1}, data={"chat_template": str(file)})
    assert run.lines()[0]["policy/nll"] != plain.lines()[0]["policy/nll"]
    tokenizer = load_tokenizer(str(run.path / "model"))
    messages = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "u:1+1=<eos>a:"
    assert not load_tokenizer(str(plain.path / "model")).chat_template


def kl(run: Finished) -> list[float]:
    return [line["policy/kl_reference"] for line in run.lines()]


def test_a_reference_follows_the_policy(shop: Workshop) -> None:
    """The reference is a copy of the policy after the second step, so their KL is 0 in steps 1 and 3."""
    still, follows = {"coef": 0.1, "where": "loss", "unbiased": True}, {"snapshot_every": 2}
    still_kl = kl(shop.train("grpo", "one", algorithm={"kl": still}))
    two = kl(shop.train("grpo", "two", algorithm={"kl": still | follows}))
    half = kl(shop.train("grpo", "half", algorithm={"kl": still | follows | {"snapshot_share": 0.5}}))
    assert still_kl[:2] == two[:2] == half[:2]
    assert still_kl[0] == pytest.approx(0, abs=1e-9)
    assert two[2] == pytest.approx(0, abs=1e-9)
    assert still_kl[1] > 1e-6
    assert 1e-7 < half[2] < still_kl[2]


@pytest.mark.parametrize(("loss", "minibatches"), [("reinforce", 1), ("reinforce", 2), ("ppo", 2)])
def test_the_kl_to_the_generator_is_not_that_of_the_update(shop: Workshop, loss: str, minibatches: int) -> None:
    """With large steps the policy moves far from the one that sampled, which is not the generator's doing."""
    algorithm = {"loss": {"use": loss}, "minibatches": minibatches}
    run = shop.train("rloo", "run", algorithm=algorithm, trainer={"lr": 0.05}, run={"steps": 2})
    values = [line.get("policy/kl_generator") for line in run.lines()]
    if loss == "reinforce" and minibatches > 1:
        assert values == [None, None]
    else:
        assert all(value is not None and value < 1e-8 for value in values)


def test_truncated_samples_are_not_trained_on(shop: Workshop) -> None:
    """Most answers of an untrained model are truncated. The metrics of the loss are those of the other answers."""
    masked = {"mask_truncated": True, "loss": {"top_entropy": 0.5, "stale_mask": 0.1}}
    run = shop.train("rloo", "run", algorithm=masked, sampling={"samples_per_prompt": 6, "max_new_tokens": 12})
    lines = run.lines()
    assert any(0 < line["length/truncated"] < 1 for line in lines)
    assert all(("policy/loss" in line) == (line["length/truncated"] < 1) for line in lines)
    assert all("empty" not in line for line in lines)


def test_the_critic_may_learn_in_units_of_the_returns(shop: Workshop) -> None:
    lines = shop.train("ppo", "run", algorithm={"normalise_values": True}).lines()
    assert all(line["value/scale_std"] > 0 for line in lines)
    assert lines[0]["critic/return"] == pytest.approx(0, abs=1e-6), "of the first batch, by its own mean"


def test_the_critic_is_exported_and_starts_another_run(shop: Workshop) -> None:
    run = shop.train("ppo", "run", checkpoint={"export_trained": True})
    critic = run.path / "model-critic"
    saved = load_file(run.last_checkpoint / "roles" / "critic" / "model.safetensors")
    model = AutoModelForSequenceClassification.from_pretrained(critic)
    assert model.config.num_labels == 1
    assert all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
    load_tokenizer(str(critic))
    second = shop.train("ppo", "again", critic={"model": str(critic)})
    assert second.lines()[0]["value/mean"] != run.lines()[0]["value/mean"]
    assert not (second.path / "model-critic").exists()


def test_export_trained_writes_nothing_more_if_only_the_policy_is_trained(shop: Workshop) -> None:
    run = shop.run("grpo", "run", checkpoint={"export_trained": True})
    assert run.code == 2
    assert "checkpoint.export_trained: 'grpo' configured like this trains no role except the policy" in run.said
