"""A real endpoint, read over HTTP."""

import socket
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rlhf.errors import ConfigError
from rlhf.interfaces import RunInfo
from rlhf_plugin_prometheus.observer import PrometheusConfig, PrometheusObserver
from rlhf_testing.observer import ObserverContract, RecordedControl


class TestConforms(ObserverContract):
    observer = PrometheusObserver
    configs = (PrometheusConfig(port=0),)


def read(observer):
    text = urlopen(f"http://127.0.0.1:{observer.port}/metrics", timeout=10).read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels.get("name", sample.name): sample.value for sample in samples}


def test_the_newest_values_are_served_until_the_run_ends(tmp_path):
    observer = PrometheusObserver(PrometheusConfig(port=0))
    observer.check(tmp_path)
    observer.run_started(RunInfo("a run", tmp_path, {}, 9, 4, RecordedControl()))
    assert read(observer) == {"rlhf_step": 4, "rlhf_steps": 9}
    observer.step_finished(5, {"reward/mean": 0.25, 'odd "name"\n': 1.0, "eval/pass@1": 0.5})
    observer.step_finished(6, {"reward/mean": float("inf")})
    assert read(observer) == {"rlhf_step": 6, "rlhf_steps": 9, "reward/mean": float("inf"), 'odd "name"\n': 1.0,
                              "eval/pass@1": 0.5}  # fmt: skip
    observer.run_ended("finished")
    with pytest.raises(URLError):
        read(observer)


def test_a_port_that_is_taken_is_refused_before_the_run(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        observer = PrometheusObserver(PrometheusConfig(port=other.getsockname()[1]))
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{other.getsockname()[1]}"):
            observer.check(tmp_path)
