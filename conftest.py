"""One thread per test process: the models of the tests are too small for two, and `make test` runs two processes."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, so before any test module is
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: other tests would leave Ray's workers no processor


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: started last, one of them would keep one process busy while the other is done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
