"""The model card of an export (``README.md``): the data, results, options and versions of the run. It is written from
the files of the run, and contains no local path, no address and no secret."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf import __version__
from rlhf.secrets import redact
from rlhf_hub.hub import hub_name

from rlhf_runtime.checkpoint.json_values import read_json
from rlhf_runtime.observe.progress import shown_metrics
from rlhf_runtime.output.metrics import Series, read_series

CARD = "README.md"
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 24
"""Points of a curve; each is the mean of its steps."""
_REFERENCE = re.compile(r"(file|model|plugin):(.+)")
_ABSOLUTE = re.compile(r"(~[/\\]|[/\\][^/\\\s]+[/\\]|[A-Za-z]:[/\\]).*")
_LEFT_OUT = ("run.output", "run.resume", "run.overwrite")
"""Options about the machine's folders."""


def write_card(folder: Path, run: Path, role: str = "policy", steps: Sequence[int] | None = None) -> None:
    """Write the card of the model of ``role`` into ``folder``.

    Args:
        run: the run's folder.
        steps: the step whose weights the model has. With several steps, the model is the mean of their weights.
            Default: the last step.
    """
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    manifest: Any = read_json(run / "manifest.json")
    series = read_series(run / "metrics.jsonl", steps[-1] if steps else None)
    steps = steps or [max((s.steps[-1] for s in series.values() if s.steps), default=0)]
    text = "\n".join(_card(config, manifest["starts"], series, steps, role))
    (folder / CARD).write_text(f"{text}\n", encoding="utf-8")


def _card(
    config: Mapping[str, Any],
    starts: Sequence[Mapping[str, Any]],
    series: Mapping[str, Series],
    steps: Sequence[int],
    role: str,
) -> Iterator[str]:
    start, algorithm = starts[-1], config["algorithm"]["use"]
    model = config.get("policy", {}).get("model", "a model")
    base = hub_name(model)
    yield "---\nlibrary_name: transformers"
    if base is not None:
        yield f"base_model: {base.name}"
    yield f"tags:\n- rlhf\n- {algorithm}\n---\n"
    trained = f"`{public(model)}` trained with `{algorithm}`"
    yield f"# {Path(str(public(model))).name}, {algorithm}\n"
    after = f"after step {steps[-1]}" if len(steps) == 1 else f"with the mean of its weights after steps {_list(steps)}"
    subject = "the model" if role == "policy" else f"the role `{role}`"
    yield f"{trained}: {subject} {after}. Written by rlhf {__version__}.\n"
    hashes = start.get("content", {})
    yield "## Data\n\n| | source | rows | SHA-256 |\n|---|---|---|---|"
    for kind, sources in start.get("data", {}).items():
        for name, source in sources.items():
            yield f"| {kind} | {_cell(public(name))} | {source['rows']:,} | `{str(source['fingerprint'])[:16]}` |"
    yield "\n## Result\n"
    yield from _results(series)
    yield "\n## Options that differ from the defaults\n\n```text"
    # Of the first start, because a resume may read config.toml, which sets every option.
    for path in starts[0].get("options", []):
        if path not in _LEFT_OUT and (value := _option_value(config, path)) is not None:
            yield f"{path} = {json.dumps(public(value), ensure_ascii=False)}"
    yield "```\n\n## Versions\n\n| | |\n|---|---|"
    environment = start.get("environment", {})
    versions = {"python": environment.get("python"), **environment.get("packages", {})}
    for plugin in start.get("plugins", []):
        facts = [plugin.get("distribution"), plugin.get("version"), str(plugin.get("sha256", ""))[:16]]
        versions[f"{plugin['kind']} {plugin['name']}"] = " ".join(str(fact) for fact in facts if fact)
    versions |= {f"hash of {name}": f"`{str(value)[:16]}`" for name, value in hashes.items()}
    versions |= {f"commit of {name}": f"`{commit}`" for name, commit in start.get("hub", {}).items()}
    versions["code of rlhf"] = environment.get("code", {}).get("rlhf")
    for name, value in versions.items():
        if value:
            yield f"| {_cell(public(name))} | {_cell(value)} |"
    yield f"\nSeed {start.get('seed')}."


def _results(series: Mapping[str, Series]) -> Iterator[str]:
    """A table of the headline metrics, with their curves."""
    available = [name for name, metric in series.items() if metric.values]
    names = [*shown_metrics(available), *sorted(name for name in available if name.startswith("eval/"))]
    if not names:
        yield "No step was recorded."
        return
    yield "| metric | first | last | curve |\n|---|---|---|---|"
    for name in dict.fromkeys(names):
        values = series[name].values
        yield f"| {name} | {values[0]:.4g} | {values[-1]:.4g} | {curve(values)} |"


def curve(values: Sequence[float]) -> str:
    """A curve of one line of text."""
    values = [value for value in values if math.isfinite(value)]
    count = min(_POINTS, len(values))
    parts = [values[n * len(values) // count : (n + 1) * len(values) // count] for n in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if not high - low > 0:
        return _BARS[0] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def public(value: Any) -> Any:
    """A copy without secrets, addresses and folders. Only the last part of a path is kept."""
    if isinstance(value, Mapping):
        return {name: public(item) for name, item in redact(value).items()}
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    if not isinstance(value, str):
        return value
    value = redact(value)
    if "://" in value:
        return "<address>"
    if (match := _REFERENCE.fullmatch(value)) is not None:
        return f"{match[1]}:{public(match[2])}"
    # Text such as an instruction may contain a slash, so only an absolute path may contain spaces.
    is_path = ("/" in value or "\\" in value) and not re.search(r"\s", value)
    is_path = is_path or _ABSOLUTE.fullmatch(value) is not None
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if is_path and hub_name(value) is None else value


def _option_value(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return None
    return value


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _list(steps: Sequence[int]) -> str:
    return f"{', '.join(map(str, steps[:-1]))} and {steps[-1]}"
