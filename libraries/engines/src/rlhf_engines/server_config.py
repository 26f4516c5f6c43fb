"""Options of generators of servers that are already running: the run file's ``[generator]`` section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from rlhf.interfaces.component import ComponentConfig

LOCAL = ("127.0.0.1", "localhost", "::1")


class EngineServersConfig(ComponentConfig):
    urls: tuple[str, ...] = Field(min_length=1)
    """Addresses of the servers, such as ``http://127.0.0.1:8000``, without ``/v1``."""
    folder: str | None = None
    """A folder that this process and the servers see under the same path. Weights pass through it. It needs room for
    one bucket (``sync.bucket_mb``). Absent: a temporary folder, for servers on this machine."""
    sync: Literal["whole", "differences"] = "whole"
    """What a sync sends. ``whole``: all weights. ``differences``: of weights that the servers have, the elements whose
    value in the servers' format changed since the last sync; the servers get the same weights, bit by bit. This process
    and each worker of each server keep a copy of the weights in host memory for it."""
    requests: int = Field(256, ge=1)
    """Largest number of concurrent requests per server. Others wait here, in order."""
    timeout: float = Field(600.0, gt=0)
    """Seconds for the answer to one request."""
    attempts: int = Field(3, ge=1)
    """How often a request is sent to a server when no connection can be made or one breaks. A repeated sample is the
    same, because it depends on its seed."""
    token_env: str | None = None
    """Environment variable that holds the servers' API key (``--api-key``)."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            try:
                parts = urlsplit(url)
                is_address = parts.port != 0 and parts.scheme in ("http", "https") and bool(parts.hostname)
            except ValueError:  # a port that is no number
                is_address = False
            if not is_address or parts.username or parts.query:
                raise ValueError(
                    f"{url!r} is not the address of a server; allowed: http://HOST:PORT or https://HOST:PORT"
                )
            if parts.path.strip("/"):
                raise ValueError(f"{url!r} has a path: give the address without {parts.path}")
        bare = tuple(url.rstrip("/") for url in urls)
        if len(set(bare)) != len(bare):
            raise ValueError("the same address is given twice")
        return bare

    @model_validator(mode="after")
    def _folder_is_seen(self) -> EngineServersConfig:
        remote_urls = [url for url in self.urls if urlsplit(url).hostname not in LOCAL]
        if self.folder is None and remote_urls:
            raise ValueError(
                f"{remote_urls[0]} is on another machine: set `folder` to a folder that this process and the "
                "servers see at the same path"
            )
        if self.folder is not None and not Path(self.folder).is_absolute():
            raise ValueError(f"folder = {self.folder!r} must be an absolute path that the servers see too")
        return self
