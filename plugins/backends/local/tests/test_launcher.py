"""The local launcher, precision, schedules and options."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import GeneratorSpec, ModelSpec, Place
from rlhf.types import RoleSpec
from rlhf_modeling import precision
from rlhf_modeling.rate_schedule import RateSchedule
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig


def test_the_launcher_runs_one_rank_in_this_process(model_path, make_batch):
    spec = ModelSpec(RoleSpec("reference"), str(model_path), "fp32")
    launcher = LocalLauncher()
    group = launcher.launch_trainer(TorchTrainer, None, spec)
    assert group.size == 1
    [[out]] = group.call("forward", [([make_batch([4, 5])], ["logprobs"], "live")])
    assert out["logprobs"].shape == (9,)
    generator = launcher.launch_generator(TransformersGenerator, None, GeneratorSpec((1,), str))
    assert isinstance(generator, TransformersGenerator)
    assert [len(b.tensors) for b in group.stream("buckets", "live", 1)] == [1] * len(group.worker.sent_fingerprints())
    launcher.place({"policy": Place(), "generator": Place(share="policy")})
    with pytest.raises(ConfigError, match=r"\[placement.policy\] asks for 2 ranks of 1 devices"):
        launcher.place({"policy": Place(2)})
    launcher.choose_link(TransformersGenerator, "auto")
    with pytest.raises(ConfigError, match=r"sync\.transport = 'shared': launcher 'local' passes weights within one"):
        launcher.choose_link(TransformersGenerator, "shared")
    with pytest.raises(CapabilityError, match=r"1 rank, but forward\(\) was called with arguments for 2"):
        group.call("forward", [(), ()])
    with pytest.raises(CapabilityError, match="one rank, but role 'reference' asks for 2"):
        launcher.launch_trainer(TorchTrainer, None, ModelSpec(spec.role, spec.path, world_size=2))


def test_every_process_of_torchrun_would_be_a_whole_run(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun started this process as rank 1 of 2, .*--launcher.use processes"):
        LocalLauncher.check(None, {"policy": Place()}, None, "auto")
    monkeypatch.setenv("WORLD_SIZE", "1")
    LocalLauncher.check(None, {"policy": Place()}, None, "auto")


def factors(total, **options):
    schedule = RateSchedule(TorchTrainerConfig(**options), total)
    return [round(schedule.factor(i), 4) for i in range(total)]


def test_schedules_have_the_documented_shapes():
    assert factors(3) == [1, 1, 1]
    assert factors(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert factors(4, schedule="cosine") == [1, 0.8536, 0.5, 0.1464]
    assert factors(4, schedule="cosine_with_min") == [1, 0.8682, 0.55, 0.2318]
    assert factors(4, schedule="cosine_with_min", min_lr_ratio=0.5) == [1, 0.9268, 0.75, 0.5732]
    assert factors(5, schedule="wsd", decay_ratio=0.6) == [1, 1, 1, 0.6667, 0.3333]
    assert factors(5, schedule="wsd", decay_ratio=0.4, min_lr_ratio=0.5, warmup_steps=1) == [0.5, 1, 1, 1, 0.75]
    assert factors(20, schedule="wsd") == [1] * 19 + [0.5]
    assert factors(5, schedule="inverse_sqrt") == [1, 0.7071, 0.5774, 0.5, 0.4472]
    assert factors(6, schedule="inverse_sqrt", warmup_steps=2) == [0.3333, 0.6667, 1, 0.866, 0.7746, 0.7071]
    assert RateSchedule(TorchTrainerConfig(schedule="wsd"), 9).factor(9) == 0.0
    assert RateSchedule(TorchTrainerConfig(schedule="inverse_sqrt"), 0).factor(3) == 0.5
    with pytest.raises(ConfigError, match="fewer than the 4 of warm-up and 6 of decay together"):
        RateSchedule(TorchTrainerConfig(schedule="wsd", warmup_steps=4, decay_ratio=0.6), 9)
    assert factors(6, schedule="linear", warmup_steps=2) == [0.3333, 0.6667, 1, 0.75, 0.5, 0.25]
    assert factors(6, schedule="linear", warmup_ratio=0.3) == [0.3333, 0.6667, 1, 0.75, 0.5, 0.25]
    assert RateSchedule(TorchTrainerConfig(schedule="linear"), 4).factor(9) == 0.0
    with pytest.raises(ConfigError, match="schedule = 'cosine' needs the number of optimizer steps"):
        RateSchedule(TorchTrainerConfig(schedule="cosine"), 0)
    with pytest.raises(ConfigError, match=r"warmup_ratio = 0.1 needs"):
        RateSchedule(TorchTrainerConfig(warmup_ratio=0.1), 0)


def test_the_wsd_schedule_equals_that_of_transformers():
    """Compared after the warm-up, which transformers starts at rate 0."""
    from transformers import get_wsd_schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = get_wsd_schedule(
        optimizer, 3, num_decay_steps=8, num_training_steps=20, min_lr_ratio=0.2, decay_type="linear"
    )
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    multipliers = factors(20, schedule="wsd", warmup_steps=3, decay_ratio=0.4, min_lr_ratio=0.2)
    assert multipliers[3:] == pytest.approx(rates[3:], abs=1e-4)
    assert 0.2 < multipliers[-1] < multipliers[12] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\)"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "set only one of them"),
        ({"min_lr_ratio": 0.1}, "has no effect with schedule = 'constant'"),
        ({"decay_ratio": 0.1, "schedule": "cosine"}, "has no effect with schedule = 'cosine': set schedule = 'wsd'"),
        ({"learning_rate": 1.0}, "Extra inputs"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        TorchTrainerConfig(**options)


def test_precision_asks_the_processor_and_measures(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    info.write_text("model name : x\nflags : sse avx512f avx512_bf16 amx_tile\n")
    assert precision.bf16_flags(info) == ("avx512_bf16",)
    info.write_text("flags : sse avx2\n")
    assert precision.bf16_flags(info) == ()
    cpu = torch.device("cpu")
    for flags, gain, name, note in (
        ((), 9.0, "fp32", "has no bf16 arithmetic"),
        (("amx_bf16",), 4.0, "bf16", "4.0 times as fast as in fp32 (amx_bf16)"),
        (("amx_bf16",), 1.1, "fp32", "1.1 times as fast"),
    ):
        precision._automatic.cache_clear()
        monkeypatch.setattr(precision, "bf16_flags", lambda flags=flags: flags)
        monkeypatch.setattr(precision, "measured_gain", lambda gain=gain: gain)
        chosen = precision.choose_precision("auto", cpu)
        assert chosen.name == name
        assert note in chosen.note
    precision._automatic.cache_clear()
    assert precision.choose_precision("fp32", cpu).name == "fp32"
    with pytest.raises(ConfigError, match="dtype = 'fp8' is not known"):
        precision.choose_precision("fp8", cpu)


def test_the_measured_gain_is_a_ratio():
    assert 0.01 < precision.measured_gain(size=64, repeats=50) < 100  # of the fastest repeats


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so device = 'cuda' is not refused")
def test_a_missing_gpu_is_refused():
    with pytest.raises(CapabilityError, match="sees no GPU"):
        precision.choose_device("cuda")
    assert precision.choose_device("auto").type == "cpu"
