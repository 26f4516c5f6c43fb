"""Which architectures of transformers are trained and sampled, and how: ``python docs/reference/architectures.py``.

Every type that is a causal language model is made small and random in the proportions of the published model
(:mod:`tests.support.small_config`), loaded as the trained role of a trainer, and compared with transformers alone: the
same weights in a module of their own, its own attention (``eager``), one sequence at a time, no cache. Then ``rlhf
train`` makes a dry run and a step of it with each trainer and sampler. ``--write`` writes ``architectures.md``.

    python docs/reference/architectures.py                        # all types and variants: 40 minutes
    python docs/reference/architectures.py --rows rows.json        # the same; a second start goes on where it stopped
    python docs/reference/architectures.py --only lfm2,mamba2 -v   # some of them, with the tracebacks of their errors
    python docs/reference/one_architecture.py CONFIG.json          # one model, from its config
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from architecture_page import LAYOUTS, heading, line, reason, reasons, verdict_of
from architecture_runs import PARTS, import_all
from one_architecture import CLOSE, bad, measure, prepare, probe
from transformers import __version__

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for tests.support
from tests.support.tiny_architectures import causal_types
from tests.support.tiny_sizes import VARIANTS

PAGE = Path(__file__).parent / "architectures.md"
DESCRIPTIONS = {
    "shared": "sequences of a micro-batch stand in one row, and a prefix that they have in common is computed once.",
    "packed": "the same, but `trainer.shared_prefixes` has no effect.",
    "alone": "sequences of each length go through the model in a call of their own: right, but slower, as the layers "
    "see few tokens at once.",
}
"""A sentence for each ``LoadedModel.layout``."""
TRIED = ("alone", "packed", "long", "shared", "gradient", "recomputed", "context")
RUN = ("torch", "fsdp", "deepspeed", "transformers")
"""The trainers and samplers that every type is run with. vLLM takes half a minute for each."""


def figures_of(row: dict[str, Any]) -> str:
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


def page(rows: list[dict[str, Any]], columns: Sequence[str]) -> str:
    """Markdown: a line for each row, and why what is refused is refused."""
    attempts = [row for row in rows if row["verdict"] != "not built"]
    every = [verdict_of(row, column) for row in attempts for column in columns]
    numbers = {cause: number for number, cause in enumerate(dict.fromkeys(cause for _, cause in every if cause), 1)}
    out = [
        "# Architectures",
        "<!-- Written by docs/reference/architectures.py: do not edit. -->",
        f"The {len(causal_types())} types of causal language models in transformers {__version__}, and some options of "
        "their configs. Each was made small and random and compared with transformers alone: log-probs and gradients "
        "of several sequences, short and beyond the model's window, with and without common prefixes; fp32, on a CPU. "
        f"Differences below {CLOSE:g} count as rounding. Every model is probed in the same way when it is loaded.",
        "Then `rlhf train` made a dry run and one step with each trainer (`sft`, one rank) and with the generator "
        "`transformers` (`grpo`). `yes`: both succeeded, and the first loss and the norm of its gradients are those of "
        "the trainer `torch`. `refused`: the run said in words that it does not take the model; the number is that of "
        "the reason below.",
        "The sizes are in proportion to those of the published model: the defaults of the type's config class "
        "(and values of ours for parts that the defaults lack: `PUBLISHED` in `tests/support/tiny_sizes.py`), one "
        "layer of every kind, widths divided by common factors. " + sentence_of_others(attempts),
        "A model that is not in the list is probed from its `config.json`, in about half a minute, with vLLM too where "
        "it is installed. The command prints the model's line and the reasons of what is refused. It needs a "
        "checkout of this repository and a transformers that has the type:",
        "```sh\npython docs/reference/one_architecture.py CONFIG.json\n```",
        "How a model is computed:",
        "\n".join(f"- {LAYOUTS[layout]}: {words}" for layout, words in DESCRIPTIONS.items()),
        "## Types",
        "\n".join([heading(columns), *(line(row, columns, numbers) for row in attempts)]),
    ]
    if numbers:
        out += ["## Reasons", "\n".join(f"{number}. {cause}" for cause, number in numbers.items())]
    noisy = [f"`{row['name']}`" for row in rows if row.get("noisy")]
    if noisy:
        words = "Their configs draw noise while they are trained: a note says so, and gradients were not compared."
        out += ["## Noise", f"{words} {', '.join(noisy)}."]
    omissions = [row for row in rows if row["verdict"] == "not built"]
    if omissions:
        table = [f"| `{row['name']}` | {reason(row)} |" for row in omissions]
        out += ["## Not tried", "\n".join(["| type | why |", "|---|---|", *table])]
    return "\n\n".join(out) + "\n"


def sentence_of_others(rows: list[dict[str, Any]]) -> str:
    """Which rows have other sizes."""
    names = [f"`{row['name']}`" for row in rows if row.get("proportions") == "set" and row["name"] not in VARIANTS]
    words = f"the variants (the last {sum(row['name'] in VARIANTS for row in rows)} lines)"
    return f"Exceptions with sizes of their own are {', '.join([*names, words])}."


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of types or variants, separated by commas")
    parser.add_argument("--parts", default=",".join(RUN), help=f"trainers and samplers; default {','.join(RUN)}")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one comparison or run")
    parser.add_argument(
        "--rows",
        type=Path,
        help="file of what was measured, as JSON: read, added to after every model, so that a run "
        "goes on where it was stopped",
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("-v", action="store_true", dest="verbose", help="tracebacks of what failed")
    options = parser.parse_args()
    choices = [*causal_types(), *VARIANTS]
    rows = {}
    if options.rows and options.rows.exists():
        rows = {row["name"]: row for row in json.loads(options.rows.read_text())}
    names = [n.strip() for n in options.only.split(",")] if options.only else [n for n in choices if n not in rows]
    parts = [n.strip() for n in options.parts.split(",")]
    for source, unknown, all_ in (
        ("--only", set(names) - set(choices), choices),
        ("--parts", set(parts) - set(PARTS), list(PARTS)),
    ):
        if unknown:
            parser.error(f"{source}: not known: {', '.join(sorted(unknown))}. Known: {', '.join(all_)}")
    if options.write and (absent := [n for n in choices if n not in {*rows, *names}]):
        parser.error(f"--write needs all of them; {len(absent)} are absent, such as {absent[0]}: leave --only out")
    prepare()
    with tempfile.TemporaryDirectory(prefix="rlhf-architectures-") as place:
        if names:
            first = Path(place) / "first"
            measure("llama", first)
            import_all(first, parts)
        for name in names:
            folder = Path(place) / "model"
            row = rows[name] = probe(name, folder, parts, options.limit)
            shutil.rmtree(folder, ignore_errors=True)
            say("\n".join([figures_of(row), line(row, parts), *reasons(row, parts)]))
            if options.rows:
                options.rows.write_text(json.dumps(list(rows.values()), indent=1))
            if options.verbose and "trace" in row:
                say(row["trace"])
    ordered = [rows[name] for name in choices if name in rows]
    say(summary(ordered))
    if options.write:
        PAGE.write_text(page(ordered, parts), encoding="utf-8")
    sys.exit(any(bad(row) for row in ordered))


if __name__ == "__main__":
    main()
