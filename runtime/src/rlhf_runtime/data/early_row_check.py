"""Rows that a run would refuse, found while its models load: in a thread, ended before the first step.

Which rows are looked at depends on the run file alone: the first :data:`CHECKED` of those that the run will take, in
its own order. Later ones are looked at when they are taken; ``rlhf data preview --check`` looks at all.
"""

from __future__ import annotations

from threading import Event, Thread

from rlhf_runtime.data.dataset import TrainData

CHECKED = 5_000
"""Training rows that are tokenised before the first step: a few seconds, mostly shorter than loading models takes."""


class RowCheck:
    """Runs beside the loading of models from :meth:`start` on. Nobody else may use the data before :meth:`wait` or
    :meth:`stop` has returned: a tokenizer is not made for two threads.

    Args:
        rows: training rows that the run takes.
    """

    def __init__(self, data: TrainData, rows: int) -> None:
        self._data, self._rows = data, min(rows, CHECKED, data.rows_per_epoch)
        self._stopped = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="row-check", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Return when all rows are checked. Raises DataError with file and line of the first that the run refuses."""
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Look at no further row: the run comes to nothing for another reason."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._data.check(self._rows, self._stopped.is_set)
        except BaseException as error:  # raised where somebody waits
            self._error = error
