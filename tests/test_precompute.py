"""A run that computes the columns of a frozen role before the first step equals one that computes them in each step."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors import safe_open

from tests.forks import Forks
from tests.runs import PAIRS, Finished, Workshop


@pytest.fixture
def options(shop: Workshop) -> dict[str, Any]:
    data = shop.rows("pairs.jsonl", PAIRS)
    held_out = shop.rows("held_out.jsonl", [{"prompt": "5+1=", "chosen": "6", "rejected": "7"}])
    return {
        "run": {"steps": 5},
        "data": {"train": str(data), "eval": str(held_out)},
        "eval": {"every": 2},
        "checkpoint": {"every": 2},
        "sampling": None,
        "reward": None,
    }


def numbers(run: Finished) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if isinstance(v, float)} for line in run.lines()]


def assert_near(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    """Equal up to rounding: the reference computes other micro-batches (1e-6 in a log-prob of a few nats)."""
    assert [line.keys() for line in a] == [line.keys() for line in b]
    for first, second in zip(a, b, strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-5)


def test_a_precomputed_reference_changes_no_number(shop, options):
    along = shop.train("dpo", "along", **options)
    cache_run = shop.train("dpo", "before", "--reference.precompute", "true", **options)
    assert_near(numbers(cache_run), numbers(along))
    assert "reference: precomputing ref_logprobs of 26 sequences" in cache_run.said
    with safe_open(cache_run.path / "precomputed" / "reference.safetensors", "pt") as file:
        assert len(file.get_tensor("keys")) == 26
    assert not (along.path / "precomputed").exists()


def test_a_resumed_run_loads_no_reference(shop, options):
    baseline = shop.train("dpo", "whole", "--reference.precompute", "true", **options)
    cut = {**options, "run": {"steps": 5}}
    shop.train("dpo", "cut", "--reference.precompute", "true", "--run.steps", "2", **cut)
    retry = shop.train("dpo", "cut", "--reference.precompute", "true", "--resume", **cut)
    assert "precomputing" not in retry.said
    assert retry.lines()[-1]["policy/loss"] == pytest.approx(baseline.lines()[-1]["policy/loss"], rel=1e-6)


STOPS = """
from rlhf.interfaces import Observer


class Stops(Observer):
    name = "stops"

    def run_started(self, info):
        raise ValueError("stopped")
"""


def test_outputs_of_a_start_with_other_options_are_computed_again(shop, options):
    """A run that finished no step leaves its outputs to the next run in the folder."""
    flags = ("--reference.precompute", "true")
    quantized = (*flags, "--reference.trainer.quantization", "nf4")
    failing = {**options, "observer": [{"use": f"file:{shop.file('stops.py', STOPS)}"}]}
    assert shop.run_config(shop.config("dpo", "run", **failing), *flags).code != 0
    second = shop.train("dpo", "run", *quantized, **options)
    expected = shop.train("dpo", "quantized", *quantized, **options)
    assert numbers(second) == numbers(expected)


@pytest.mark.parametrize(
    "share", [pytest.param(0.0, marks=pytest.mark.full), 0.5, pytest.param(1.0, marks=pytest.mark.full)]
)
def test_a_damaged_file_is_computed_again(shop, options, share):
    """As a copy that broke off or a loss of power leaves it. A killed process also left a file that it was writing."""
    baseline = shop.train("dpo", "whole", "--reference.precompute", "true", **options)
    shop.train("dpo", "run", "--reference.precompute", "true", "--run.stop_after", "2", **options)
    table = shop.folder / "run/precomputed/reference.safetensors"
    table.write_bytes(table.read_bytes()[: int(share * (table.stat().st_size - 1))])
    (table.parent / ".saving-reference.safetensors").touch()
    retry = shop.train("dpo", "run", "--reference.precompute", "true", "--resume", **options)
    assert f"{table} is damaged (" in retry.said
    assert [path.name for path in table.parent.iterdir()] == [table.name]
    assert retry.weights == baseline.weights


@pytest.mark.parametrize(
    ("bytes_", "is_saved"),
    [pytest.param(700, False, marks=pytest.mark.full), (1300, True)],
    ids=["the first part", "the second part"],
)
def test_a_full_disk_is_an_error_of_the_run(
    forks: Forks, shop: Workshop, options: dict[str, Any], bytes_: int, is_saved: bool
) -> None:
    """The size of files is limited below the size of the table. The resumed run uses the part that was written."""
    options = {**options, "data": {**options["data"], "batch_size": 1}}
    baseline = shop.train("dpo", "whole", "--reference.precompute", "true", **options)
    run = shop.config("dpo", "full", **options, reference={"precompute": True})
    full = forks.start(shop.arguments(run), limits={"RLIMIT_FSIZE": bytes_})
    assert full.wait() == 1, full.output
    assert "Traceback" not in full.output
    table = shop.folder / "full/precomputed/reference.safetensors"
    assert f"{table} could not be saved" in full.output
    assert "The disk is full" in full.output
    assert "There is no checkpoint yet: start the run again." in full.output
    assert [p.name for p in table.parent.iterdir()] == ([table.name] if is_saved else [])
    retry = forks.start(shop.arguments(run))
    assert retry.wait() == 0, retry.output
    assert ("precomputing ref_logprobs of 10 sequences" if is_saved else "of 26 sequences") in retry.output
    assert Finished(shop.folder / "full", 0).weights == baseline.weights


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.cluster
def test_on_ray_the_reference_is_gone_before_the_policy_comes(shop, options):
    pytest.importorskip("ray")
    pytest.importorskip("deepspeed")
    embedded = shop.train("dpo", "embedded", "--reference.precompute", "true", **options)
    cluster = {
        "launcher": {"use": "ray", "cpus": 2},
        "trainer": {"use": "deepspeed", "stage": 3},
        "placement": {"reference": {"ranks": 2}, "policy": {"share": "reference"}},
    }
    on_ray = shop.train("dpo", "ray", "--reference.precompute", "true", **{**options, **cluster})
    assert_near(numbers(on_ray), numbers(embedded))
