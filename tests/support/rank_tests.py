"""Tests that read the results of ranks. One group of processes runs the cases of a
:class:`~tests.support.rank_case.RankCases` once, for all selected tests of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_case import RankCases
from tests.support.rank_processes import Ranks


def reads(case: str) -> Callable[[Any], Any]:
    """Marks a test that reads a case. A test whose arguments have the names of the case's parameters runs for each of
    their values."""

    def mark(test: Any) -> Any:
        test.reads = case
        return test

    return mark


class RankTests:
    """Base of test classes. The ranks run the cases that the selected tests read, and no other."""

    cases: type[RankCases]
    world: int = 2
    """Number of ranks."""
    full: Collection[str] = ()
    """Cases that tests read only under the mark ``full``: ``NAME``, or ``NAME-VALUE`` for one of its runs."""

    def __init_subclass__(cls) -> None:
        """Leave out the tests whose case has no runs."""
        for name in dir(cls) if hasattr(cls, "cases") else ():
            case = getattr(getattr(cls, name), "reads", "")
            if case and not cls.cases.arguments(case):
                setattr(cls, name, None)

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
        folder = tmp_path_factory.mktemp("ranks")
        cls.cases.prepare(folder)
        reads = {name for item in request.session.items if getattr(item, "cls", None) is cls for name in _read(item)}
        names = [name for name in cls.cases.names() if name in reads]
        return Ranks(Path(inspect.getfile(cls.cases)), folder, cls.world, cls.cases.module, *names)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        case = getattr(metafunc.function, "reads", "")
        names = [name for name in self.cases.parameters(case) if name in metafunc.fixturenames] if case else []
        runs = {}
        for row in self.cases.arguments(case) if names else []:
            marked = {case, "-".join([case, *row.values()])} & {*self.full}
            values = [row[name] for name in names]
            runs["-".join(values)] = pytest.param(
                *values, marks=[pytest.mark.full] if marked else [], id="-".join(values)
            )
        if names:
            metafunc.parametrize(names, list(runs.values()))


def _read(item: Any) -> list[str]:
    """The names of the runs that a test reads."""
    case = getattr(item.function, "reads", "")
    params = item.callspec.params if hasattr(item, "callspec") else {}
    rows = item.cls.cases.arguments(case) if case else []
    return ["-".join([case, *row.values()]) for row in rows if all(params.get(n, v) == v for n, v in row.items())]
