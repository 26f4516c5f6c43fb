"""Failed samples: the first cause is said at once, and where too many fail, what they are drawn for ends."""

from __future__ import annotations

from collections.abc import Callable

from rlhf.errors import RolloutError
from rlhf.types import Trajectory

WINDOW = 64
"""The share is of so many samples at least, as soon as there are so many: in a small batch one bad row is a large
share."""


class Failures:
    """Counts the samples that are drawn for one purpose. A sample that failed has no reward, and the samples that are
    left say nothing of those: a server that is down must not look like a policy that learns.

    Args:
        allowed: share of failed samples (``stream.max_failed``), of the latest samples: those of the call of
            :meth:`expect`, and with those before it :data:`WINDOW` at least.
        note: says the first failure.
        what: is drawn, and what becomes of a failed one, for the note.
    """

    def __init__(
        self, allowed: float, note: Callable[[str], None], what: str = "sample", then: str = "is left out"
    ) -> None:
        self._allowed, self._note, self._what, self._then = allowed, note, what, then
        self.drawn = 0
        """Samples so far, in this process."""
        self.failed = 0
        """Those of them that failed."""
        self.first = ""
        """Which sample failed first, and why."""
        self._recent: list[str] = []
        """For each of the latest samples why it failed; empty text where it did not."""
        self._expected = 0

    def forget(self) -> None:
        """The samples to come are not compared with those before: another evaluation begins."""
        self._recent = []

    def expect(self, samples: int) -> None:
        """So many are drawn now. All of them count in the share from the first one on, so that whether a run is stopped
        does not depend on which of them ends first."""
        earlier = max(0, WINDOW - samples)
        self._recent = self._recent[-earlier:] if earlier else []
        self._expected = len(self._recent) + samples

    def add(self, trajectory: Trajectory) -> None:
        """A sample has ended. Raises RolloutError where too many have failed."""
        self.drawn += 1
        failed = trajectory.status == "failed"
        self._recent.append(describe(trajectory) if failed else "")
        if not failed:
            return
        self.failed += 1
        if not self.first:
            self.first = describe(trajectory)
            self._note(
                f"{self._what} {self.first}\nA failed {self._what} {self._then}; where more than "
                f"{self._allowed:.4g} of them fail (stream.max_failed), the run stops. Later failures are only counted."
            )
        causes = [cause for cause in self._recent if cause]
        if len(causes) > self._allowed * self._expected:
            latest = f"The last of them: {self._what} {causes[-1]}\n" if len(causes) > 1 else ""
            raise RolloutError(
                f"{len(causes)} of the latest {self._expected} {self._what}s failed, and stream.max_failed = "
                f"{self._allowed:.4g} allows no larger share.\nThe first of them: {self._what} {causes[0]}\n"
                f"{latest}Remove the cause, or raise stream.max_failed (1 never stops)."
            )

    def __str__(self) -> str:
        """``3 of 64 samples failed (4.7 %)``; empty where none did."""
        share = f"{100 * self.failed / self.drawn:.3g} %" if self.failed else ""
        return f"{self.failed} of {self.drawn} {self._what}s failed ({share})" if self.failed else ""


def describe(trajectory: Trajectory) -> str:
    """Which sample it is and why it failed."""
    row = trajectory.row
    return f"{trajectory.index[1]} of row {row.index} of {row.source!r} failed: {trajectory.error}"
