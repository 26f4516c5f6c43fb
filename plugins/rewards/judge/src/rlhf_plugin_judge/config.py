"""The options of the judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from rlhf.fields import PathText
from rlhf.interfaces import ComponentConfig

RESERVED_FIELDS = ("model", "messages", "n", "stream", "response_format")
"""Fields of a request that ``body`` cannot set."""
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""Key of a score in the judge's answer and in metrics."""
Text = Annotated[str, Field(min_length=1)]
CRITERIA = {"quality": "How good is the answer: correct, complete, and to the point?"}
"""The default of ``criteria``."""
SCALE = (1, 10)
"""The default of ``scale``."""


class JudgeConfig(ComponentConfig):
    url: str
    """Address of the server, up to ``/v1``; ``/chat/completions`` is added."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model, as the server knows it."""
    mode: Literal["rubric", "pairwise"] = "rubric"
    """``rubric``: each answer is scored by the criteria. ``pairwise``: each pair of a group's answers is compared, in
    both orders; the reward is the share of comparisons won, a tie being half."""
    criteria: Mapping[Name, Text] = Field(default_factory=lambda: dict(CRITERIA))
    """{name: question to the judge}: what is scored (``rubric``), or what the comparison is about (``pairwise``)."""
    weights: Mapping[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """{name of a criterion: weight of its score}, for ``rubric``; 1 where absent."""
    scale: tuple[int, int] = SCALE
    """Lowest and highest score of a criterion, whole numbers. The reward is the weighted mean, scaled to 0 .. 1."""
    reference: str | None = None
    """Row column with a correct answer to show to the judge."""
    template: PathText | None = None
    """File with a Jinja template of the judge's question, instead of the built-in one."""
    response_format: Literal["none", "json_object", "json_schema"] = "none"
    """Format that the server should enforce, if it can. The judge's answer is checked in any case."""
    body: Mapping[str, Any] = Field(default_factory=lambda: {"temperature": 0, "max_tokens": 1024})
    """Further fields of each request, in place of these."""
    token_env: str | None = None
    """Environment variable that holds a token, sent as ``Authorization: Bearer``."""
    timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one request."""
    attempts: Annotated[int, Field(gt=0)] = 3
    """Requests for one judgement: after a failure of the server, or an answer that cannot be read."""
    max_requests: Annotated[int, Field(gt=0)] = 16
    """Largest number of requests under way at once."""
    cache: PathText | None = None
    """Folder that keeps judgements for later runs. If absent, they are kept in memory."""
    price: tuple[float, float] | None = None
    """Price of a million prompt tokens and of a million completion tokens, in any currency. Reported as ``cost``."""

    @model_validator(mode="after")
    def _check(self) -> JudgeConfig:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} is not a web address: it must begin with http:// or https://")
        if not self.criteria:
            raise ValueError("criteria is empty; at least one criterion is needed")
        if unknown := sorted(self.weights.keys() - self.criteria.keys()):
            raise ValueError(f"weights names {', '.join(unknown)}; the criteria are {', '.join(self.criteria)}")
        if self.mode == "pairwise" and self.weights:
            raise ValueError("mode = 'pairwise' compares answers as a whole; remove weights")
        if self.mode == "pairwise" and self.scale != SCALE:
            raise ValueError("mode = 'pairwise' has no scores; remove scale")
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale is {list(self.scale)}; expected the lowest score, then a higher one")
        if self.price is not None and min(self.price) < 0:
            raise ValueError(f"price is {list(self.price)}; expected two numbers that are not negative")
        if fixed := sorted(self.body.keys() & set(RESERVED_FIELDS)):
            raise ValueError(f"body sets {', '.join(fixed)}, which the plugin sets itself; remove it")
        return self
