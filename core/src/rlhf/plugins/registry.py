"""``Plugins``: lists the installed plugins and resolves a reference to a checked class."""

from __future__ import annotations

import copyreg
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from packaging.utils import canonicalize_name

from rlhf.errors import (
    PluginConflict,
    PluginError,
    PluginInvalid,
    PluginNotFound,
    PluginVersionMismatch,
    RlhfError,
    boundary,
    did_you_mean,
)
from rlhf.plugins import installed
from rlhf.plugins.entry import KINDS, Entry
from rlhf.plugins.files import SourceFile, component_of, expected, looks_native, nothing_usable, pick_component
from rlhf.plugins.references import Reference, check_kind, parse_reference
from rlhf.plugins.registration import check_class, import_plugin, pick, registered_classes
from rlhf.plugins.requirements import META, check_requirements, pip_words, published
from rlhf.plugins.resolved import FILE, IN_PROCESS, MODULE, Resolved, source_sha256

Entries = list[Entry]
Classes = list[type[Any]]
Texts = list[str]  # inside the class, ``list`` is its method


class Plugins:
    """The plugins of this process. A run makes one object with :meth:`discover` and passes it on."""

    def __init__(self, entries: Iterable[Entry] = (), path: Sequence[str] | None = None) -> None:
        self._entries = sorted(entries, key=_order)
        self._path = path
        self._registered: dict[tuple[str, str, str], type[Any]] = {}
        self._classes: dict[tuple[str, str], Classes] = {}
        self._files: dict[str, SourceFile] = {}

    @classmethod
    def discover(cls, path: Sequence[str] | None = None) -> Plugins:
        """Read the metadata of the installed distributions, without importing them.

        Args:
            path: folders in which to look for distributions, in place of ``sys.path``. (Imports still use
                ``sys.path``.)
        """
        return cls(installed.entries(path), path)

    def list(self, kind: str | None = None) -> Entries:
        """All entries, or those of one kind, in order of kind and name, each with its status."""
        if kind is not None:
            check_kind(kind)
        entries = []
        for entry in self._all():
            if kind is None or entry.kind == kind:
                conflicts = [e.distribution for e in self._matches(entry.kind, entry.name) if e != entry]
                if conflicts and entry.status == "ok":
                    entry = replace(entry, status=f"conflict with {', '.join(conflicts)}")
                entries.append(entry)
        return entries

    def register(self, kind: str, cls: type[Any], distribution: str = IN_PROCESS) -> type[Any]:
        """Offer a class of this process, for tests and notebooks. Registering the same class again (a notebook cell
        that runs twice) replaces it. Returns the class, for use in a decorator.

        Raises PluginInvalid: the class is not a usable component of that kind. PluginConflict: another class has the
        name.
        """
        check_kind(kind)
        label = f"{kind} registered by {distribution!r}"
        with boundary(PluginInvalid, label):
            check_class(kind, cls, label)
        key = (kind, cls.name, distribution)
        old = self._registered.get(key, cls)
        if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
            raise PluginConflict(
                f"{kind} {cls.name!r} of {distribution!r} is already the class {old.__module__}.{old.__qualname__}; "
                f"give {cls.__module__}.{cls.__qualname__} another name"
            )
        self._registered[key] = cls
        return cls

    def resolve(self, kind: str, ref: str) -> Resolved:
        """Import and check the class that a reference names.

        Raises:
            ConfigError: ``ref`` is not a reference.
            PluginNotFound, PluginConflict: no plugin, or more than one, has the name.
            PluginVersionMismatch: requirements of its distribution are not met (found before importing).
            PluginImportFailed, PluginInvalid: its module cannot be imported, or does not register a valid class.
        """
        reference = parse_reference(kind, ref)
        if reference.scheme == "file":
            source = self._files.get(reference.path) or SourceFile.read(reference.path)
            self._files[reference.path] = source
            return self._resolve_file(reference, source)
        if reference.scheme == "python":
            return self._resolve_module(reference)
        entry = self._find(reference)
        registered_class = self._registered.get((kind, entry.name, entry.distribution))
        sha256 = source_sha256(registered_class) if registered_class and entry.distribution == IN_PROCESS else ""
        cls = registered_class or self._import(entry)
        return Resolved(
            kind, entry.name, cls, entry.distribution, entry.version, ref, sha256, options=reference.options
        )

    def resolve_text(self, kind: str, ref: str, path: str, text: str) -> Resolved:
        """Resolve a ``file:`` reference from text that another process read."""
        return self._resolve_file(parse_reference(kind, ref), SourceFile.of(path, text))

    def verify(self, manifest: Iterable[Mapping[str, str]]) -> None:
        """Compare a manifest (:meth:`Resolved.manifest` of each plugin) with the installed plugins, without importing
        them.

        Raises PluginVersionMismatch, naming every plugin that is missing, has another version or, for files, other
        content.
        """
        problems = [problem for item in manifest if (problem := self._difference(item))]
        if problems:
            raise PluginVersionMismatch("the installed plugins differ from those of the run: " + "; ".join(problems))

    def check_requirements(self, texts: Iterable[str]) -> None:
        """Check ``run.requires``; see :func:`rlhf.plugins.requirements.check_requirements`."""
        check_requirements(texts, self._path)

    def how_to_install(self, distribution: str) -> str:
        """`` Try: pip install DISTRIBUTION``, or the folder of the distribution in a checkout. Empty if it is
        installed, or not known to exist. Without ``rlhf-kit`` no distribution is known to exist, and the text only
        names it, without advice."""
        name, packages = canonicalize_name(distribution), published(self._path)
        if any(canonicalize_name(e.distribution) == name for e in self._entries):
            return ""
        if not packages:
            return f" The plugins of this project are in {META}; a plugin of this name would be in {distribution}."
        return f" Try: pip install {pip_words(distribution, path=self._path)}" if name in packages else ""

    # ------------------------------------------------------------------------------------- installed

    def _all(self) -> Entries:
        added = [Entry(k, n, d, "", cls.__module__) for (k, n, d), cls in self._registered.items()]
        return sorted(self._entries + added, key=_order) if added else self._entries

    def _matches(self, kind: str, name: str) -> Entries:
        return [e for e in self._all() if e.kind == kind and e.name == name]

    def _find(self, reference: Reference) -> Entry:
        kind, name, distribution = reference.kind, reference.name, reference.distribution
        candidates = self._matches(kind, name)
        if distribution is not None:
            candidates = [e for e in candidates if canonicalize_name(e.distribution) == canonicalize_name(distribution)]
        if len(candidates) > 1:
            owners = [e.distribution for e in candidates]
            raise PluginConflict(
                f"{kind} {name!r} is provided by {' and '.join(owners)}; pick one: "
                f"{' or '.join(repr(f'{owner}/{name}') for owner in owners)}"
            )
        if not candidates:
            from rlhf.plugins.not_found import not_found  # listing plugins starts without it

            raise PluginNotFound(not_found(reference, self._all(), self.how_to_install))
        return candidates[0]

    def _import(self, entry: Entry) -> type[Any]:
        if entry.status != "ok":
            raise PluginVersionMismatch(f"{entry} {entry.status}")
        if ":" in entry.module:
            raise PluginInvalid(f"{entry}: its entry point is {entry.module!r}; it must name a module, without ':'")
        key = (entry.kind, entry.module)
        if key not in self._classes:
            # a command such as `doctor` looks for the reason, and needs little of its distribution
            if entry.kind != "command" and (problem := installed.requirements_problem(entry.distribution, self._path)):
                raise PluginVersionMismatch(f"{entry} {problem}")
            module = import_plugin(entry.module, str(entry))
            with boundary(PluginInvalid, str(entry)):  # a metaclass may raise anything
                self._classes[key] = registered_classes(module, entry.kind, str(entry))
        with boundary(PluginInvalid, str(entry)):
            return pick(self._classes[key], entry.kind, entry.name, str(entry))

    def _difference(self, item: Mapping[str, str]) -> str:
        label = f"{item['kind']} {item['name']!r} ({item['distribution']} {item['version']})"
        if item["distribution"] == FILE:
            try:
                source = SourceFile.read(parse_reference(item["kind"], item["ref"]).path)
            except RlhfError as cause:
                return f"{label}: {cause}"
            return (
                ""
                if source.sha256 == item["sha256"]
                else f"{item['ref']} has changed since (SHA-256 {source.sha256[:12]}, was {item['sha256'][:12]})"
            )
        if item["distribution"] == MODULE:
            try:
                sha256 = self.resolve(item["kind"], item["ref"]).sha256
            except RlhfError as cause:
                return f"{label}: {cause}"
            return "" if sha256 == item["sha256"] else f"the source of {item['ref']} has changed since"
        matches = [e for e in self._matches(item["kind"], item["name"]) if e.distribution == item["distribution"]]
        if not matches:
            return f"{label} is not installed here"
        return "" if matches[0].version == item["version"] else f"{label} is version {matches[0].version} here"

    # ----------------------------------------------------------------------------- modules and files

    def _resolve_module(self, reference: Reference) -> Resolved:
        kind, attribute, label = reference.kind, reference.attribute or "", f"{reference.kind} {reference.text!r}"
        module = import_plugin(reference.path, label)
        with boundary(PluginInvalid, label):
            if (member := getattr(module, attribute, None)) is None:
                names = [name for name in dir(module) if not name.startswith("_")]
                raise PluginInvalid(f"{label}: {module.__name__} has no {attribute!r}.{did_you_mean(attribute, names)}")
            name = re.sub(r"[^a-z0-9_]+", "_", attribute.lower())
            cls = component_of(member, kind, attribute, name, module, label)
            if cls is None:
                raise PluginInvalid(f"{label}: expected {expected(kind)}, got {member!r}")
            return Resolved(kind, cls.name, cls, MODULE, "", reference.text, source_sha256(cls))

    def _resolve_file(self, reference: Reference, source: SourceFile) -> Resolved:
        kind, attribute = reference.kind, reference.attribute
        label = f"{kind} {reference.text!r}"
        native = looks_native(source, kind)
        broken: Texts = []
        cls = None if native else self._adapt(reference, source, broken)
        if cls is None:
            module = source.load()
            with boundary(PluginInvalid, label):
                cls = pick_component(source, kind, attribute, module)
            if cls is None and native:
                cls = self._adapt(reference, source, broken)
            if cls is None:
                raise PluginInvalid(nothing_usable(label, kind, module, [e.name for e in self.list("adapter")], broken))
        return Resolved(
            kind, cls.name, cls, FILE, "", reference.text, source.sha256, path=source.path, text=source.text
        )

    def _adapt(self, reference: Reference, source: SourceFile, broken: Texts) -> type[Any] | None:
        """The class that an adapter creates from the file; None if no adapter recognises the file."""
        kind, takers = reference.kind, []
        for entry in self._all():
            if entry.kind != "adapter":
                continue
            try:
                with boundary(PluginInvalid, str(entry)):
                    adapter = self.resolve("adapter", f"{entry.distribution}/{entry.name}").cls()
                    if adapter.recognises(kind, source.text):
                        takers.append((entry, adapter))
            except PluginError as cause:  # not selected by the user: reported only if no other adapter takes the file
                broken.append(str(cause))
        if len(takers) > 1:
            raise PluginConflict(
                f"{kind} {reference.text!r} is recognised by {' and '.join(str(e) for e, _ in takers)}; uninstall one"
            )
        if not takers:
            return None
        entry, adapter = takers[0]
        with boundary(PluginInvalid, str(entry)), adapter.importing():
            cls = adapter.adapt(kind, source.load(), reference.attribute)
        if getattr(cls, "name", None) == "":
            cls.name = source.name
        return check_class(kind, cls, f"{kind} {reference.text!r}, adapted by {entry}")


def _order(entry: Entry) -> tuple[int, str, str]:
    return (KINDS.index(entry.kind) if entry.kind in KINDS else len(KINDS), entry.name, entry.distribution)


def _reduce(plugin: Resolved) -> tuple[Any, ...]:
    """The function to call when unpickling, and its arguments.

    A resolved plugin pickles as its reference, never as code. The process that unpickles it resolves the same kind,
    name, distribution and version again, and refuses another version. A file is pickled as its text and SHA-256.
    """
    options = dict(plugin.options)
    if plugin.distribution == FILE:
        return _resolve_text, (plugin.kind, plugin.ref, plugin.path, plugin.text, options)
    if plugin.version or plugin.distribution == MODULE:
        return _resolve_same, (plugin.manifest(), plugin.ref, options)
    # registered in process: its class must be importable there
    fields = (plugin.kind, plugin.name, plugin.cls, plugin.distribution, plugin.version, plugin.ref, plugin.sha256)
    return Resolved, (*fields, options)


# Not Resolved.__reduce__: it would have to import this module, which imports that of Resolved.
copyreg.pickle(Resolved, _reduce)


def _resolve_same(item: dict[str, str], ref: str, options: dict[str, Any]) -> Resolved:
    plugins = Plugins.discover()
    plugins.verify([item])
    name = ref if item["distribution"] == MODULE else f"{item['distribution']}/{item['name']}"
    plugin = plugins.resolve(item["kind"], name)
    return replace(plugin, ref=ref, options=options)


def _resolve_text(kind: str, ref: str, path: str, text: str, options: dict[str, Any]) -> Resolved:
    return replace(Plugins.discover().resolve_text(kind, ref, path, text), options=options)
