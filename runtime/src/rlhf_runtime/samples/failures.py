"""Counts failed samples. The first failure of each cause is reported immediately, and a too large share stops the
run."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable

from rlhf.errors import RolloutError
from rlhf.types import Trajectory

WINDOW = 64
"""The share of failures is computed over at least this many of the latest samples, once so many have been drawn. In a
small batch one bad row would be a large share."""

NOTED = 0.1
"""Share of failures above which a note says that means of rewards exclude failed samples."""

CAUSES = 10
"""Number of different causes that are reported separately. Further causes are counted together, because messages may
contain the sample's text."""

OTHER_CAUSES = "other causes"
_NUMBERS = re.compile(r"\b\d+(\.\d+)?\b")


class Failures:
    """Counts the samples that are drawn for one purpose, and stops the run when too many fail. Failed samples have no
    reward, so the mean reward does not show them. Without this check, a server that is down could look like a policy
    that learns.

    Args:
        allowed: largest share of failed samples (``stream.max_failed``). It is computed over the samples of the last
            call of :meth:`expect`. Earlier samples are added up to :data:`WINDOW`, or up to ``at_least`` of that call.
        note: reports the first failure of each cause.
        label: name of a sample in messages.
        effect: what happens to a failed sample, in messages.
        metric: the metric that shows what failures change.
    """

    def __init__(
        self,
        allowed: float,
        note: Callable[[str], None],
        label: str = "sample",
        effect: str = "is left out",
        metric: str = "reward/mean_with_failed",
    ) -> None:
        self._allowed, self._note, self._label, self._effect, self._metric = allowed, note, label, effect, metric
        self.sample_count = 0
        """Samples drawn so far by this process."""
        self.failed = 0
        """Samples that failed so far."""
        self.first = ""
        """Which sample failed first, and why."""
        self.causes: Counter[str] = Counter()
        """{cause: number of failed samples}. The cause is the error as shortened by :func:`_cause`."""
        self._recent: deque[str] = deque()
        """Cause of failure of each of the latest samples; empty for a sample that did not fail."""
        self._recent_failed = 0
        """Failed samples among them."""
        self._expected = 0
        self._noted = False

    def forget(self) -> None:
        """Exclude earlier samples from the share. Called when a new evaluation begins."""
        self._keep(0)

    def expect(self, samples: int, at_least: int = 0) -> None:
        """Announce that ``samples`` samples will be drawn now. All of them count in the share at once, so the order in
        which samples end does not decide whether the run stops.

        Args:
            at_least: the share is computed over at least this many samples, even if they are not drawn yet. A
                continuous stream announces single groups, and passes the number of samples of a batch here.
        """
        self._keep(max(0, max(WINDOW, at_least) - samples))
        self._expected = max(len(self._recent) + samples, at_least)

    def add(self, trajectory: Trajectory) -> None:
        """Record a sample that has ended. Raises RolloutError if too many samples have failed."""
        self.sample_count += 1
        failed = trajectory.status == "failed"
        self._recent.append(describe(trajectory) if failed else "")
        self._recent_failed += failed
        self._keep(self._expected)  # samples of earlier calls may end after this one
        if not failed:
            return
        self.failed += 1
        cause = _cause(trajectory.error)
        if cause not in self.causes and len(self.causes) >= CAUSES:
            cause = OTHER_CAUSES
        elif cause not in self.causes:
            rules = (
                f"\nA failed {self._label} {self._effect}. The run stops if a share of more than {self._allowed:.4g} "
                "fails (stream.max_failed). Later failures of the same cause are only counted."
            )
            self._note(f"{self._label} {describe(trajectory)}{'' if self.first else rules}")
        self.first = self.first or describe(trajectory)
        self.causes[cause] += 1
        if self._recent_failed > self._allowed * self._expected:
            causes = [cause for cause in self._recent if cause]
            latest = f"The last of them: {self._label} {causes[-1]}\n" if len(causes) > 1 else ""
            raise RolloutError(
                f"{len(causes)} of the latest {self._expected} {self._label}s failed, and stream.max_failed = "
                f"{self._allowed:.4g} is the largest share allowed.\nThe first of them: {self._label} {causes[0]}\n"
                f"{latest}Remove the cause, or raise stream.max_failed (1 never stops the run)."
            )
        if self._recent_failed > NOTED * self._expected and not self._noted:
            self._noted = True
            self._note(
                f"{self._recent_failed} of the latest {self._expected} {self._label}s failed. Mean rewards include "
                "only the others, so a policy that makes its reward fail would look better; see the metric "
                f"{self._metric}."
            )

    def _keep(self, count: int) -> None:
        """Exclude all but the latest ``count`` samples from the share."""
        while len(self._recent) > count:
            self._recent_failed -= self._recent.popleft() != ""

    def by_cause(self) -> str:
        """A line for each cause with its number of samples; empty if there are not several causes."""
        if len(self.causes) < 2:
            return ""
        lines = [f"\n  {count}: {cause}" for cause, count in self.causes.most_common()]
        return f"{self.failed} {self._label}s failed; N stands for any number:{''.join(lines)}"

    def __str__(self) -> str:
        """``3 of 64 samples failed (4.7 %)``; empty if none failed."""
        share = f"{100 * self.failed / self.sample_count:.3g} %" if self.failed else ""
        return f"{self.failed} of {self.sample_count} {self._label}s failed ({share})" if self.failed else ""


def _cause(error: str) -> str:
    """The first and the last line of the error, with ``N`` for numbers. The last line of a program's output
    distinguishes causes."""
    first, *lines = error.strip().splitlines() or [""]
    return _NUMBERS.sub("N", f"{first} ... {lines[-1].strip()}" if lines else first)


def describe(trajectory: Trajectory) -> str:
    """Which sample failed, and why."""
    row = trajectory.row
    return f"{trajectory.index[1]} of row {row.index} of {row.source!r} failed: {trajectory.error}"
