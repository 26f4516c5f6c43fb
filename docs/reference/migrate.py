"""Write ``migrate-*.md``, the tables of ``rlhf migrate``: ``python docs/reference/migrate.py``.

``tests/test_docs.py`` fails where the pages and the tables differ.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_cli.migrate.find import FRAMEWORKS
from rlhf_cli.migrate.rows import OptionRow, table

FOLDER = Path(__file__).parent
FACTS = {
    "openrlhf": "The facts are those of its public versions 0.5 to 0.11.2; older names stand below the name.",
    "trl": "The facts are those of TRL 1.16 with transformers 5.",
    "verl": "The facts are those of verl 0.9.1 with FSDP; the configurations for Megatron are not read.",
}
TITLES = {
    "openrlhf": {
        "all": "All entry points",
        "rl": "train_ppo_ray",
        "supervised": "train_sft, train_rm, train_dpo, train_kto and train_kd",
        "demonstrations": "train_sft, train_kto and train_kd",
        "pairs": "train_rm and train_dpo",
        "reward_model": "train_rm",
        "reference": "train_dpo and train_kto",
        "dpo": "train_dpo",
        "kto": "train_kto",
        "kd": "train_kd",
    },
    "trl": {
        "all": "All trainers (TrainingArguments)",
        "model": "ModelConfig",
        "script": "ScriptArguments",
        "online": "GRPOConfig and RLOOConfig",
        "grpo": "GRPOConfig",
        "rloo": "RLOOConfig",
        "offline": "SFTConfig, DPOConfig, RewardConfig and KTOConfig",
        "sft": "SFTConfig",
        "dpo": "DPOConfig",
        "reference": "DPOConfig and KTOConfig",
        "kto": "KTOConfig",
        "reward": "RewardConfig",
    },
    "verl": {
        "main_ppo": "main_ppo",
    },
}
"""{framework: {group of its table: heading}}."""
HEAD = """# From {name}

<!-- Written by docs/reference/migrate.py from the tables of rlhf migrate: do not edit. -->

The options of {name} and their equivalents in rlhf. [`rlhf migrate`](../how-to/migrate.md) uses these tables. An option
has the same value in rlhf unless the last column says otherwise. A default of {name} that differs from ours is written
to the run file.
{facts}
"""


def pages() -> dict[Path, str]:
    """{path: Markdown}: a page for each framework, with a table for each group of options."""
    return {FOLDER / f"migrate-{key}.md": page(key) for key in FRAMEWORKS}


def page(key: str) -> str:
    parts = [HEAD.format(name=FRAMEWORKS[key].NAME, facts=FACTS[key]).rstrip()]
    for group, rows in table(key).items():
        lines = [f"## {TITLES[key][group]}", "", "| option | default | in rlhf | remarks |", "|---|---|---|---|"]
        parts.append("\n".join([*lines, *map(line, rows)]))
    return "\n\n".join(parts) + "\n"


def line(row: OptionRow) -> str:
    name = f"`{row.name}`" + (f"<br>{', '.join(f'`{old}`' for old in row.old)}" if row.old else "")
    default = "" if row.default is None else code(row.default)
    default += "".join(f"<br>{entry}: {code(value)}" for entry, value in row.defaults.items())
    values = ", ".join(
        f"`{source}`: {code(target) if target != '' else 'not set'}" for source, target in row.values.items()
    )
    earlier = f"default of earlier versions: {row.earlier}" if row.earlier else ""
    meaning = "; ".join(part for part in (row.why, row.rule or row.doc, values, earlier) if part).replace("|", "\\|")
    paths = "<br>".join(f"`{path}`" for path in row.to)
    return f"| {name} | {default.removeprefix('<br>')} | {paths} | {meaning} |"


def code(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value).replace("\n", "\\n")
    return f"`{text}`" if text.strip() else "empty"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
