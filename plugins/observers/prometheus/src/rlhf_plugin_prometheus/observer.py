"""Serves the newest metrics of a run over HTTP, in the text format of Prometheus."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig, Observer, RunInfo

_LOG = logging.getLogger(__name__)


class PrometheusConfig(ComponentConfig):
    host: str = "127.0.0.1"
    """Address to listen on. Anyone who can reach it can read the metrics."""
    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port to listen on; 0: any free port, which the log names."""


class PrometheusObserver(Observer):
    """The newest value of each metric as ``rlhf_metric{run="...",name="reward/mean"}``, until the run ends."""

    name = "prometheus"
    source = "https://prometheus.io"
    Config = PrometheusConfig
    config: PrometheusConfig

    def __init__(self, config: ComponentConfig | None = None) -> None:
        super().__init__(config)
        self.port = self.config.port
        """Port on which it listens, once the run has started."""
        self._server: Any = None

    def check(self, output: Path) -> None:
        try:
            family = socket.getaddrinfo(self.config.host, self.config.port)[0][0]
            with socket.socket(family) as trial:
                # as the server does, which may take a port that an earlier run has just left
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((self.config.host, self.config.port))
        except OSError as cause:
            raise ConfigError(
                f"observer 'prometheus' cannot listen at {self.config.host}:{self.config.port} ({cause}). Set another "
                "port (0: any free port), or set host to an address of this machine."
            ) from cause

    def run_started(self, info: RunInfo) -> None:
        registry = CollectorRegistry()
        self._run = info.name
        self._metric = Gauge("rlhf_metric", "Newest value of a metric", ["run", "name"], registry=registry)
        self._step = Gauge("rlhf_step", "Finished steps", ["run"], registry=registry)
        Gauge("rlhf_steps", "Steps of the run", ["run"], registry=registry).labels(info.name).set(info.total_steps)
        self._step.labels(info.name).set(info.first_step)
        self._server, self._thread = start_http_server(self.config.port, self.config.host, registry)
        self.port = self._server.server_port
        _LOG.warning("metrics for Prometheus: http://%s:%d/metrics", self.config.host, self.port)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step.labels(self._run).set(step)
        for name, value in metrics.items():
            self._metric.labels(self._run, name).set(value)

    def run_ended(self, status: str) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()
