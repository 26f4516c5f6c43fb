"""docs/reference/metrics.md has every metric that the code can write, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from rlhf_endpoint.tree import Reason
from rlhf_runtime.observe.progress import HEADLINE
from rlhf_runtime.observe.trl_names import TRL_NAMES, TRL_NAMES_OF_SCORES
from rlhf_runtime.output.metrics import read_metrics

from tests.pages import DOCS, ROOT, read, tables

PAGE = DOCS / "reference/metrics.md"
WORDS = {
    "ROLE": "(policy|critic)",
    "SOURCE": r"[\w.-]+",
    "DATASET": r"[\w.-]+",
    "TERM": r"\w+",
    "KEY": r"[\w.-]+",
    "TOOL": r"[\w.-]+",
    "AGENT": r"\w+",
    "NAME": r"[\w./-]+",
    "PART": r"\w+",
    "K": r"\d+",
}
"""The pattern for each word in capitals. METRIC is any name after ``ROLE/`` or ``eval/`` on the page."""
LEVELS = {"token", "sequence", "unit"}
FAMILIES = (
    "curriculum|reward|length|advantage|value|kl|sync|stream|eval|pairs|labels|rejection|data|time|env|rollout|"
    "throughput|memory"
)
SOURCES = ("core/src", "runtime/src", "libraries/*/src", "plugins/*/*/src")


@cache
def names() -> tuple[str, ...]:
    return tuple(row["metric"].strip("`") for t in tables(PAGE) if "metric" in t.header for row in t.rows)


def pattern(name: str) -> str:
    parts = {n.partition("/")[2] for n in names() if n.startswith(("ROLE/", "eval/")) and "METRIC" not in n}
    words = {**WORDS, "METRIC": "|".join(f"({pattern(part)})" for part in parts)} if "METRIC" in name else WORDS
    return "".join(
        f"({words[piece]})" if piece in words else re.escape(piece) for piece in re.split(r"\b([A-Z]+)\b", name)
    )


def on_the_page(key: str) -> bool:
    return any(re.fullmatch(pattern(name), key) for name in names())


@cache
def trees() -> dict[Path, ast.Module]:
    paths = (path for source in SOURCES for folder in ROOT.glob(source) for path in folder.rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def constants(tree: ast.AST) -> Iterator[str]:
    yield from (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def reported_by_losses(tree: ast.AST) -> Iterator[str]:
    """Keys of ``{"name": ("token", values)}`` and of ``metrics["name"] = ("token", values)``."""
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            pairs = [(node.targets[0].slice, node.value)]
        for key, value in pairs:
            match key, value:
                case ast.Constant(value=str(name)), ast.Tuple(elts=[ast.Constant(value=level), what, *_]):
                    if level in LEVELS and not isinstance(what, ast.Constant):
                        yield name


def test_every_metric_is_listed_once_with_what_to_do():
    assert len(names()) == len(set(names())) > 100
    for table in tables(PAGE):
        if "metric" in table.header:
            assert [row for row in table.rows if not all(row.values())] == []


def test_metrics_of_losses_are_on_the_page():
    metrics = {(name, path.name) for path, tree in trees().items() for name in reported_by_losses(tree)}
    assert len(metrics) > 30
    assert sorted((name, file) for name, file in metrics if not on_the_page(f"policy/{name}")) == []


def test_every_literal_metric_name_of_the_code_is_on_the_page():
    keys = {key for tree in trees().values() for key in constants(tree) if re.fullmatch(rf"({FAMILIES})/[\w@]+", key)}
    assert len(keys) > 40
    unnamed = sorted(key for key in keys if not on_the_page(key))
    assert unnamed == []


def test_every_metric_of_the_page_exists_in_the_code():
    """Each part of a name, except words in capitals, must occur in a string of the code."""
    texts = {text for tree in trees().values() for text in constants(tree)}
    words = {word for text in texts if len(text) < 60 for word in re.findall(r"\w+", text)}
    words |= {
        node.arg for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg
    }
    pieces = {(name, piece) for name in names() for piece in re.findall(r"\b[a-z_]+\b", name)}
    assert sorted(name for name, piece in pieces if piece not in words) == []


def test_every_reason_for_a_sequence_of_an_agent_is_on_the_page():
    reasons = {name.removeprefix("rollout/sequences/") for name in names() if name.startswith("rollout/sequences/")}
    assert reasons == set(get_args(Reason))


def test_metrics_of_the_console_are_on_the_page():
    section = read(PAGE).partition("The console shows")[2].partition("\n\n")[0]
    for label, metrics in HEADLINE.items():
        assert f"`{label}` (`{metrics[0]}`" in " ".join(section.split())
        assert [name for name in metrics if name != "loss" and not on_the_page(name)] == []


EVALUATED = {"at_start": True, "samples": 2, "temperature": 1.0}
RUNS = {
    "ppo": {"algorithm": {"kl": {"coef": 0.1}, "normalise_values": True}, "eval": EVALUATED},
    "grpo": {
        "algorithm": {
            "kl": {"coef": 0.1, "where": "loss"},
            "loss": {"entropy_coef": 0.01, "correction": {"preset": "tis"}},
        },
        "stream": {"filter": {"min_std": 0.0, "max_rounds": 1}},
        "curriculum": {"use": "pass_rate"},
    },
    "sft": {"eval": {"at_start": True}},
    "dpo": {"eval": {"at_start": True}},
}
"""Runs whose metrics have names that the code makes of parts, or without a family."""


@pytest.mark.parametrize("algorithm", RUNS)
def test_every_metric_of_a_run_is_on_the_page(shop, algorithm):
    changes = dict(RUNS[algorithm])
    if "eval" in changes:
        rows = shop.config(algorithm, "run")["data"]["train"]
        changes["data"] = {"eval": [{"path": rows, "name": name, "max_rows": 2} for name in ("one", "other")]}
    run = shop.train(algorithm, "run", run={"steps": 2}, **changes)
    keys = {key for line in read_metrics(run.path / "metrics.jsonl") for key in line}
    assert {"step", "epoch", "time/step", "policy/loss"} <= keys
    assert sorted(key for key in keys if not on_the_page(key)) == []


def test_a_metric_that_is_not_on_the_page_is_detected():
    assert not on_the_page("policy/unheard_of")
    assert not on_the_page("stream/other")
    assert on_the_page("reward/math/info/steps")


def test_the_tables_of_trls_names_are_those_of_the_code():
    first, second = [
        {row["here"].strip("`"): row["TRL"].strip("`") for row in t.rows} for t in tables(PAGE) if "TRL" in t.header
    ]
    assert (first, second) == (TRL_NAMES, TRL_NAMES_OF_SCORES)
    assert [n for n in (*first, *second) if n not in names() and not on_the_page(n)] == []
