"""The curriculum suite passes a well-made curriculum and names the rule that a broken one breaks."""

from __future__ import annotations

import math
import random

import pytest
from rlhf.errors import ConfigError
from rlhf.interfaces import Curriculum
from rlhf_testing.contract import Nonconformance
from rlhf_testing.curriculum import CurriculumContract


class Hardest(Curriculum):
    """The complete example of the interface."""

    name = "hardest"
    min_scores = 1

    def setup(self, rows, seed, total_steps):
        self.means = [-math.inf] * len(rows)

    def choose(self, n, step):
        lowest = sorted(range(len(self.means)), key=self.means.__getitem__)
        return [lowest[i % len(lowest)] for i in range(n)]

    def finished(self, groups):
        for group in groups:
            if group.scores:
                self.means[group.row] = sum(group.scores) / len(group.scores)

    def state_dict(self):
        return {"means": [m if math.isfinite(m) else None for m in self.means]}

    def load_state_dict(self, state):
        self.means = [-math.inf if m is None else m for m in state["means"]]


class Counted(Curriculum):
    """Row after row."""

    name = "counted"

    def setup(self, rows, seed, total_steps):
        self.rows, self.drawn = len(rows), 0

    def choose(self, n, step):
        self.drawn += n
        return [i % self.rows for i in range(self.drawn - n, self.drawn)]

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


class TooFew(Counted):
    """Gives one row whatever is asked for."""

    def choose(self, n, step):
        return super().choose(1, step)


class Unknown(Counted):
    """Gives the number of rows as a position."""

    def choose(self, n, step):
        return [self.rows] * n


class Names(Counted):
    """Gives texts."""

    def choose(self, n, step):
        return ["one"] * n


class SmallBatches(Counted):
    """Ends with the data."""

    def choose(self, n, step):
        return super().choose(min(n, self.rows), step)


class Chance(Counted):
    """Draws from the global generator."""

    def choose(self, n, step):
        return random.choices(range(self.rows), k=n)


class Forgets(Counted):
    """Keeps no state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class ForgetsTheBatch(Counted):
    """Does not save where the unfinished batch began."""

    def choose(self, n, step):
        if step != getattr(self, "step", None):
            self.step, self.began = step, self.drawn
        self.drawn += n
        return [(self.began + i) % self.rows for i in range(self.drawn - n, self.drawn)]


class NotJson(Counted):
    """Has a set in its state."""

    def state_dict(self):
        return {"drawn": {self.drawn}}


class KeyedByRow(Counted):
    """Has a dict by row in its state, which comes back with texts as keys."""

    def setup(self, rows, seed, total_steps):
        super().setup(rows, seed, total_steps)
        self.times = {}

    def choose(self, n, step):
        chosen = super().choose(n, step)
        self.times |= dict.fromkeys(chosen, step)
        return chosen

    def state_dict(self):
        return super().state_dict() | {"times": self.times}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.times = state["times"]


class ReadsInSecret(Hardest):
    """Reads scores, and says that it does not."""

    min_scores = 0


class NeedsScores(Hardest):
    """Fails where a group has no scores."""

    def finished(self, groups):
        for group in groups:
            self.means[group.row] = sum(group.scores) / len(group.scores)


class ReportsText(Counted):
    """Reports a text."""

    def metrics(self):
        return {"level": "hard"}


class Prefixed(Counted):
    """Puts the prefix before its metrics itself."""

    def metrics(self):
        return {"curriculum/level": 1.0}


class Columns(Counted):
    """Reads a column."""

    def setup(self, rows, seed, total_steps):
        super().setup(rows, seed, total_steps)
        self.levels = list(rows.values("level"))


class Large(Counted):
    """Refuses small data."""

    def setup(self, rows, seed, total_steps):
        if len(rows) < 100:
            raise ConfigError("at least 100 rows are needed")
        super().setup(rows, seed, total_steps)


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (TooFew, "rows", r"choose\(4, 0\) gave 1 rows; exactly 4 are needed"),
        (Unknown, "rows", r"chose \[17, 17, 17, 17, 17\]; the data has the positions 0 to 16"),
        (Names, "rows", r"choose\(\) gave 'one' \(str\); a position is an integer"),
        (SmallBatches, "large_batch", "of 17 rows gave 17. Repeat rows in a batch that is larger than the data"),
        (
            Chance,
            "reproducible",
            "chose different rows in a second run with the same seed: .* at step 0. Derive random",
        ),
        (
            Forgets,
            "resume",
            r"chose different rows after a resume at step 1 with staleness 0: \[.*\] and \[.*\] at step 1",
        ),
        (ForgetsTheBatch, "resume_inside_a_batch", "for the rest of a batch after a resume in its middle"),
        (NotJson, "resume", r"state_dict\(\) must hold JSON values only"),
        (KeyedByRow, "resume", r"has a dict with keys that are not strings"),
        (ReadsInSecret, "scores", "chose different rows for different scores: .* Set min_scores = 1"),
        (NeedsScores, "rows", "raised ZeroDivisionError: division by zero"),
        (ReportsText, "metrics", r"metrics\(\) has level = 'hard' \(str\); allowed is a finite number"),
        (Prefixed, "metrics", "has the name 'curriculum/level'; `curriculum/` is added to it"),
        (Columns, "rows", "they lack the column 'level'. Supply what it reads: conformance = "),
        (Large, "rows", ": at least 100 rows are needed. Supply what it reads"),
    ],
)
def test_a_broken_curriculum_fails_the_right_check(cls, check, message):
    suite = type("Broken", (CurriculumContract,), {"curriculum": cls, "registered": False})()
    with pytest.raises(Nonconformance, match=message):
        getattr(suite, f"test_{check}")()


def test_the_suite_makes_up_the_columns_and_the_data_that_an_author_names():
    attributes = {"columns": {"level": (1, 2)}, "registered": False}
    type("Given", (CurriculumContract,), {"curriculum": Columns, **attributes})().test_rows()
    type("Given", (CurriculumContract,), {"curriculum": Large, "sizes": {"a": 50, "b": 50}, **attributes})().test_rows()
