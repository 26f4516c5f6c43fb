"""The hierarchy of errors. Each message says what is wrong, the value, what is allowed and what to do.

Every error holds its message only, so it pickles and can be sent between processes.
"""

from __future__ import annotations

import difflib
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class RlhfError(Exception):
    """Base class of all errors that this project raises on purpose."""


class ConfigError(RlhfError, ValueError):
    """The run file or a flag is wrong; raised before anything starts."""


class CapabilityError(ConfigError):
    """A combination of components that cannot work."""


class PluginError(RlhfError):
    """A problem with a plugin, its distribution or its registration."""


class PluginNotFound(PluginError, LookupError):
    """No installed plugin of that kind has that name."""


class PluginConflict(PluginError):
    """Two distributions provide the same name."""


class PluginVersionMismatch(PluginError):
    """A distribution's requirements on this project are not met."""


class PluginImportFailed(PluginError, ImportError):
    """A selected plugin could not be imported."""


class PluginInvalid(PluginError, TypeError):
    """A plugin registered something that does not meet the requirements of its kind."""


class DataError(RlhfError, ValueError):
    """A data source, a row or a template is invalid."""


class ModelError(RlhfError):
    """A model or tokenizer that cannot be loaded or used."""


class RewardError(RlhfError):
    """A reward source raised, timed out or returned something invalid."""


class EnvError(RlhfError):
    """An environment raised, timed out or never ended."""


class RolloutError(RlhfError):
    """A rollout raised or returned something invalid."""


class TrainingError(RlhfError):
    """A loss, an advantage or an optimizer step is wrong. Always ends the run."""


class SyncError(RlhfError):
    """New weights did not reach the generator, or there is no proof that they did."""


class WorkerError(RlhfError):
    """A worker process died, or stalled and was stopped."""


class StandstillError(RlhfError):
    """A run was asked to stop, but plugin code that cannot be interrupted prevents the step from ending."""


class CheckpointError(RlhfError):
    """A checkpoint that is incomplete, damaged, or of another run."""


class IntendedExit(SystemExit):
    """The end of a process that this project intends, such as after ``--help``. Any other SystemExit is a plugin's
    error."""


@contextmanager
def boundary(error: type[RlhfError], call: str) -> Iterator[None]:
    """Attribute any error that plugin code raises to that plugin.

    ``call`` names the call and its owner, e.g. ``"reward 'math' (rlhf-plugin-math 0.1.0)"``. Errors of this project
    pass unchanged. Any other exception, also SystemExit, becomes ``error``: the original is its cause, and the message
    names the line that raised it.
    """
    try:
        yield
    except RlhfError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as cause:
        if isinstance(cause, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, which reaches no other thread
        raise error(f"{call} raised {type(cause).__name__}: {cause}{_place(cause)}") from cause


def _place(error: BaseException) -> str:
    """`` (FILE:LINE)``: the innermost line outside of the core. Empty if the caller of :func:`boundary` raised it."""
    core = str(Path(__file__).parent)
    inner = traceback.extract_tb(error.__traceback__)[2:]  # without `boundary` itself and its caller
    frames = [frame for frame in inner if not frame.filename.startswith(core)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` or an empty string."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def short_list(items: Sequence[str], limit: int = 6) -> str:
    """``a, b, c and 4 more``, for messages."""
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def brief(value: object) -> str:
    """Type and shortened value, for messages."""
    try:
        text = repr(value)
    except Exception as cause:  # a long integer, or an object whose own repr fails
        text = f"whose repr() raises {type(cause).__name__}"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
