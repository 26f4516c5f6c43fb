"""jsonl, json and csv files, plain or gzipped, with the line of every row."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import sys
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.config.data_section import SourceSection
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


USUAL = CsvForm()


def open_text(section: SourceSection, path: Path, kind: str, form: CsvForm = USUAL) -> Source:
    """Read and check the whole file once, so that a malformed row is found before the run starts.

    ``form`` is for csv only.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    fingerprint = hashlib.sha256(content).hexdigest()
    path = Path(section.path)  # for messages: a hub's file has its name on the hub, not in the cache
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

    def where(self, index: int) -> str:
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
        for i, row in enumerate(self._rows):
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {i}: a row is a JSON object, got {_short(row)}")
        super().__init__(section, list(dict.fromkeys(itertools.chain.from_iterable(self._rows))), fingerprint)

    def rows(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])


class CsvSource(Source):
    """Comma-separated values with a header line, or in another form. Every cell is text; numbers and missing values are
    not recognised."""

    def __init__(self, section: SourceSection, path: Path, text: str, fingerprint: str, form: CsvForm = USUAL) -> None:
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
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{path}, line {line}: not valid csv: {error}") from None
        twice = sorted({c for c in header if header.count(c) > 1})
        if twice:
            where = "the dataset's card" if form.names else "the header"
            raise DataError(f"{path}: {where} names {', '.join(map(repr, twice))} twice")
        super().__init__(section, header, fingerprint if form == USUAL else f"{fingerprint} {form}")

    def rows(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        return dict(zip(self.columns, self._rows[index], strict=True))

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index]}"


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = STRICT.decode(line.decode())  # twice as fast for short rows as json.loads, which asks for the encoding
    except RecursionError:
        raise DataError(f"{path}, line {number}: nested too deeply to be read") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 text: {error.reason}") from None
    except json.JSONDecodeError as error:
        more = ". A row is one line, ended by a line feed" if error.msg == "Extra data" else ""
        raise DataError(f"{path}, line {number}, column {error.colno}: not valid JSON: {error.msg}{more}") from None
    except NotStrictError as error:
        raise DataError(f"{path}, line {number}: {error}") from None
    except ValueError:  # an integer of more digits than Python reads
        raise DataError(f"{path}, line {number}: {_LONG_INTEGER}") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: a row is a JSON object, got {_short(row)}")
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
