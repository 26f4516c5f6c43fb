"""One thread per test process: the models of the tests are too small for two, and every core has a process already.

anyio is a pytest plugin, so pytest parses each of its files when it is imported. Python 3.11 raises `SystemError: AST
constructor recursion depth mismatch` where the garbage collector runs during such a parse and frees something that
warns. anyio imports its event loop at the first connection, in the middle of a test. It is imported here instead."""

import gc
import os
import socket
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import anyio._backends._asyncio  # noqa: F401  (the last paragraph of the docstring)
import pytest

if TYPE_CHECKING:
    from tests.forks import Forks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, so before any test module is
THREADS = int(os.environ["OMP_NUM_THREADS"])
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # figures of the tests are those of a processor
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: other tests would leave Ray's workers no processor

BACKENDS = str(Path(__file__).parent / "plugins" / "backends")
CLUSTER = tuple(f"{BACKENDS}/{name}/" for name in ("ray", "vllm", "deepspeed", "fsdp"))

freeze = gc.freeze  # `pytest_collection` puts a function without an effect in its place
module_count = [0]
"""The number of modules when all objects were frozen last."""


def pytest_addoption(parser: pytest.Parser) -> None:
    description = "fail a test whose call takes more seconds of processor time, that of its child processes included"
    parser.addoption("--longest-case", type=float, metavar="SECONDS", help=description)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The processes of ``-n auto``: one more than cores, as tests wait for a third of their time, with 4 GiB for each
    and what it starts; at least two, at most 8."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(2, min(1 + (os.cpu_count() or 1), int(gib / 4), 8))


def pytest_configure(config: pytest.Config) -> None:
    """What is frozen is not freed at exit, and libraries print that as leaks. This cleanup follows pytest's own, which
    collects garbage.

    A run writes through to the disk some forty times, which takes as long as half of a tiny run and changes nothing
    that a test can see: no test cuts the power. The processes that tests start do it."""
    config.add_cleanup(gc.unfreeze)
    os.fsync = lambda descriptor: os.fstat(descriptor) and None  # fstat refuses what fsync would


def pytest_sessionstart(session: pytest.Session) -> None:
    """pytest-rerunfailures sends two small messages before each test of ``-n``. The second waited 40 ms for the system
    to acknowledge the first (Nagle's algorithm with delayed acknowledgements): four minutes of ``make test``."""
    connection = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Forks]":
    """Starts `rlhf`, and Python programs, in processes that need not import torch and transformers again."""
    from tests.forks import Forks

    with Forks(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Processor time, because a clock would also count the time in which a busy machine runs other processes. The first
    test that imports a large package is not measured: it does so for all that follow. Other systems than Linux have no
    limit: workers are direct children there (`rlhf.children`), so their time would count too."""
    limit, start, modules = item.config.getoption("longest_case", None), processor_seconds(), len(sys.modules)
    result = yield
    seconds = processor_seconds() - start
    if limit is not None and sys.platform == "linux" and seconds > limit and len(sys.modules) - modules < 100:
        pytest.fail(
            f"the test took {seconds:.1f} s of processor time, --longest-case allows {limit:g} s: make it quicker, "
            "or mark it slow (pytest.mark.slow)",
            pytrace=False,
        )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Tests that follow one that changes torch's number of threads would be slower, and get other results. After the
    last test of a file, what its tests imported is spared further collections of garbage, like all that was imported
    before the tests."""
    result = yield
    if (nextitem is None or nextitem.path != item.path) and len(sys.modules) > module_count[0] + 200:
        module_count[0] = len(sys.modules)
        gc.collect()
        freeze()
    torch = sys.modules.get("torch")
    if torch is not None and (threads := torch.get_num_threads()) != THREADS:
        torch.set_num_threads(THREADS)
        pytest.fail(f"torch computes with {threads} threads after the test", pytrace=False)
    return result


def processor_seconds() -> float:
    """Of this process, and of its child processes that have ended."""
    return sum(os.times()[:4])


def pytest_itemcollected(item: pytest.Item) -> None:
    """The tests of the cluster runtime carry ``cluster`` by their folder; elsewhere a test that starts it says so."""
    if str(item.path).startswith(CLUSTER):
        item.add_marker("cluster")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("linux")
    if marker is not None and sys.platform != "linux":
        pytest.skip(f"needs Linux: {marker.args[0]}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: started last, one of them would keep one process busy while the other is done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector need not look at the ten thousand tests, and at all that they import, again and again.

    vLLM freezes what exists when an engine has started, unfreezes all at its end and collects: a second for each engine
    with the objects of all tests, and as much for each collection of later tests. Here neither has an effect."""
    gc.disable()
    try:
        return (yield)
    finally:
        module_count[0] = len(sys.modules)
        freeze()
        gc.enable()
        gc.freeze = gc.unfreeze = lambda: None
