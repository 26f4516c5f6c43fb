"""Rows of TRL's trainers."""

from __future__ import annotations

import re

from rlhf_cli.migrate.draft import Draft


def rows_of_data(draft: Draft) -> None:
    s = draft.source
    if s["chat_template"]:
        draft.unread["chat_template"] = 'see "To do" at the top'
        draft.remarks.append("save the text of chat_template as a file, and set data.chat_template to it")
    if s["dataset_mixture"]:
        _mixture(draft)
        return
    if not s["dataset_name"]:
        options = "data.train and data.eval" if s["eval_strategy"] != "no" else "data.train"
        draft.remarks.append(f"name the data: {options}, and the columns if they are not recognised")
        return
    subset = {"subset": s["dataset_config"]} if s["dataset_config"] else {}
    for use, option in {"train": "dataset_train_split", "eval": "dataset_test_split"}.items():
        if use == "train" or s["eval_strategy"] != "no":
            name, bracket, part = str(s[option]).partition("[")
            if bracket and not re.fullmatch(r":\d+\]", part):
                raise s.refused(option, "only the first N rows of a split are supported (train[:N]); name the split")
            split = {} if name == "train" else {"split": name}
            limit = {"max_rows": int(part[1:-1])} if bracket else {}
            names = ["dataset_name", option, *(["dataset_config"] if subset else [])]
            draft.set(f"data.{use}", [{"path": s["dataset_name"], **split, **subset, **limit}], *names)


def _mixture(draft: Draft) -> None:
    """The datasets of Open-R1's ``dataset_mixture``."""
    s, name = draft.source, "dataset_mixture"
    datasets = s[name].get("datasets")
    if not isinstance(datasets, list) or not all(
        isinstance(d, dict) and isinstance(d.get("id"), str) for d in datasets
    ):
        raise s.refused(name, "it needs a list of datasets, each with an id")
    options = {"path": "id", "subset": "config", "split": "split"}
    sources = [{option: d[field] for option, field in options.items() if d.get(field)} for d in datasets]
    ids = [source["path"] for source in sources]
    for number, (source, dataset) in enumerate(zip(sources, datasets, strict=True)):
        if ids.count(source["path"]) > 1:
            source["name"] = f"{source['path'].rpartition('/')[2]}_{number}"
        if dataset.get("weight") not in (None, 1):
            draft.remarks.append(
                f"dataset_mixture takes a share of {dataset['weight']} of the rows of {source['path']}; here all rows "
                f"are read: set max_rows of data.train.{number} to that many rows"
            )
    if s[name].get("test_split_size") or s["eval_strategy"] != "no":
        draft.remarks.append("name held-out rows as data.eval; no rows are split off")
    draft.set("data.train", sources, name)
