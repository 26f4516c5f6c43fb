"""Open the sources of the run file: files, folders and names on the hub."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import DataError, did_you_mean
from rlhf_hub.hub import Commits, hub_name

from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.files import file_kind, open_file
from rlhf_runtime.data.hub_files import open_hub
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.tables import DatasetSource, load_saved


def load_source(section: SourceSection, commits: Commits | None = None) -> Source:
    """Open a source: a file, a folder saved by ``datasets``, or a hub name if no such path exists.

    Args:
        commits: the run's commits, for hub names; None: names are looked up now.

    Raises DataError: the source is missing (the message lists existing files), empty or malformed (with file and line),
    or has no such split or subset.
    """
    path = Path(section.path).expanduser()
    source: Source
    if path.is_dir():
        source = _saved(section, path)
    elif path.exists():
        kind = file_kind(path)
        if kind is None:
            raise DataError(
                f"{path}: unknown kind of file; allowed are .jsonl, .json and .csv (each also with .gz), .parquet and "
                ".arrow"
            )
        if section.subset is not None or section.split != "train":
            asked = f"subset = {section.subset!r}" if section.subset is not None else f"split = {section.split!r}"
            raise DataError(f"{path}: {asked}, but a file has neither subsets nor splits; name the file that holds it")
        source = open_file(section, path, kind)
    elif (named := hub_name(section.path)) is not None and file_kind(path) is None:
        source = open_hub(section, named, commits or Commits())
    else:
        raise DataError(_missing(path))
    if not len(source):
        raise DataError(f"{section.path} holds no rows; a source needs at least one")
    return source


def _saved(section: SourceSection, path: Path) -> Source:
    if not ((path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists()):
        files = sorted(p.name for p in path.iterdir() if p.is_file() and file_kind(p) is not None)
        there = f" Name one of its files: {', '.join(files[:20])}." if files else " It holds no data file either."
        raise DataError(f"{path} is a folder, but not one that `datasets` saved (save_to_disk).{there}")
    return DatasetSource(section, load_saved(path, section))


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"no data file {path}: the folder {folder} does not exist"
    beside = sorted(p.name for p in folder.iterdir() if file_kind(p) is not None)
    there = f"are: {', '.join(beside[:20])}.{did_you_mean(path.name, beside)}" if beside else "are no data files."
    return f"no data file {path}. In {folder} there {there}"
