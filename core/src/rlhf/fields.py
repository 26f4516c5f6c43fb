"""Types of fields of a config. (:mod:`rlhf.paths` has the same checks without pydantic, for the command line.)"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from rlhf.paths import check_path

PathText = Annotated[str, AfterValidator(check_path)]
"""A path that the system can look up, or a hub name, because a hub name is looked up as a path first."""
