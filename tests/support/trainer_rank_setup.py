"""What the cases of trainers of several ranks need: options, models, and a trainer of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from rlhf.interfaces import ModelSpec
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.suite_losses import TokenLoss
from rlhf_testing.tiny import tiny_model

from tests.support.rank_batches import batch, spec
from tests.support.rank_case import RankCases
from tests.support.tiny_architectures import tiny_architecture
from tests.support.token_parts import CASES as ROWS
from tests.support.token_parts import make_models

Options = Mapping[str, Any]
OF_ROLE = ("gradient_checkpointing", "dtype", "storage")
"""Options of variants and of images that belong to the role, not to the trainer."""
DORA: dict[str, Any] = {"rank": 4, "use_dora": True, "use_rslora": True, "modules_to_save": ("lm_head",)}
FAMILY = "qwen3_vl"


def parted(options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the role, and those of the trainer."""
    of_role = {key: value for key, value in options.items() if key in OF_ROLE}
    return of_role, {key: value for key, value in options.items() if key not in OF_ROLE}


class TrainerRankSetup(RankCases):
    """The options of :class:`tests.support.trainer_rank_cases.TrainerRankCases`."""

    make: ClassVar[Callable[..., Any]]
    """``make(spec, **options)``: the trainer under test. Set a ``staticmethod``."""
    layouts: Mapping[str, Options] = {"default": {}}
    """Ways in which the trainer divides a model, by name: options for ``make``."""
    default_layout: str = "default"
    """The layout of the checkpoint that one rank saves, and of cases that need no particular one."""
    only: Mapping[str, Sequence[str]] = {}
    """{case: the layouts in which it runs}; the other cases run in every layout. An empty tuple leaves a case out."""
    variants: Mapping[str, Options] = {}
    """Options that must change no number, by name; those in :data:`OF_ROLE` are the role's."""
    images: Mapping[str, Options] = {}
    """Options of the cases with an image-text model, by name."""
    rows: Mapping[str, str] = {}
    """{case of :mod:`tests.support.token_parts`: its layout}; the others have the last layout."""
    rows_on_four: Sequence[str] = ("tokens", "short rows")
    """The cases of :mod:`tests.support.token_parts` that four ranks run."""
    export_options: Options = {}
    """Options of the case ``export``."""

    def facts(self, of: Any) -> dict[str, Any]:
        """Further numbers of the trainers of the cases ``equal`` and ``frozen``, for tests of your own."""
        return {}

    def gathering(self, of: Any) -> AbstractContextManager[list[int]]:
        """A context with a list, to which each gathering of divided tensors adds the number of whole elements."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------- preparations

    @classmethod
    def values(cls, parameter: str, case: str) -> Iterable[str]:
        if not cls.only.get(case, True):
            return ()
        return {
            "layout": cls.only.get(case, tuple(cls.layouts)),
            "variant": tuple(cls.variants),
            "image": tuple(cls.images),
            "row": tuple(cls.rows_on_four if case == "four" else ROWS),
            "parts": ("2", "4"),
        }[parameter]

    @classmethod
    def prepare(cls, folder: Path) -> None:
        tiny_model(folder / "model", std=0.2)
        tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
        tiny_model(folder / "lender", std=0.2, seed=7, hidden=48, heads=4)
        make_models(folder)
        tiny_architecture(folder / "recurrent", "qwen3_next")
        tiny_image_model(folder / "images", FAMILY)
        trainer = cls.make(spec(folder), **cls.layouts[cls.default_layout], ema_decay=0.9)
        for number in range(2):
            trainer.update([batch(number)], TokenLoss(), {}, {})
        trainer.save(folder / "from_one")

    def trainer(self, layout: str, of: ModelSpec | None = None, **options: Any) -> Any:
        """A trainer of this rank, by default of the policy."""
        return self.make(of or self.here(), **{**self.layouts[layout], **options})
