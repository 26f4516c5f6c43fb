"""The conformance suite of adapters.

::

    from rlhf_testing.adapter import AdapterContract

    class TestMyAdapter(AdapterContract):
        adapter = MyAdapter
        files = [("reward", "def their_reward(text): ...", None)]    # kind, source of a foreign file, attribute
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

from rlhf_testing.contract import NAME, Contract, Nonconformance, expect, missing

NATIVE = "from rlhf.interfaces import Reward\n\n\nclass Mine(Reward):\n    name = 'mine'\n"
UNRELATED = "import math\n\nANSWER = 42\n"


class AdapterContract(Contract):
    """Checks that an adapter recognises its files without executing them, and creates components from them."""

    kind = "adapter"
    adapter: Any = None
    files: Sequence[tuple[str, str, str | None]] = ()
    """(kind, source text, attribute or None) of files that this adapter adapts."""

    def required_files(self) -> Sequence[tuple[str, str, str | None]]:
        if not self.files:
            raise missing("files = [(kind, source text, attribute), ...] that the adapter recognises")
        return self.files

    # ------------------------------------------------------------------------------------- checks

    def test_recognises(self) -> None:
        """It recognises its own files and no others, and executes nothing to find out."""
        for config in self.grid():
            label, adapter = self.label(config), self.build(config)
            for kind in ("reward", "env", "loss"):
                for text in (NATIVE, UNRELATED, "", "this is not python ("):
                    answer = adapter.recognises(kind, text)
                    expect(
                        answer is False,
                        f"{label} recognises({kind!r}) gives {answer!r} for a file that is not its own: {text!r}",
                    )
            for kind, text, _ in self.required_files():
                modules = set(sys.modules)
                try:
                    answer = adapter.recognises(kind, text + "\nraise SystemExit('executed')\n")
                except SystemExit as error:
                    raise Nonconformance(f"{label} recognises() executes the file: only look at its text") from error
                expect(answer is True, f"{label} does not recognise its own {kind} file")
                added = {m for m in set(sys.modules) - modules if m.split(".")[0] != self.cls.__module__.split(".")[0]}
                expect(not added, f"{label} recognises() imported {sorted(added)}: it must only look at the text")

    def test_adapts(self) -> None:
        """A foreign file becomes a component class of the kind, and ``importing`` restores ``sys.modules``
        afterwards."""
        from rlhf.interfaces import KINDS

        for config in self.grid():
            label, adapter = self.label(config), self.build(config)
            for kind, text, attribute in self.required_files():
                modules = dict(sys.modules)
                cls = self._adapt(adapter, kind, text, attribute, label)
                good = isinstance(cls, type) and issubclass(cls, KINDS[kind])
                expect(good, f"{label} adapt() must return a subclass of {KINDS[kind].__name__}, got {cls!r}")
                expect(
                    cls.name == "" or bool(NAME.fullmatch(cls.name)), f"{label} the adapted class is named {cls.name!r}"
                )
                replaced = sorted(m for m in modules if sys.modules.get(m) is not modules[m])
                expect(not replaced, f"{label} importing() left {replaced} replaced in sys.modules")
                cls(cls.Config())

    def test_missing_attribute(self) -> None:
        """An attribute that the file does not have is refused with a message. No other attribute is used instead."""
        from rlhf.errors import PluginInvalid

        for config in self.grid():
            label, adapter = self.label(config), self.build(config)
            for kind, text, _ in self.required_files():
                try:
                    component = self._adapt(adapter, kind, text, "no_such_attribute", label)
                except PluginInvalid as error:
                    expect(
                        "no_such_attribute" in str(error), f"{label} the message does not name the attribute: {error}"
                    )
                    continue
                raise Nonconformance(
                    f"{label} adapt() returned {component!r} for the attribute 'no_such_attribute', which does not "
                    "exist"
                )

    def _adapt(self, adapter: Any, kind: str, text: str, attribute: str | None, label: str) -> Any:
        module = types.ModuleType("rlhf_testing_foreign_file")
        module.__file__ = "foreign_file.py"
        with adapter.importing():
            exec(compile(text, "foreign_file.py", "exec"), module.__dict__)  # as loading a file does
            return adapter.adapt(kind, module, attribute)
