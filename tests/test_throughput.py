"""Throughput and memory in the lines of a run."""

from __future__ import annotations

import pytest
from rlhf_runtime.output.metrics import read_metrics

from tests.continuous import simulated

SAMPLED = ("throughput/sampled", "throughput/sampled_per_device")
TRAINED = ("throughput/trained", "throughput/trained_per_device")


def lines_of(run):
    return read_metrics(run.path / "metrics.jsonl")


def test_tokens_of_a_second_are_those_that_were_sampled_and_trained(shop):
    stream = {"filter": {"min_std": 0.0, "max_rounds": 2}}
    held_out = {"eval": str(shop.data)}
    run = shop.train("grpo", "run", stream=stream, data=held_out, eval={"every": 1})
    for line, name in zip(lines_of(run), sorted(run.rollouts()), strict=True):
        seconds = line["time/step"] - line["time/evaluate"]
        samples = list(run.samples_of(name))
        sampled = sum(len(turn["logprobs"]) for sample in samples for turn in sample["turns"] if turn["logprobs"])
        assert line["throughput/sampled"] * seconds == pytest.approx(sampled + line["stream/tokens_filtered"])
        assert line["throughput/trained"] * seconds > sampled * 0.99  # with prompts
        assert "throughput/mfu" not in line  # the peak of a CPU is not known
        assert line["memory/driver/process"] > 0
        assert not [key for key in line if key.startswith("memory/") and "driver" not in key]  # all are in one process


def test_a_continuous_run_divides_its_tokens_by_the_time_in_which_it_samples_them(shop):
    """Samples continue during evaluations, so this time is at least that of the whole step."""
    held_out = {"eval": str(shop.data)}
    config = simulated(shop, "run", stream={"staleness": 3}, data=held_out, eval={"every": 1})
    run = shop.train_config(config)
    sampled = sum(len(turn["ids"]) for sample in run.samples() for turn in sample["turns"] if turn["sampled"])
    tokens = sum(line.get("throughput/sampled", 0.0) * line["time/step"] for line in lines_of(run))
    assert 0 < tokens < sampled * (1 + 1e-9)


def test_mfu_is_the_share_of_the_peak_that_the_run_file_names(shop):
    runs = [("dpo", "one", 1e-3), ("dpo", "same", 1e-3), ("sft", "sft", 1e-6)]
    first, second, sft = (lines_of(shop.train(a, name, run={"peak_tflops": p})) for a, name, p in runs)
    assert all(0 < line["throughput/mfu"] < 10 for line in first + second)
    assert all({*TRAINED, "throughput/mfu"} <= line.keys() and not {*SAMPLED} & line.keys() for line in sft)


def test_another_peak_is_no_other_run(shop):
    shop.train("sft", "run", run={"stop_after": 1, "peak_tflops": 1.0})
    resumed = shop.train("sft", "run", "--resume", run={"peak_tflops": 2.0})
    assert "different run" not in resumed.said
