"""One thread per test process: the models of the tests are too small for two, and `make test` runs two processes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, so before any test module is
