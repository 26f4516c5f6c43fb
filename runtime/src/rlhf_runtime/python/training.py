"""``rlhf.train``: converts arguments and objects to a run file, which is loaded, checked and run like the command."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from rlhf.errors import ConfigError, brief
from rlhf.plugins import Plugins
from rlhf.proxies import exempt_loopback

from rlhf_runtime.checkpoint.json_values import read_json
from rlhf_runtime.config.flag_values import PythonValue
from rlhf_runtime.config.load import load, look_for_models
from rlhf_runtime.config.overrides import Override
from rlhf_runtime.config.runfile import SINGLE, RunFile
from rlhf_runtime.config.sections import Choice, RunSection
from rlhf_runtime.config.suggestions import Suggestions
from rlhf_runtime.output.folder_lock import BusyFolderError, FolderLock
from rlhf_runtime.output.metrics import read_metrics
from rlhf_runtime.output.run_folder import check_folder, default_folder
from rlhf_runtime.python.components import observer_entries, reward_entries
from rlhf_runtime.python.object_files import ObjectFiles
from rlhf_runtime.python.result import MetricRows, Result
from rlhf_runtime.setup import build

P = ParamSpec("P")
R = TypeVar("R")


def only_known(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps ``function``. The result raises ConfigError instead of TypeError for an unknown keyword, and for a
    positional argument that must be a keyword."""
    parameters = inspect.signature(function).parameters
    by_place = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(by_place):
            raise ConfigError(
                f"rlhf.{function.__name__} got {len(args)} positional arguments; only {', '.join(by_place)} may be "
                f"positional. Name the others: rlhf.{function.__name__}(..., model=..., data=...)."
            )
        for name in kwargs:
            if name not in parameters:
                algorithm = args[0] if args else kwargs.get("algorithm")
                raise ConfigError(
                    f"rlhf.{function.__name__} has no argument {name!r}.{_hint(name, tuple(parameters), algorithm)} "
                    f"The arguments are {', '.join(parameters)}. Pass an option of the run file by its name, e.g. "
                    'options={"trainer.lr": 1e-5}.'
                )
        return function(*args, **kwargs)

    return checked


def _hint(name: str, arguments: tuple[str, ...], algorithm: Any) -> str:
    """`` Did you mean ...?`` with an argument, or with options of a run of that algorithm; or an empty string."""
    defaults = {kind: RunFile.model_fields[kind].default for kind in SINGLE}
    if isinstance(algorithm, str):
        defaults["algorithm"] = Choice(use=algorithm)
    choices = [(kind, kind, choice) for kind, choice in defaults.items() if isinstance(choice, Choice)]
    return Suggestions(Plugins.discover(), choices).suggest(name, arguments, False)


Path_ = str | os.PathLike[str]
PLACEHOLDER = "(given as an object)"
"""Placeholder for the path of a file that is not written yet."""


@only_known
def train(
    algorithm: str | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Any = None,
    observers: Any = (),
    steps: int | None = None,
    output: Path_ | None = None,
    resume: bool = False,
    overwrite: bool = False,
    options: Mapping[str, Any] | None = None,
    run_file: Path_ | None = None,
) -> Result:
    """Run an algorithm to its end, in this process, as the command ``rlhf train`` does::

        result = rlhf.train(algorithm="NAME", model="path/to/model", data=rows, reward=score, steps=100,
                            options={"trainer.lr": 1e-5}, output="runs/first")

    Ctrl-C ends the run after the current step, with a checkpoint; a second Ctrl-C ends it at once. Afterwards only the
    run's folder remains: no process, thread or file elsewhere.

    Args:
        algorithm: name of the algorithm's plugin.
        model: a folder, a hub name, or a loaded transformers model. An object is saved once to ``objects/`` in the
            run's folder and read from there. The object itself is not trained.
        tokenizer: the tokenizer of a model that is passed as an object.
        data: rows to train on: paths of files, a list of dicts, a ``datasets.Dataset``, a pandas frame, or any iterable
            of dicts. Objects are written once to ``objects/`` in the run's folder before the run starts. An iterable is
            read to its end. The run reads that file, so the order of rows, a resume and
            ``rlhf train OUTPUT/config.toml`` work as with a file. Allowed values are those of JSON: text, numbers,
            booleans, None, lists and dicts.
        eval_data: held-out rows, in the same forms.
        reward: one reward, a list, or {name: reward}: a function ``f(prompt, completion, row)`` or ``f(completions,
            **columns)`` (:mod:`rlhf.plugins.functions`), a Reward class or instance, or a reference
            (``"math"``, ``"file:reward.py"``). A plain ``def`` is copied to worker processes, which are killed at its
            deadline. Changes that it makes to variables are not visible in this process. An ``async def`` is called in
            this process. Weights are options: ``{"reward.NAME.weight": 0.5}``.
        observers: a list of functions ``f(step, metrics, control)``, Observer classes or instances, and names.
        steps: number of steps; None: ``run.epochs`` passes over the data.
        output: the run's folder; None: the next of ``runs/1``, ``runs/2``, ...
        resume: continue from the newest checkpoint in ``output``. The other arguments must be the same as before.
        overwrite: delete the run that ``output`` holds.
        options: {dotted name: value} of any option of the run file, named as on the command line.
        run_file: a TOML file; the other arguments override its options.

    Raises the errors of :mod:`rlhf.errors`: errors of the configuration before anything starts, or the error that ended
    the run.
    """
    exempt_loopback()
    plugins = Plugins.discover()
    lists = {
        "reward": reward_entries(plugins, reward) if reward is not None else [],
        "observer": observer_entries(plugins, observers),
    }
    single = {"algorithm": algorithm, "run.steps": steps, "run.output": None if output is None else os.fspath(output)}
    flags = {"run.resume": resume or None, "run.overwrite": overwrite or None}
    objects = Objects(model, tokenizer, data, eval_data)
    arguments = {**single, **flags, **{key: entries or None for key, entries in lists.items()}, **objects.paths}
    arguments = {key: value for key, value in arguments.items() if value is not None}
    path = None if run_file is None else os.fspath(run_file)
    # First with placeholders for objects: wrong arguments are refused before a file is written.
    config = load(path, _overrides(arguments, options or {}), plugins)
    with objects.write(config) as file_options:
        if file_options:
            config = load(path, _overrides({**arguments, **file_options}, options or {}), plugins)
        look_for_models(config)
        with _threads_restored():
            run = build.train(config, plugins, locked=bool(file_options))
    folder = run.directory.path.absolute()
    return Result(
        status=cast(Literal["finished", "stopped"], run.status),
        reason=read_json(folder / "manifest.json")["starts"][-1]["ended"]["why"],
        output=folder,
        model_path=folder / run.directory.model.name,
        metrics=MetricRows(read_metrics(folder / "metrics.jsonl")),
        config=run.config,
    )


class Objects:
    """The data and the model of a run. Objects are written to files."""

    def __init__(self, model: Any, tokenizer: Any, data: Any, eval_data: Any) -> None:
        self._tokenizer = tokenizer
        self._model = None if _is_path(model) else model
        self._rows = {"train": data, "eval": eval_data}
        self.paths: dict[str, Any] = {"policy.model": os.fspath(model) if _is_path(model) else model and PLACEHOLDER}
        """{option: value}: the path, or :data:`PLACEHOLDER` for objects."""
        if tokenizer is not None and self._model is None:
            raise ConfigError(
                f"tokenizer: it was passed with {'the path of a model' if model else 'no model'}; a run takes the "
                "tokenizer from the model's folder. Remove it, or pass the model as an object."
            )
        for name, rows in list(self._rows.items()):
            if rows is None:
                continue
            paths = _paths(name, rows)
            self.paths[f"data.{name}"] = paths or [_source(name, PLACEHOLDER)]
            if paths:
                self._rows[name] = None

    @contextmanager
    def write(self, config: RunFile) -> Iterator[dict[str, Any]]:
        """Writes the files and yields the options that name them. The run's folder is locked before the first file is
        written, until the run has ended. The files are deleted if the run does not start.

        Raises ConfigError (the run's folder is not free), DataError.
        """
        rows = {name: rows for name, rows in self._rows.items() if rows is not None}
        if not rows and self._model is None:
            yield {}
            return
        has_output = "output" in config.run.model_fields_set
        output, files, lock = _lock_folder(config.run, has_output)
        manifest = Path(output) / "manifest.json"
        old_manifest = manifest.read_bytes() if manifest.exists() else None
        try:
            options: dict[str, Any] = {} if has_output else {"run.output": output}
            if self._model is not None:
                options["policy.model"] = files.model(self._model, self._tokenizer)
            options |= {f"data.{name}": [_source(name, files.rows(name, value))] for name, value in rows.items()}
            yield options
        except BaseException:
            started = manifest.exists() and manifest.read_bytes() != old_manifest  # written when everything is loaded
            if not started:
                files.remove()
            raise
        finally:
            lock.release()


def _lock_folder(run: RunSection, has_output: bool) -> tuple[str, ObjectFiles, FolderLock]:
    """Create and lock the run's folder. If the user named none and another run has just taken the name, the next name
    is used."""
    while True:
        output = run.output if has_output else str(default_folder(run.resume or run.overwrite))
        try:
            check_folder(output, run.resume, run.overwrite)
            files = ObjectFiles(output)
            Path(output).mkdir(parents=True, exist_ok=True)
            return output, files, FolderLock(Path(output))
        except BusyFolderError:
            if has_output or run.resume or run.overwrite:
                raise


def _overrides(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> list[Override]:
    """Arguments and options as flags of the command. Raises ConfigError if a name occurs twice or is not text."""
    for key in options:
        if not isinstance(key, str):
            raise ConfigError(f"options: a name must be a string like 'trainer.lr', got {brief(key)}")
        if key in arguments:
            raise ConfigError(f"options: {key!r} is also an argument. Remove one of the two.")
    return [(key, PythonValue(value)) for key, value in {**arguments, **options}.items()]


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _paths(name: str, rows: Any) -> list[str]:
    """The paths, if ``rows`` are paths, else an empty list. Raises ConfigError if the argument cannot be rows."""
    if _is_path(rows):
        return [os.fspath(rows)]
    if isinstance(rows, Sequence) and rows and all(map(_is_path, rows)):
        return [os.fspath(path) for path in rows]
    argument = "data" if name == "train" else "eval_data"
    if isinstance(rows, Mapping):
        raise ConfigError(
            f"{argument}: rows must be a list of dicts, got {brief(rows)}. From a dict of splits, pass one split; "
            "for a dict of columns, pass datasets.Dataset.from_dict(...)."
        )
    if not isinstance(rows, Iterable):
        raise ConfigError(
            f"{argument}: expected a list of dicts, a datasets.Dataset, an iterable or a path, got {brief(rows)}"
        )
    return []


def _source(name: str, path: str) -> dict[str, str]:
    return {"path": path, "name": name}


@contextmanager
def _threads_restored() -> Iterator[None]:
    """Restore torch's number of threads afterwards: ``run.threads`` applies to the run only."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
