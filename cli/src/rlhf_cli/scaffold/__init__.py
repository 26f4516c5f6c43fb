"""``rlhf plugins new``: writes a distribution with one plugin and its tests, which works without changes.

The files under ``templates/`` are copied, and ``@NAME@``, ``@CLASS@`` and similar placeholders are replaced by names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rlhf import __version__
from rlhf.errors import ConfigError, did_you_mean
from rlhf.plugins.references import check_kind

NAME = re.compile(r"[a-z][a-z0-9_]*")
THIRD_PARTIES = {
    "advantage": ["torch"],
    "loss": ["torch"],
    "algorithm": ["torch"],
    "generator": ["torch"],
    "trainer": ["torch", "transformers", "safetensors"],
}
"""Requirements of the written source besides distributions of ``rlhf``."""
LIKE = {
    "supervised": ("algorithm", "loss"),
    "policy_gradient": ("algorithm", "advantage", "loss"),
    "pairs": ("algorithm", "loss"),
}
"""{template of an algorithm for ``--like``: kinds of the classes that are written}; the first is the default."""
SELECT = {
    "algorithm": '`--algo @NAME@`, or in the run file `[algorithm] use = "@NAME@"`',
    "reward": '`--reward @NAME@`, or in the run file `[[reward]] use = "@NAME@"`',
    "advantage": '`[algorithm.advantage] use = "@NAME@"` in the run file',
    "loss": '`[algorithm.loss] use = "@NAME@"` in the run file',
    "observer": '`[[observer]] use = "@NAME@"` in the run file',
    "backend": "`--backend @NAME@`",
    "command": "`rlhf @NAME@`",
    "check": "nothing: `rlhf doctor` runs every check that is installed",
    "adapter": "nothing: it is asked about every `file:` reference whose file defines no component by itself",
}
TEXTS = {
    "command": "Greet somebody.\n\n`rlhf --help` shows the line above and imports nothing; calling the command does.\n"
}
"""Docstrings of the package for kinds that do not use the default docstring."""
ABOUT_PLUGIN = "@KIND_TITLE@ for rlhf: @NAME@. Listing plugins does not import this; selecting it calls the hook, once."
SELECT_SECTION = '`[@KIND@] use = "@NAME@"` in the run file'


def write_plugin(name: str, kind: str, output: Path, like: str | None = None) -> Path:
    """Write the distribution ``rlhf-plugin-NAME`` into the folder ``output``; returns its folder.

    Args:
        like: template of an algorithm, a key of ``LIKE``; None: the first.

    Raises ConfigError: unknown kind, invalid name, ``like`` for another kind or without a template, or a folder that
    already exists or cannot be created.
    """
    check_kind(kind)
    check_like(kind, like)
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid name of a plugin: expected a letter, then lower case letters, digits and '_'"
        )
    distribution = f"rlhf-plugin-{name.replace('_', '-')}"
    folder = output / distribution
    if folder.exists():
        raise ConfigError(f"{folder} exists already; remove it, or choose another name or --output")
    package = f"rlhf_plugin_{name}"
    like = like or next(iter(LIKE))
    kinds = LIKE[like] if kind == "algorithm" else (kind,)
    source = f"{kind}_{like}" if kind == "algorithm" else kind
    code = _template(f"{source}.py")
    libraries = ["rlhf-core", *(n for n in ("rlhf-algorithms", "rlhf-modeling") if n.replace("-", "_") in code)]
    names = _names(name, kind, kinds, distribution, package, libraries)
    files = {
        "pyproject.toml": _template("pyproject.toml"),
        "README.md": _template("README.md"),
        f"src/{package}/__init__.py": _template("init.py"),
        f"src/{package}/{kind}.py": code,
        f"tests/test_{name}.py": _template(f"test_{source}.py"),
    }
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(_fill(text, names), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}. Choose a folder with --output") from error
    return folder


def check_like(kind: str, like: str | None) -> None:
    """Raises ConfigError if ``like`` is set for another kind than ``algorithm``, or has no template."""
    allowed = ", ".join(LIKE)
    if like is not None and kind != "algorithm":
        raise ConfigError(
            f"--like {like} was given with --kind {kind}, but only --kind algorithm has several templates ({allowed}). "
            f"Omit --like, or set --kind algorithm"
        )
    if like is not None and like not in LIKE:
        raise ConfigError(f"--like {like}: there is no such template.{did_you_mean(like, LIKE)} Allowed: {allowed}")


def _names(
    name: str, kind: str, kinds: Sequence[str], distribution: str, package: str, libraries: Sequence[str]
) -> dict[str, str]:
    camel = "".join(part.capitalize() for part in name.split("_"))
    classes = {k: _class(camel, k) for k in kinds}
    major, minor = (int(part) for part in __version__.split(".")[:2])
    requirements = [f"{library}>={major}.{minor},<{major}.{minor + 1}" for library in libraries]
    return {
        "NAME": name,
        "KIND": kind,
        "KIND_TITLE": kind.capitalize(),
        "ABOUT": _fill(TEXTS.get(kind, ABOUT_PLUGIN), {"NAME": name, "KIND_TITLE": kind.capitalize()}),
        "DIST": distribution,
        "PACKAGE": package,
        "CLASS": classes[kind],
        "LOSS_CLASS": classes.get("loss", ""),
        "ADVANTAGE_CLASS": classes.get("advantage", ""),
        "DEPENDENCIES": ", ".join(f'"{r}"' for r in [*requirements, *THIRD_PARTIES.get(kind, [])]),
        "ENTRY_POINTS": "".join(f'[project.entry-points."rlhf.{k}"]\n{name} = "{package}"\n\n' for k in classes),
        "HOOKS": "\n\n".join(_hook(k, cls, package, kind) for k, cls in classes.items()),
        "SELECT": _fill(SELECT.get(kind, SELECT_SECTION), {"NAME": name, "KIND": kind}),
    }


def _class(camel: str, kind: str) -> str:
    """Class name: ``Brevity`` as a reward becomes ``BrevityReward``; ``MyReward`` stays. ``Reward`` alone is the
    interface's name."""
    return camel if camel.endswith(kind.capitalize()) and camel != kind.capitalize() else camel + kind.capitalize()


def _hook(kind: str, cls: str, package: str, module: str) -> str:
    return f"\n@hookimpl\ndef rlhf_register_{kind}():\n    from {package}.{module} import {cls}\n\n    return [{cls}]"


def _template(name: str) -> str:
    return (resources.files(__name__) / "templates" / f"{name}.template").read_text(encoding="utf-8")


def _fill(text: str, names: dict[str, str]) -> str:
    return re.sub(r"@([A-Z_]+)@", lambda match: names[match[1]], text)
