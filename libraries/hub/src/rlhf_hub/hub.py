"""Models and datasets on a hub: ``owner/name``, or ``owner/name@revision`` with a branch, a tag or a commit.

A run looks up the commit of a branch or tag once (:class:`Commits`) and passes on ``owner/name@commit``, so that all
its processes always read the same files. The run's manifest keeps the commits, and a resumed run uses them again. The
hub's client handles tokens (``HF_TOKEN``, or the one that ``hf auth login`` stored); this module neither accepts nor
shows tokens. huggingface_hub is imported at the first request.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from rlhf.errors import RlhfError

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed name on a hub, ``owner/name@revision``."""

    name: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


class HubError(RlhfError):
    """A request to a hub failed."""


def hub_name(path: str) -> HubName | None:
    """The hub name in a path. None if the path exists locally or looks like a file's path."""
    match = _NAME.fullmatch(path)
    if match is None or Path(path).exists():
        return None
    return HubName(match[1], match[2] or "main")


class Commits:
    """The commit of each hub name in one run. A name is looked up at its first use.

    Args:
        recorded: commits that an earlier start of the run looked up, as returned by :meth:`record`.
    """

    def __init__(self, recorded: Mapping[str, str] | None = None) -> None:
        self._commits = dict(recorded or {})
        self.notes: list[str] = []
        """Messages for the user about how names were looked up."""

    def commit(self, kind: Kind, repo: HubName) -> str:
        """The commit of a name. Raises HubError."""
        if _COMMIT.fullmatch(repo.revision):
            return repo.revision
        key = f"{kind} {repo}"
        if key not in self._commits:
            self._commits[key] = _look_up(kind, repo, self.notes)
        return self._commits[key]

    def record(self) -> dict[str, str]:
        """{``dataset owner/name@main``: commit} of every name that was looked up."""
        return dict(sorted(self._commits.items()))


def is_cached(kind: Kind, repo: HubName) -> bool:
    """Whether the client's cache has files of the revision, which shows that the hub had it once."""
    return _cached(kind, repo, repo.revision) is not None


def files_of(kind: Kind, repo: HubName, commit: str) -> list[str]:
    """Every file of the repository at a commit. The list comes from the client's cached answer of the hub or from the
    hub. If the hub is out of service, it contains the downloaded files.

    Raises HubError.
    """
    import huggingface_hub

    cached_tree = getattr(huggingface_hub, "get_cached_repo_tree", None)  # of clients since 2.0
    with suppress(Exception):  # nothing is cached; only these clients have this exception
        if cached_tree is not None:
            return sorted(file.path for file in cached_tree(repo.name, revision=commit, repo_type=kind))
    try:
        return sorted(huggingface_hub.HfApi().list_repo_files(repo.name, revision=commit, repo_type=kind))
    except Exception as error:  # of the client or its transport; differs by version
        folder = _cached(kind, repo, commit)
        if folder is None or _is_refusal(error):
            raise HubError(explain(kind, repo, error)) from error
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def download(kind: Kind, repo: HubName, commit: str, patterns: Sequence[str]) -> Path:
    """The folder of the client's cache with the files of the commit that match one of ``patterns`` (as in a shell).

    Files in the cache are not requested again, so loading needs no network.

    Raises HubError.
    """
    import huggingface_hub

    names = [name for name in files_of(kind, repo, commit) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    folder = _cached(kind, repo, commit)
    if folder is not None and all((folder / name).is_file() for name in names):
        return folder
    try:
        # The client reads them as patterns.
        filters = [glob.escape(name) for name in names]
        return Path(
            huggingface_hub.snapshot_download(repo.name, repo_type=kind, revision=commit, allow_patterns=filters)
        )
    except Exception as error:  # network, authentication, a missing commit, a full disk: the client reports it
        raise HubError(explain(kind, repo, error)) from error


def explain(kind: Kind, repo: HubName, error: BaseException) -> str:
    """An error message: the request, the hub, the failure and what to do."""
    import huggingface_hub
    from huggingface_hub import constants, errors
    from rlhf.secrets import redact

    token = huggingface_hub.get_token() is not None
    label = f"the {kind} {repo.name!r}, revision {repo.revision!r}, of the hub {redact(constants.ENDPOINT)}"
    note = "the token of HF_TOKEN or `hf auth login` was sent" if token else "no token was sent"
    status = getattr(getattr(error, "response", None), "status_code", None)
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(e, errors.OfflineModeIsEnabled) for e in chain) or constants.HF_HUB_OFFLINE:
        return (
            f"{label} is missing or incomplete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids its "
            "download. Unset HF_HUB_OFFLINE, copy a cache that has it (HF_HUB_CACHE), or use a folder or file."
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{label} is open only to users whom its owner accepts, and {note}. Request access on its page, and set "
            "HF_TOKEN."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{label}: this branch, tag or commit does not exist. Use one that exists: {repo.name}@REVISION."
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        advice = "a token that may read it" if token else "your token, if it is private"
        return f"{label} does not exist or is private ({note}). Correct the name, or set HF_TOKEN to {advice}."
    failure = redact(f"{type(chain[-1]).__name__}: {chain[-1]}".strip())
    if isinstance(error, errors.HfHubHTTPError):
        return f"{label} could not be read: {failure}. Try again later."
    return f"{label} could not be read: {failure}. Check the network, HF_ENDPOINT and proxies, or use a folder or file."


def _is_refusal(error: Exception) -> bool:
    """Whether the hub answered that the client may not have what it requested, or that it does not exist. Then the
    answer counts, not the cache. A hub that is overloaded or broken (429, 5xx) did not answer the request."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code < 500 and error.response.status_code != 429


def _look_up(kind: Kind, repo: HubName, notes: list[str]) -> str:
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT  # in seconds; the client sets no timeout here
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    hub = huggingface_hub.HfApi()
    try:
        info = hub.repo_info(repo.name, revision=repo.revision, repo_type=kind, timeout=HF_HUB_ETAG_TIMEOUT)
        commit = str(info.sha)
    except Exception as error:
        folder = _cached(kind, repo, repo.revision)
        if folder is None or _is_refusal(error):
            raise HubError(explain(kind, repo, error)) from error
        if not isinstance(error, OfflineModeIsEnabled):
            status = "cannot be reached"
            if isinstance(error, HfHubHTTPError):
                status = f"answers {error.response.status_code}"
            notes.append(f"the hub {status}: {kind} {repo} is assumed to be {folder.name}, the downloaded commit")
        return folder.name
    # The client notes the commit of a branch only if it downloads by the name of the branch. Files are downloaded by
    # commit here, so the note is written here. Without a network the name is looked up in it.
    with suppress(OSError):  # a cache that is not writable suffices as long as the hub can be reached
        ref = _place(kind, repo) / "refs" / repo.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f".{ref.name}-{os.getpid()}")
        temporary.write_text(commit)
        temporary.replace(ref)
    return commit


def _cached(kind: Kind, repo: HubName, revision: str) -> Path | None:
    """The folder of a revision in the client's cache, completely downloaded or not."""
    place = _place(kind, repo)
    commit = place / "refs" / revision
    folder = place / "snapshots" / (commit.read_text().strip() if commit.is_file() else revision)
    return folder if folder.is_dir() else None


def _place(kind: Kind, repo: HubName) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"{kind}s--{repo.name.replace('/', '--')}"
