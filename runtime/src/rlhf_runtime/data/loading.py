"""Open the sources of the run file: files, folders and names on the hub.

On a hub, the repository's card or its file names define subsets and splits. The library `datasets` interprets them, in
a folder with the same file names and no data. The files are then read like local files, so a csv cell is text and a
JSON value is not converted. In jsonl, json and csv files, plain or gzipped, the line of every row is known.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import glob
import gzip
import hashlib
import io
import itertools
import json
import re
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import DataError, did_you_mean
from rlhf_hub.hub import Commits, HubError, HubName, download, files_of, hub_name

from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.columnar_sources import TableSource, read_table, saved_source
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.strict_json import STRICT, NotStrictError, decode_long, start_of_wrong

_LIST = re.compile(rb"[\xef\xbb\xbf \t\r\n]*\[")
_LONG_INTEGER = f"an integer of more than {sys.int_info.default_max_str_digits} digits is not read. Write it as text"


@dataclass(frozen=True, slots=True)
class CsvForm:
    """How a csv file is written."""

    separator: str = ","
    """One character."""
    names: tuple[str, ...] = ()
    """Column names; if empty, the first line names them."""
    header: bool = True
    """Whether the first line is a header, not a row."""


DEFAULT_FORM = CsvForm()


def open_file(section: SourceSection, path: Path, kind: str, form: CsvForm = DEFAULT_FORM) -> Source:
    """The rows of one file. A text file is read and checked once, so that a malformed row is detected before the run
    starts.

    ``form`` is for csv only.
    """
    if kind in ("parquet", "arrow"):
        return TableSource(section, read_table(path, kind))
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    fingerprint = hashlib.sha256(content).hexdigest()
    path = Path(section.path)  # for messages, which show the name on the hub, not the name in the cache
    if kind == "csv":
        return CsvSource(section, path, _text(path, content), fingerprint, form)
    if kind == "json" and _LIST.match(content):
        return JsonSource(section, path, _text(path, content), fingerprint)
    return JsonLinesSource(section, path, content, fingerprint)


class JsonLinesSource(Source):
    """One JSON object per line. Keeps the file's bytes and the starts of lines; a row is parsed when it is read."""

    def __init__(self, section: SourceSection, path: Path, content: bytes, fingerprint: str) -> None:
        self._content = content
        self._path = path
        self._starts, self._ends, self._lines = array("q"), array("q"), array("q")
        columns: dict[str, None] = {}
        start = 3 if content.startswith(b"\xef\xbb\xbf") else 0  # a byte-order mark
        number = 0
        while start < len(content):
            number += 1
            end = content.find(b"\n", start)
            end = len(content) if end < 0 else end
            line = content[start:end]
            if line.strip():
                columns.update(dict.fromkeys(_object(path, number, line)))
                self._starts.append(start)
                self._ends.append(end)
                self._lines.append(number)
            start = end + 1
        super().__init__(section, list(columns), fingerprint)

    def rows(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self._content[self._starts[index] : self._ends[index]])
        return row

    def location(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index]}"


class JsonSource(Source):
    """One JSON list of objects."""

    def __init__(self, section: SourceSection, path: Path, text: str, fingerprint: str) -> None:
        try:
            self._rows: list[dict[str, Any]] = decode_long(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
        except RecursionError:
            raise DataError(f"{path}: nested too deeply to be read") from None
        except NotStrictError as error:
            line = text.count("\n", 0, start_of_wrong(text)) + 1
            raise DataError(f"{path}, row from line {line} on: {error}") from None
        except ValueError:  # an integer of more digits than Python reads
            raise DataError(f"{path}: {_LONG_INTEGER}") from None
        self._rows = [{str(n): v for n, v in enumerate(r)} if isinstance(r, list) else r for r in self._rows]
        for i, row in enumerate(self._rows):
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {i}: a row must be a JSON object, got {_short(row)}")
        super().__init__(section, list(dict.fromkeys(itertools.chain.from_iterable(self._rows))), fingerprint)

    def rows(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])


class CsvSource(Source):
    """Comma-separated values with a header line, or in the form of :class:`CsvForm`. Every cell is text. Numbers and
    missing values are not recognised."""

    def __init__(
        self, section: SourceSection, path: Path, text: str, fingerprint: str, form: CsvForm = DEFAULT_FORM
    ) -> None:
        # The default refuses cells of more than 131,072 characters.
        csv.field_size_limit(sys.maxsize)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=form.separator, strict=True)
        self._path, self._rows, self._lines = path, list[list[str]](), array("q")
        header, heads = list(form.names), form.header
        subject = "the dataset's card names" if header else "the header has"
        line = 1
        try:
            for cells in reader:
                header = header or cells
                if cells and len(cells) != len(header):
                    raise DataError(
                        f"{path}, line {line}: {len(cells)} cells, but {subject} {len(header)}: {', '.join(header)}"
                    )
                if cells and not heads:
                    self._rows.append(cells)
                    self._lines.append(line)
                heads = heads and not cells
                # A row may have several lines. Messages name its first one.
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{path}, line {line}: not valid csv: {error}") from None
        duplicates = sorted({c for c in header if header.count(c) > 1})
        if duplicates:
            location = "the dataset's card" if form.names else "the header"
            raise DataError(f"{path}: {location} names {', '.join(map(repr, duplicates))} twice")
        super().__init__(section, header, fingerprint if form == DEFAULT_FORM else f"{fingerprint} {form}")

    def rows(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        return dict(zip(self.columns, self._rows[index], strict=True))

    def location(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index]}"


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = STRICT.decode(line.decode())  # twice as fast for short rows as json.loads, which detects the encoding
    except RecursionError:
        raise DataError(f"{path}, line {number}: nested too deeply to be read") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 text: {error.reason}") from None
    except json.JSONDecodeError as error:
        advice = ". Each row must be one line that ends with a line feed" if error.msg == "Extra data" else ""
        raise DataError(f"{path}, line {number}, column {error.colno}: not valid JSON: {error.msg}{advice}") from None
    except NotStrictError as error:
        raise DataError(f"{path}, line {number}: {error}") from None
    except ValueError:  # an integer of more digits than Python reads
        raise DataError(f"{path}, line {number}: {_LONG_INTEGER}") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: a row must be a JSON object, got {_short(row)}")
    return row


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text: {error.reason}") from None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


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
            option = f"subset = {section.subset!r}" if section.subset is not None else f"split = {section.split!r}"
            raise DataError(f"{path}: {option}, but a file has neither subsets nor splits; name the file that holds it")
        source = open_file(section, path, kind)
    elif (dataset := hub_name(section.path)) is not None and file_kind(path) is None:
        source = open_hub(section, dataset, commits or Commits())
    else:
        raise DataError(_missing(path))
    if not len(source):
        raise DataError(f"{section.path} holds no rows; a source needs at least one")
    return source


def _saved(section: SourceSection, path: Path) -> Source:
    if not ((path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists()):
        files = sorted(p.name for p in path.iterdir() if p.is_file() and file_kind(p) is not None)
        advice = f" Name one of its files: {', '.join(files[:20])}." if files else " It holds no data file either."
        raise DataError(f"{path} is a folder, but not one that `datasets` saved (save_to_disk).{advice}")
    return saved_source(path, section)


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"no data file {path}: the folder {folder} does not exist"
    siblings = sorted(p.name for p in folder.iterdir() if file_kind(p) is not None)
    listing = (
        f"has the data files {', '.join(siblings[:20])}.{did_you_mean(path.name, siblings)}"
        if siblings
        else "has no data files."
    )
    return f"no data file {path}. The folder {folder} {listing}"


FILE_KINDS = ("jsonl", "json", "csv", "parquet", "arrow")


def file_kind(path: Path) -> str | None:
    """The kind of data file by its name, or None."""
    suffixes = [s.lower() for s in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = (suffixes[:-1] if packed else suffixes)[-1:]
    name = kind[0].removeprefix(".") if kind else ""
    if name == "ndjson":
        name = "jsonl"
    return name if name in FILE_KINDS and not (packed and name in ("parquet", "arrow")) else None


CARDS = ("README.md", ".huggingface.yaml")
_OF_FILES = {"name", "version", "data_dir", "data_files", "description", "features"}
"""Fields of a builder's config that are ignored: they do not change how a file is read here."""
_OF_CSV = {"sep", "delimiter", "header", "names", "column_names"}
"""Fields that :func:`_csv_form` reads. ``delimiter`` is another name for ``sep``, and ``column_names`` for
``names``."""


class JoinedSource(Source):
    """The files of one split, one after another."""

    def __init__(self, section: SourceSection, parts: list[Source]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))
        digest = hashlib.sha256(" ".join(part.fingerprint for part in parts).encode()).hexdigest()
        super().__init__(section, list(dict.fromkeys(c for part in parts for c in part.columns)), digest)

    def rows(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> dict[str, Any]:
        part, row = self._place(index)
        return part.read(row)

    def location(self, index: int) -> str:
        part, row = self._place(index)
        return part.location(row)

    def values(self, column: str) -> Iterator[Any]:
        return itertools.islice(itertools.chain.from_iterable(part.values(column) for part in self._parts), len(self))

    def _place(self, index: int) -> tuple[Source, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def open_hub(section: SourceSection, dataset: HubName, commits: Commits) -> Source:
    """The rows of a subset and split, at the commit that the run uses.

    Raises DataError: the name exists neither locally nor on the hub, there is no such subset or split, or the files
    have a
    format that cannot be read.
    """
    try:
        commit = commits.commit("dataset", dataset)
        files = files_of("dataset", dataset, commit)
        names, form = _files(section, dataset, commit, files)
        folder = download("dataset", dataset, commit, [glob.escape(name) for name in names])
    except HubError as error:
        raise DataError(
            f"no local file or folder {section.path} exists, so it is taken as a hub name; {error}"
        ) from error
    parts = []
    for name in names:
        kind = file_kind(Path(name))
        assert kind is not None
        path = f"{dataset.name}@{commit[:7]}/{name}"
        # `max_rows` is about the rows of all files together.
        file_section = section.model_copy(update={"path": path, "max_rows": None})
        parts.append(open_file(file_section, folder / name, kind, form))
    return JoinedSource(section, parts)


def _files(section: SourceSection, dataset: HubName, commit: str, files: list[str]) -> tuple[list[str], CsvForm]:
    """(the files of the subset and split, in order; the form of csv files)."""
    import datasets

    title = f"the dataset {dataset} of the hub"
    cards = [name for name in CARDS if name in files]
    # `datasets` chooses the files of a split by their names and by the card, so the other files may be empty.
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        if cards:
            downloaded = download("dataset", dataset, commit, cards)
        for name in files:
            if not (folder / name).resolve().is_relative_to(folder):
                raise DataError(f"{title} has a file {name!r} outside of the repository: the dataset is not read")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((downloaded / name).read_bytes() if name in cards else b"")
        try:
            builder = datasets.load_dataset_builder(str(folder), section.subset)
        except Exception as error:  # of many classes: no data files, several subsets, a missing subset
            reason = " ".join(str(error).replace(str(folder), dataset.name).replace(folder.name, dataset.name).split())
            raise DataError(
                f"{title}, subset {section.subset!r}: {reason.partition(' Example of usage')[0]}"
            ) from error
        splits = {str(k): [str(f) for f in v] for k, v in (builder.config.data_files or {}).items()}
        if section.split not in splits:
            raise DataError(
                f"{title} has no split {section.split!r}; it has {', '.join(splits) or 'none'}."
                f"{did_you_mean(section.split, splits)}"
            )
        names = [Path(f).resolve().relative_to(folder).as_posix() for f in splits[section.split]]
    other = [name for name in names if file_kind(Path(name)) is None]
    if other:
        raise DataError(
            f"{title}, split {section.split!r}, has files like {other[0]!r}; allowed are {', '.join(FILE_KINDS)}, "
            "the first three also with .gz. Load it with `datasets`, save it with save_to_disk, and name that folder."
        )
    defaults = type(builder.config)()
    options = {
        f.name: getattr(builder.config, f.name)
        for f in dataclasses.fields(builder.config)
        if f.name not in _OF_FILES and getattr(builder.config, f.name) != getattr(defaults, f.name)
    }
    of_csv = all(file_kind(Path(name)) == "csv" for name in names)
    form = _csv_form(options) if of_csv else None if options else DEFAULT_FORM
    if form is None:
        set_here = sorted(f"{name} = {value!r}" for name, value in options.items())
        raise DataError(
            f"{title} must be read with {', '.join(set_here)}, which is not supported here. Load it with `datasets`, "
            "save it with save_to_disk, and name that folder."
        )
    return names, form


def _csv_form(options: Mapping[str, Any]) -> CsvForm | None:
    """The card's options for csv, interpreted as in pandas, which `datasets` uses for csv. None if they set more than
    the separator and the column names.

    In pandas, if ``names`` is set, the first line is a row, unless ``header: 0`` is set. Without names and without a
    header line, pandas names the columns 0, 1, 2. This is not supported here, because a run file names columns by text.
    """
    separator, names = options.get("sep", ","), options.get("names") or []
    header = options.get("header", "infer")
    has_header = header == 0 if names else True
    understood = (
        options.keys() <= _OF_CSV
        and isinstance(separator, str)
        and len(separator) == 1
        and separator not in '"\r\n'
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and (header in ("infer", 0) or (header is None and bool(names)))
        and not isinstance(header, bool)
    )
    return CsvForm(separator, tuple(names), has_header) if understood else None
