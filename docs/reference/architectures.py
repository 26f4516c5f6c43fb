"""Which architectures of transformers are trained rightly, and how: ``python docs/reference/architectures.py``.

Every type that is a causal language model is made tiny and random (:mod:`rlhf_testing.tiny_architectures`), loaded as
the trained role of a trainer, and compared with transformers alone: the same weights in a module of their own, its own
attention (``eager``), one sequence at a time, no cache. ``--write`` writes ``architectures.md``.

    python docs/reference/architectures.py                        # all types and variants: some minutes
    python docs/reference/architectures.py --only lfm2,mamba2 -v   # some of them, with the tracebacks of their errors
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from one_architecture import CLOSE, measure
from rlhf_testing.tiny_architectures import causal_types
from rlhf_testing.tiny_sizes import VARIANTS
from transformers import __version__
from transformers.utils import logging

PAGE = Path(__file__).parent / "architectures.md"
HOW = {
    "shared": (
        "Packed",
        "Sequences of a micro-batch stand in one row, and a prefix that they have in common is computed once.",
    ),
    "packed": ("Packed, without shared prefixes", "`trainer.shared_prefixes` has no effect."),
    "alone": (
        "One length at a time",
        "Sequences of each length go through the model in a call of their own: right, but slower, as the layers see "
        "few tokens at once.",
    ),
}
"""A heading and a sentence for each ``LoadedModel.layout``."""
TRIED = ("alone", "packed", "long", "shared", "gradient", "recomputed", "context")


def run(name: str, limit: float) -> dict[str, Any]:
    """:func:`measure` in a process of its own, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp(prefix="rlhf-architectures-"))
    process = context.Process(target=_child, args=(name, folder))
    process.start()
    process.join(limit)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    try:
        return json.loads((folder / "row.json").read_text())
    except OSError:
        how = f"took more than {limit:g} seconds" if late else f"its process ended with {process.exitcode}"
        return {"name": name, "verdict": "raw", "failed": how}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _child(name: str, folder: Path) -> None:
    row = measure(name, folder / "model")
    (folder / "row.part").write_text(json.dumps(row))
    (folder / "row.part").rename(folder / "row.json")


def line(row: dict[str, Any]) -> str:
    figures = [f"{k} {row[k]:.1e}" for k in TRIED if k in row]
    words = [f"{row['name']:36} {row['verdict']:9} {row.get('layout', '-'):7}", *figures, row.get("failed", "")]
    return "  ".join(words).rstrip()


def summary(rows: list[dict[str, Any]]) -> str:
    out = []
    for verdict in ("right", "WRONG", "refused", "raw", "not built"):
        names = [row["name"] for row in rows if row["verdict"] == verdict]
        out.append(f"{verdict} ({len(names)}): {'; '.join(names)}")
    blind = [row["name"] for row in rows if row.get("context", 1.0) < 10 * CLOSE]
    return "\n".join([*out, f"log-probs hardly depend on the context ({len(blind)}): {'; '.join(blind)}"])


def page(rows: list[dict[str, Any]]) -> str:
    """Markdown: what is trained how, and what is refused for which reason."""
    out = [
        "# Architectures",
        "<!-- Written by docs/reference/architectures.py: do not edit. -->",
        f"The {len(causal_types())} types of causal language models in transformers {__version__}, and some options of "
        "their configs. Each was made tiny and random and compared with transformers alone: log-probs and gradients of "
        "several sequences, short and beyond the model's window, with and without common prefixes; fp32, on a CPU. "
        f"Differences below {CLOSE:g} count as rounding. Every model is probed in the same way when it is loaded.",
    ]
    for layout, (heading, words) in HOW.items():
        names = [row["name"] for row in rows if row["verdict"] == "right" and row["layout"] == layout]
        if names:
            out += [f"## {heading}", f"{words} {len(names)} types:", ", ".join(f"`{n}`" for n in names) + "."]
    noisy = [f"`{row['name']}`" for row in rows if row.get("noisy")]
    if noisy:
        words = "Their configs draw noise while they are trained: a note says so, and gradients were not compared."
        out += ["## Noise", f"{words} {', '.join(noisy)}."]
    for verdict, heading, what in (
        ("refused", "Refused", "Why"),
        ("not built", "Not tried", "Why"),
        ("WRONG", "Wrong", "Largest difference"),
        ("raw", "Errors", "Error"),
    ):
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row["verdict"] == verdict:
                why = reason(row) if "failed" in row else "of log-probs or gradients: above the limit"
                reasons.setdefault(why, []).append(f"`{row['name']}`")
        if reasons:
            table = [f"| {', '.join(names)} | {why} |" for why, names in reasons.items()]
            out += [f"## {heading}", "\n".join([f"| type | {what.lower()} |", "|---|---|", *table])]
    return "\n\n".join(out) + "\n"


def reason(row: dict[str, Any]) -> str:
    """The error of a row without its class, the model's class and its folder, so that equal reasons are equal."""
    words = re.sub(r"^\w+: ", "", row["failed"])
    words = re.sub(r"'?/\S*/model'?", "PATH", words)
    return re.sub(r"\b[A-Z]\w*(?:For\w+|LMHead\w*)\b( \(PATH[^)]*\))?", "the model", words).replace("|", "\\|")


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of types or variants, separated by commas")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one of them")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("-v", action="store_true", dest="verbose", help="tracebacks of what failed")
    options = parser.parse_args()
    known = [*causal_types(), *VARIANTS]
    names = [n.strip() for n in options.only.split(",")] if options.only else known
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"not known: {', '.join(unknown)}. Known: {', '.join(known)}")
    if options.only and options.write:
        parser.error("--write needs all of them: leave --only out")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where it is installed, warns that it guesses
    with tempfile.TemporaryDirectory() as folder:  # what is imported on the way is then imported for all
        measure("llama", Path(folder))
    rows = []
    for name in names:
        rows.append(run(name, options.limit))
        say(line(rows[-1]))
        if options.verbose and "trace" in rows[-1]:
            say(rows[-1]["trace"])
    say(summary(rows))
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    sys.exit(any(row["verdict"] in ("WRONG", "raw") for row in rows))


if __name__ == "__main__":
    main()
