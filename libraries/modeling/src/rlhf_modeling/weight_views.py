"""The views of a role's weights: the live weights, their moving average, and the initial model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

from rlhf.errors import CapabilityError, TrainingError
from rlhf.interfaces import HasViews, ModelSpec
from rlhf.interfaces.model import ADAPTERS, PARTS
from rlhf_hub.adapter_folders import adapter_of

from rlhf_modeling.adapters import without_adapters
from rlhf_modeling.config import LoraOptions, TrainingConfig
from rlhf_modeling.ema import SecondValues

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightViews(HasViews):
    """The part of a trainer that computes with other values of its weights."""

    config: TrainingConfig
    spec: ModelSpec
    module: PreTrainedModel
    average: SecondValues | None = None
    """The moving average of the weights, if ``ema_decay`` is set."""
    first: SecondValues | None = None
    """The initial weights, if the view ``base`` needs them."""
    _active_view: ExitStack

    @property
    def has_adapters(self) -> bool:
        return self.spec.role.trained and self.config.lora is not None

    def require_replaceable(self) -> None:
        """Raises TrainingError if the model's weights cannot be replaced by those of another model."""
        if self.has_adapters:
            raise TrainingError(f"role {self.spec.role.name!r} trains adapters; its weights cannot be replaced")
        if self.config.quantization is not None:
            raise TrainingError(
                f"role {self.spec.role.name!r} has trainer.quantization = {self.config.quantization!r}; quantised "
                "weights cannot be replaced. Remove it, or the algorithm's option that copies weights to the role."
            )

    @property
    def keeps_first_weights(self) -> bool:
        """Whether the view ``base`` needs the initial values of weights that are trained in place, and of adapters from
        an earlier training."""
        lora = self.config.lora
        return self.has_adapters and lora is not None and bool(lora.modules_to_save or self.continues_adapter)

    @cached_property
    def continues_adapter(self) -> bool:
        """Whether the role's adapters come from the folder that it starts from."""
        return self.has_adapters and adapter_of(self.spec.path) is not None

    def exported_adapters(self, view: str) -> LoraOptions | None:
        """The options of the adapters that an export of the view writes beside the merged model; None if it writes
        none. Adapters of quantised weights would give a different model on the original weights."""
        lora = self.config.lora if self.merges(view) else None
        return lora if lora is not None and lora.quantization is None else None

    def merges(self, view: str) -> bool:
        """Whether weights of the view have the adapters added."""
        return self.has_adapters and view not in (ADAPTERS, PARTS) and (view != "base" or self.continues_adapter)

    @property
    def views(self) -> tuple[str, ...]:
        """:attr:`rlhf.interfaces.TrainerFacts.views`."""
        return ("live", *(("ema",) if self.average is not None else ()), *(("base",) if self.has_adapters else ()))

    def use_view(self, view: str) -> None:
        self._active_view.close()
        self.current_view = "live"
        if view != "live":
            self._active_view.enter_context(self._view(view))
        self.current_view = view

    def _view(self, view: str) -> AbstractContextManager[None]:
        """Context in which the module computes with a view of the weights. Raises CapabilityError if the view does not
        exist."""
        if view == "live" or (view in (ADAPTERS, PARTS) and self.has_adapters):
            return nullcontext()
        if view == "ema" and self.average is not None:
            return self.average.swapped_in()
        if view == "base" and self.has_adapters:
            return self._base()
        reasons = {"ema": "ema_decay is not set", "base": "lora is not set, so it has no adapters"}
        reason = reasons.get(view, "it is not known")
        raise CapabilityError(f"role {self.spec.role.name!r} has no view {view!r}: {reason}. Views: live, ema, base.")

    @contextmanager
    def _base(self) -> Iterator[None]:
        """The initial model: without adapters that were new then, and with the initial values of weights that are
        trained in place."""
        plain = nullcontext() if self.continues_adapter else without_adapters(self.module)
        with plain, nullcontext() if self.first is None else self.first.swapped_in():
            yield
