"""Find rows that a run would refuse while its models load, in a thread that ends before the first step.

The run file alone decides which rows are checked: the first :data:`CHECKED` rows that the run will take, in its order.
Later rows are checked when they are taken. ``rlhf data preview --check`` checks all rows.
"""

from __future__ import annotations

from threading import Event, Thread

from rlhf_runtime.data.dataset import TrainData

CHECKED = 5_000
"""Number of training rows that are tokenised before the first step. This takes a few seconds, usually less than loading
the models."""


class RowCheck:
    """Checks rows in a thread from :meth:`start` on, while models load. No other code may use the data before
    :meth:`wait` or :meth:`stop` has returned, because a tokenizer is not thread-safe.

    Args:
        rows: number of training rows that the run takes.
    """

    def __init__(self, data: TrainData, rows: int) -> None:
        self._data, self._rows = data, min(rows, CHECKED, data.rows_per_epoch)
        self._stopped = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="row-check", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Wait until all rows are checked. Raises DataError with file and line of the first row that is refused."""
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the check, because the run has failed for another reason."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._data.check(self._rows, self._stopped.is_set)
        except BaseException as error:  # raised again in wait()
            self._error = error
