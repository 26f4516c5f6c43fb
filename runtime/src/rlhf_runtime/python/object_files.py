"""Writes rows and models that are passed as objects to the folder ``objects`` of a run, which reads them like any file.

File names contain a hash of the content, so a resume with the same objects uses the same files. Another start in the
same folder would use them too, so the folder is locked before the first file is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, DataError, brief

from rlhf_runtime.checkpoint.atomic_files import TEMPORARY, sync_tree
from rlhf_runtime.data.columnar_sources import content_hash, row_of_table
from rlhf_runtime.data.image_files import data_url, image_file, is_picture
from rlhf_runtime.output.folder_lock import LOCK
from rlhf_runtime.output.run_directory import OBJECTS
from rlhf_runtime.output.run_folder import is_latest

DIGITS = 12
"""Number of hexadecimal digits of the content's SHA-256 in a file's name."""


class ObjectFiles:
    """The objects of one run as files. :meth:`remove` deletes them if the run does not start.

    Args:
        output: the run's folder, which need not exist.
    """

    def __init__(self, output: Path | str) -> None:
        self.output = Path(output).absolute()
        self._new: list[Path] = []
        # From the innermost to the outermost, so that each can be deleted after those in it.
        self._made_folders = [f for f in (self.output / OBJECTS, self.output, *self.output.parents) if not f.exists()]

    def rows(self, name: str, data: Iterable[Any]) -> str:
        """Writes the rows and returns the path. A ``datasets.Dataset`` is saved by its own library, other data as
        jsonl. An iterable is read once, to its end. Missing values of a pandas frame are null. Rows of a frame and of a
        ``datasets.IterableDataset`` are read as those of a parquet file (:func:`row_of_table`).

        Args:
            name: ``train`` or ``eval``, for messages and the file's name.

        Raises DataError if there are no rows, or a row is not a dict of JSON values.
        """
        if is_dataset(data):
            return self._keep(name, "", lambda path: save_dataset(data, path))
        if is_frame(data):
            data = map(row_of_table, frame_rows(data))
        elif is_dataset(data, "IterableDataset"):
            data = map(row_of_table, data)
        return self._keep(name, ".jsonl", lambda path: save_rows(data, path, name))

    def model(self, model: Any, tokenizer: Any) -> str:
        """Saves a model and its tokenizer with transformers and returns the path of the folder.

        Raises ConfigError if the object is not a transformers model, has adapters, or comes without a tokenizer.
        """
        check_model(model, tokenizer)
        return self._keep("model", "", lambda path: save_model(model, tokenizer, path))

    def remove(self) -> None:
        """Delete the files that were written, and the folders that were created for them if they are empty. The folder
        to which ``runs/latest`` links is kept for the next start. Files that cannot be deleted are kept too, such as a
        model on NFS that this process has open. Called while the folder is locked."""
        for path in self._new:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if self.output in self._made_folders and not is_latest(self.output):  # the lock's file keeps its folder
            (self.output / LOCK).unlink(missing_ok=True)
        for folder in self._made_folders:
            with contextlib.suppress(OSError):  # not empty, or never made
                folder.rmdir()

    def _keep(self, name: str, suffix: str, write: Any) -> str:
        """Call ``write(path)``, which makes a file or folder and returns the SHA-256 of its content, and rename the
        result to its final name."""
        folder = self.output / OBJECTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder))
        except OSError as cause:
            raise ConfigError(
                f"run.output {self.output} cannot be written to: {cause.strerror or cause}. Choose another folder."
            ) from cause
        try:
            path = place / "content"
            digest = write(path)
            target = folder / f"{name}-{digest[:DIGITS]}{suffix}"
            if not target.exists():
                sync_tree(place)  # the final name means that the content is complete
                os.rename(path, target)
                self._new.append(target)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return str(target)


def is_dataset(data: object, name: str = "Dataset") -> bool:
    """Whether ``data`` is an object of this class of ``datasets``. Does not import that library."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(data, getattr(library, name))


def is_frame(data: object) -> bool:
    """Whether ``data`` is a ``pandas.DataFrame``. Does not import that library."""
    library = sys.modules.get("pandas")
    return library is not None and isinstance(data, library.DataFrame)


def frame_rows(frame: Any) -> Iterator[dict[Any, Any]]:
    """The rows of a pandas frame, without its index. A missing value (NaN, NA, NaT) becomes None. A one-dimensional
    array becomes a list, because pandas reads lists in parquet files as arrays."""
    pandas = sys.modules["pandas"]

    def cell(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cell(item) for key, item in value.items()}
        if isinstance(value, list) or getattr(value, "ndim", None) == 1:
            return [cell(item) for item in (value if isinstance(value, list) else value.tolist())]
        return None if pandas.api.types.is_scalar(value) and pandas.isna(value) else value

    for row in frame.to_dict("records"):
        yield cell(row)


def save_dataset(data: Any, path: Path) -> str:
    """Save the selected rows with ``save_to_disk``. Returns the SHA-256 of the values."""
    import datasets

    # The table below a selection still holds all rows: without this the hash would not depend on the selection.
    dataset = data.flatten_indices(keep_in_memory=True) if data._indices is not None else data
    hides_bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset.save_to_disk(str(path))
    finally:
        if not hides_bars:
            datasets.enable_progress_bars()
    return content_hash(dataset.data.table)


def save_rows(data: Iterable[Any], path: Path, name: str) -> str:
    """Write one row per line. Returns the SHA-256 of the file's bytes."""
    digest, count = hashlib.sha256(), 0
    with path.open("wb") as file:
        for line in lines(data, name):
            file.write(line)
            digest.update(line)
            count += 1
    if not count:
        raise DataError(f"{name} data: no rows. Give a list of dicts, a datasets.Dataset or another iterable of dicts.")
    return digest.hexdigest()


def lines(data: Iterable[Any], name: str) -> Iterator[bytes]:
    """Each row as a line of JSON. Raises DataError, which names the row and the position in it."""
    for number, row in enumerate(data):
        location = f"{name} data, row {number}"
        if not isinstance(row, Mapping):
            raise DataError(
                f"{location}: a row must be a dict of columns, got {brief(row)}. From a dict of splits, pass one split."
            )
        values = json_value(dict(row), location)
        try:
            yield json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except UnicodeEncodeError as error:
            raise DataError(f"{location}: a string is not valid Unicode: {error.reason}") from None


def json_value(value: Any, location: str) -> Any:
    """Returns ``value`` if JSON reads it back unchanged. An image (a PIL image, an array of pixels, a file's bytes)
    becomes a ``data:`` URL. Raises DataError for other values."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise DataError(f"{location}: {value} is not a JSON value. Remove the row, or use None.")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DataError(f"{location}: a name must be a string, got {brief(key)}")
        return {key: json_value(item, f"{location}, {key!r}") for key, item in value.items()}
    if isinstance(value, list):
        return [json_value(item, f"{location}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, bytes) or is_picture(value):
        try:
            return data_url(image_file(value, None))
        except DataError as error:
            raise DataError(f"{location}: {error}") from None
    raise DataError(
        f"{location}: got {brief(value)}; allowed: text, numbers, booleans, None, and lists and dicts of them, as in a "
        "jsonl file. Convert it: list(...), int(...), float(...) or str(...)."
    )


def check_model(model: Any, tokenizer: Any) -> None:
    """Raises ConfigError if a model object cannot be saved in a form that a run can use."""
    label = f"model: a {type(model).__name__} object"
    if not (hasattr(model, "save_pretrained") and hasattr(model, "config")):
        raise ConfigError(
            f"{label} is not a transformers model. Pass a model that AutoModelForCausalLM.from_pretrained() loads, "
            "or its path."
        )
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"{label} has adapters (peft). Merge them first, model.merge_and_unload(), and train new ones with "
            'options={"trainer.lora.rank": 16}.'
        )
    if tokenizer is None:
        raise ConfigError(
            f"{label} was passed without its tokenizer. Add tokenizer=AutoTokenizer.from_pretrained(...), or pass "
            "the path of a folder that holds both."
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(f"tokenizer: expected a transformers tokenizer, got {brief(tokenizer)}.")


def save_model(model: Any, tokenizer: Any, path: Path) -> str:
    """Save the model and its tokenizer with transformers. Returns the SHA-256 of the files."""
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(str(path))
        tokenizer.save_pretrained(str(path))
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb") as content:
                digest.update(f"{file.relative_to(path)} {hashlib.file_digest(content, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()
