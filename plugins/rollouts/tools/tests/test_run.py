"""A run with a real model and the embedded generator: what is trained on is what was sampled, results included."""

from __future__ import annotations

import json

import pytest
import torch
from rlhf_cli.main import main
from rlhf_runtime.checkpoint.saved_groups import recorded
from rlhf_testing.chat_templates import CHATML, HERMES
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOL = 'def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n'
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><eos>'
SHORT = HERMES.replace("{{ tool | tojson }}", "{{ tool.function.name }}")
"""Without the descriptions, which are long for a tokenizer of characters."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that has learned one conversation by heart, nearly."""
    path = tiny_model(tmp_path_factory.mktemp("model"), hidden=64, chat_template=SHORT)
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    head = "<|im_start|>system\n<tools>\nadd\n</tools><eos>\n<|im_start|>user\n2+3?<eos>\n<|im_start|>assistant\n"
    result = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><eos>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer(head + CALL + result + "5<eos>")["input_ids"]])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    torch.manual_seed(0)
    for _ in range(200):
        loss = policy(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.02:
            break
    policy.save_pretrained(path)
    return path


def test_rows_for_fine_tuning_can_show_the_tools_of_a_run(tmp_path, capsys) -> None:
    """`rlhf data preview` prints the descriptions; as a column of rows they make the prompt of a sample."""
    path = tiny_model(tmp_path / "model", chat_template=HERMES)
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+3?"}) + "\n")
    words = ["--model", str(path), "--data", str(tmp_path / "rows.jsonl")]
    run = ["--algo", "rloo", "--rollout.use", "tools", "--rollout.functions", f'["file:{tmp_path}/tool.py:add"]']
    assert main(["data", "preview", *words, *run, "--json"]) == 0
    tools = json.loads(capsys.readouterr().out)["tools"]
    assert main(["data", "preview", *words, *run]) == 0
    assert json.dumps(tools) in capsys.readouterr().out.splitlines()
    row = {"prompt": "2+3?", "response": "5", "tools": tools}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["data", "preview", *words, "--algo", "sft", "--json"]) == 0
    preview = json.loads(capsys.readouterr().out)
    (sequence,) = preview["shown"][0]["sequences"]
    text = AutoTokenizer.from_pretrained(path).apply_chat_template(
        [{"role": "user", "content": "2+3?"}], tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert "".join(sequence["texts"]) == text + "5<eos>"
    assert preview["tools"] == []
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "answer": "5"}) + "\n")
    run += ["--reward", "math", "--sampling.samples_per_prompt", "2", "--data.max_tokens", "600"]
    assert main(["train", *words, *run, "--run.output", str(tmp_path / "run"), "--dry-run"]) == 0
    assert "has the column 'tools', which the rollout 'tools' does not read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        (CHATML, "does not write the descriptions"),
        (HERMES.replace("<tool_call>", "").replace("</tool_call>", ""), "no call"),  # no tag tells its calls from text
    ],
)
def test_a_template_that_cannot_be_used_for_tools_is_refused_before_anything_is_loaded(
    tmp_path, capsys, chat_template, message
) -> None:
    path = tiny_model(tmp_path / "model", chat_template=chat_template)
    (path / "model.safetensors").unlink()
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+3?", "answer": "5"}) + "\n")
    (tmp_path / "run.toml").write_text(f"""
        run = {{ output = "{tmp_path}/run", steps = 1 }}
        algorithm = {{ use = "rloo" }}
        policy = {{ model = "{path}" }}
        data = {{ train = "{tmp_path}/rows.jsonl" }}
        rollout = {{ use = "tools", functions = ["file:{tmp_path}/tool.py:add"] }}
        reward = [{{ use = "math" }}]
        sampling = {{ samples_per_prompt = 2, max_new_tokens = 4 }}
    """)
    assert main(["train", str(tmp_path / "run.toml"), "--dry-run"]) == 1
    assert message in capsys.readouterr().err


def test_log_probs_of_calls_and_answers_are_the_models_own(model, tmp_path, capsys) -> None:
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+3?", "answer": "5"}) + "\n")
    (tmp_path / "run.toml").write_text(f"""
        run = {{ output = "{tmp_path}/run", steps = 2 }}
        algorithm = {{ use = "rloo" }}
        policy = {{ model = "{model}", dtype = "fp32" }}
        data = {{ train = "{tmp_path}/rows.jsonl", batch_size = 1, max_tokens = 400 }}
        sampling = {{ samples_per_prompt = 4, max_new_tokens = 100 }}
        rollout = {{ use = "tools", functions = ["file:{tmp_path}/tool.py:add"], max_turns = 3 }}
        [[reward]]
        use = "math"
    """)
    assert main(["train", str(tmp_path / "run.toml")]) == 0, capsys.readouterr().err
    samples = [sample for _, sample in recorded(tmp_path / "run" / "rollouts" / "step-000001.arrow")]
    assert any(sample["turns"][2:] and sample["reward"] == 1 for sample in samples), "the tool was called and helped"
    policy = AutoModelForCausalLM.from_pretrained(model)
    for sample in samples:
        ids = torch.tensor([[i for turn in sample["turns"] for i in turn["ids"]]])
        with torch.no_grad():
            logprobs = policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        position = 0
        for turn in sample["turns"]:
            if turn["sampled"]:
                reference = logprobs[position - 1 : position - 1 + len(turn["ids"])]
                assert (reference - torch.tensor(turn["logprobs"])).abs().max() < 1e-5
            position += len(turn["ids"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(abs(line["policy/kl_generator"]) < 1e-5 for line in lines)
    assert lines[0]["rollout/calls/add"] == sum(sample["info"]["rollout/calls/add"] for sample in samples) / 4 > 0
    assert lines[0]["rollout/errors/add"] == 0
