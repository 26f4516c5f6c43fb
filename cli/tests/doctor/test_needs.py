"""Checks of a run file, with folders that each lack one thing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rlhf_cli.doctor import needs
from rlhf_runtime.config.load import load
from rlhf_testing.tiny import tiny_model
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(model, tmp_path):
    """A copy of the model's folder, which tests damage."""
    return shutil.copytree(model, tmp_path / "copy")


def run(**values):
    pairs = [("algorithm.use", "of_no_matter"), *((k.replace("__", "."), str(v)) for k, v in values.items())]
    return load(None, pairs)


# --------------------------------------------------------------------------------------------- models


def test_a_models_size_is_read_from_headers(model):
    from transformers import AutoModelForCausalLM

    real = AutoModelForCausalLM.from_pretrained(model)
    checks, sizes = needs.models(run(policy__model=model))
    assert [c.status for c in checks] == ["ok"]
    tensors = {t.data_ptr(): t.numel() for t in real.state_dict().values() if torch.is_tensor(t)}
    assert sizes["policy.model"].parameters == sum(tensors.values())
    assert sizes["policy.model"].bytes == sum(p.stat().st_size for p in model.glob("*.safetensors"))


def adapter_of(base, folder):
    """An adapter that PEFT wrote: it has no config.json."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    save_file({"a": torch.zeros(3)}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_has_the_size_of_its_base(model, tmp_path):
    names = {"local": model, "hub": "org/name", "absent": tmp_path / "no", "damaged": model}
    folders = {name: adapter_of(base, tmp_path / name) for name, base in names.items()}
    (folders["damaged"] / "adapter_model.safetensors").write_bytes(b"{}")
    roles = {f"roles__{name}__model": folder for name, folder in folders.items()}
    checks, sizes = needs.models(run(policy__model=model, **roles))
    assert [check.status for check in checks] == ["ok", "ok", "skipped", "fail", "fail"]
    assert sizes["roles.local.model"] == sizes["policy.model"]
    assert "adapter_model.safetensors is not a safetensors file" in checks[-1].text


def test_every_model_of_the_run_file_is_looked_at(model, tmp_path):
    config = run(
        policy__model=model, critic__model=tmp_path / "no", roles__judge__model="org/name", reward=f"model:{model}"
    )
    checks, _ = needs.models(config)
    statuses = {c.name: c.status for c in checks}
    assert statuses == {"policy.model": "ok", "critic.model": "fail", "roles.judge.model": "skipped", "reward.0": "ok"}


def test_a_model_of_another_format_fails_with_the_command_that_converts_it(copy, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    checks, sizes = needs.models(run(policy__model=tmp_path / "m.gguf", critic__model=copy))
    assert ([c.status for c in checks], sizes) == (["fail", "fail"], {})
    assert f"rlhf convert {tmp_path / 'm.gguf'} {tmp_path / 'm'}" in checks[0].remedy
    assert f"rlhf convert {copy} {copy}-safetensors" in checks[1].remedy


def cut(size):
    return lambda file: file.write_bytes(file.read_bytes()[:size])


def of_a_shard(file):
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    file.rename(file.with_name(names["a"]))
    file.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def header_of_no_tensors(file):
    file.write_bytes((2).to_bytes(8, "little") + b"[]")


def without_shards(file):
    file.write_text("{}")


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("", shutil.rmtree, "there is no such folder"),
        ("config.json", Path.unlink, "config.json"),
        ("config.json", cut(1), "config.json is not a JSON object"),
        ("model.safetensors", Path.unlink, "holds no *.safetensors"),
        ("model.safetensors", cut(-100), "truncated or damaged"),
        ("model.safetensors", cut(20), "is not a safetensors file, or is truncated (20 bytes)"),
        ("model.safetensors", header_of_no_tensors, "a header without shapes and offsets of tensors"),
        ("model.safetensors.index.json", without_shards, "model.safetensors.index.json has no weight_map"),
        ("model.safetensors", of_a_shard, "1 of 2 files of weights are missing: model-00002-of-00002.safetensors"),
    ],
)
def test_a_damaged_model_fails_with_what_is_wrong(copy, name, damage, expected):
    damage(copy / name)
    [check], sizes = needs.models(run(policy__model=copy))
    assert (check.status, sizes) == ("fail", {})
    assert expected in check.text


# ----------------------------------------------------------------------------------------------- data


def test_data(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert needs.data(run()).text == "data.train names no source"
    check = needs.data(run(data__train=tmp_path / "rows.jsonl"))
    assert (check.status, check.text) == ("ok", "1 source can be read")
    check = needs.data(run(data__train=tmp_path / "rows.jsonl", data__eval=tmp_path / "row.jsonl"))
    assert check.status == "fail"
    assert str(tmp_path / "row.jsonl") in check.text
    assert needs.data(run(data__train="org/name")).status == "ok"


# --------------------------------------------------------------------------------------------- output


def test_output_that_can_be_written(tmp_path, model):
    sizes = {"policy.model": needs.Weights(10**9, 0), "reference.model": needs.Weights(10**12, 0)}
    check, room = needs.output(run(run__output=tmp_path / "runs" / "a"), sizes)
    assert check.status == "ok"
    assert "5 checkpoints of all weights with Adam's moments in fp32 take about 55.9 GiB" in room.text
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_output_without_room(tmp_path):
    _, room = needs.output(run(run__output=tmp_path), {"policy.model": needs.Weights(10**14, 0)})
    assert room.status == "warn"


def test_output_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    [check] = needs.output(run(run__output=tmp_path / "file" / "run"), {})
    assert check.text.endswith(f"{tmp_path / 'file'} is a file")


def test_output_that_cannot_be_written(tmp_path):
    [check] = needs.output(run(run__output="/proc/rlhf-doctor"), {})
    assert check.status == "fail"
    assert check.text.startswith("/proc cannot be written: ")


def test_output_that_holds_a_run(tmp_path):
    (tmp_path / "config.toml").write_text("")
    check, _ = needs.output(run(run__output=tmp_path), {})
    assert (check.status, check.text) == ("fail", f"{tmp_path} already holds a run")
    assert needs.output(run(run__output=tmp_path, run__resume="true"), {})[0].status == "ok"
    check, _ = needs.output(run(run__output=tmp_path / "other", run__resume="true"), {})
    assert (check.status, check.remedy) == ("fail", "omit --resume")
