"""The environment: one session of a resources server per episode."""

from __future__ import annotations

import json
import math
import ssl
from functools import cache
from typing import Annotated, Any

import httpx
from pydantic import Field, field_validator
from rlhf.errors import EnvError, shown
from rlhf.interfaces import ComponentConfig, Env
from rlhf.types import EnvStep, Row

from rlhf_plugin_nemo_gym.answers import Answer, output_item, parsed, response, shown_results

PARAMS = "responses_create_params"
LONGEST = 10 * 2**20
"""Bytes of an answer; a longer one is refused."""
TOLD = (400, 422)
"""Status codes with which a tool refuses its arguments. The policy is told the answer."""


class NemoGymConfig(ComponentConfig):
    url: str
    """Address of the resources server, such as ``http://127.0.0.1:8000``."""
    max_steps: Annotated[int, Field(gt=0)] = 8
    """Number of the policy's turns after which the episode is verified as it is. ``[env] max_turns`` must not be
    smaller: it ends an episode without a reward."""

    @field_validator("url")
    @classmethod
    def _web_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not an address of the web: it must begin with http:// or https://")
        return url.rstrip("/")


class NemoGym(Env):
    """Tasks of a resources server of NeMo Gym. The session is seeded with the row. Tool calls in the policy's text are
    made on the server. A turn without a tool call ends the episode: ``/verify`` gives the reward.
    """

    name = "nemo_gym"
    source = "NeMo Gym 0.4.0, https://github.com/NVIDIA-NeMo/Gym"
    Config = NemoGymConfig

    _client: httpx.AsyncClient | None = None

    async def reset(self, row: Row, seed: int) -> str:
        params = row.get(PARAMS)
        if not isinstance(params, dict):
            raise EnvError(
                f"row {row.index} of source {row.source!r}: its column {PARAMS!r} is {shown(params)}; expected an "
                "object"
            )
        self._row, self._tools = dict(row.columns), params.get("tools") or []
        self._names = {
            tool["name"] for tool in self._tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)
        }
        self._output: list[dict[str, Any]] = []
        self._turn = 0
        verify = _certificates() if self.config.url.startswith("https") else False
        self._client = httpx.AsyncClient(timeout=None, verify=verify)  # the deadline of [env] limits each call
        await self._post("seed_session", self._row)
        return ""

    async def step(self, action: str) -> EnvStep:
        answer = parsed(action, self._turn, self._names)
        self._output += answer.items(self._turn)
        self._turn += 1
        results = await self._results(answer)
        if not answer.calls or self._turn >= self.config.max_steps:
            return await self._verified()
        return EnvStep(shown_results(results))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _results(self, answer: Answer) -> list[str]:
        results = []
        for call in answer.calls:
            result = (
                json.dumps({"error": call.problem})
                if call.problem
                else await self._post(call.name, call.arguments, TOLD)
            )
            self._output.append(output_item(call, result))
            results.append(result)
        return results

    async def _verified(self) -> EnvStep:
        request = self._row | {"response": response(self._output, self._tools)}
        body = await self._post("verify", request)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise EnvError(f"{self.config.url}/verify answered {body[:80]!r}, which is not JSON: {error}") from None
        reward = answer.get("reward") if isinstance(answer, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not _is_finite(reward):
            raise EnvError(f"{self.config.url}/verify answered reward = {shown(reward)}; expected a finite number")
        numbers = {k: v for k, v in answer.items() if isinstance(v, int | float) and k not in request and k != "reward"}
        return EnvStep("", float(reward), True, info={k: v for k, v in numbers.items() if _is_finite(v)})

    async def _post(self, path: str, body: Any, statuses: tuple[int, ...] = ()) -> str:
        """The text of the server's answer. Raises EnvError for another status than 200 and those in ``statuses``."""
        url = f"{self.config.url}/{path}"
        if self._client is None:
            raise EnvError(f"{url}: the episode has not been reset")
        try:
            content = json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EnvError(f"{url}: the row cannot be written as JSON: {error}") from None
        try:
            async with self._client.stream(
                "POST", url, content=content, headers={"Content-Type": "application/json"}
            ) as answer:
                data = b""
                async for part in answer.aiter_bytes():
                    data += part
                    if len(data) > LONGEST:
                        raise EnvError(f"{url} answered more than {LONGEST // 2**20} MiB")
        except (httpx.HTTPError, OSError) as error:
            raise EnvError(f"{url}: {error or type(error).__name__}") from error
        text = data.decode(errors="replace")
        if answer.status_code not in (200, *statuses):
            raise EnvError(f"{url} answered with HTTP status {answer.status_code}: {text[:200]!r}")
        return text


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes longer than a request


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
