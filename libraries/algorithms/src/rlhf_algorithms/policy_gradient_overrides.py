"""Options of a policy-gradient algorithm that have no effect if a subclass replaces the method that applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_algorithms.policy_gradient_config import PolicyGradientConfig

IS_SET: Mapping[str, Callable[[PolicyGradientConfig], bool]] = {
    "kl.coef": lambda c: c.kl.coef > 0 and c.kl.where == "reward",
    "kl.target": lambda c: c.kl.target is not None,
    "kl.snapshot_every": lambda c: c.kl.snapshot_every is not None,
    "entropy.target": lambda c: c.entropy.target is not None,
    "shaping": lambda c: bool(c.shaping.shapers()),
    "reward_clip": lambda c: c.reward_clip is not None,
    "bootstrap_truncated": lambda c: c.bootstrap_truncated,
    "normalise_values": lambda c: c.normalise_values,
    "mask_truncated": lambda c: c.mask_truncated,
    "echo_coef": lambda c: c.echo_coef is not None,
    "epochs": lambda c: c.epochs > 1,
    "minibatches": lambda c: c.minibatches > 1,
    "critic_warmup": lambda c: c.critic_warmup > 0,
    "teacher.coef": lambda c: c.teacher.coef > 0,
    "teacher.weights": lambda c: c.teacher.weights == "averaged",
}
"""{option: whether a config sets it}. KL in the loss is not listed, because it is a term of the loss."""
_STAGES = ("kl.coef", "shaping", "reward_clip", "bootstrap_truncated")
APPLIED_BY: Mapping[str, tuple[str, ...]] = {
    "credit": (*_STAGES, "normalise_values", "mask_truncated", "kl.target", "teacher.coef"),
    "stages": _STAGES,
    "updates": ("epochs", "minibatches", "critic_warmup", "kl.snapshot_every", "entropy.target", "teacher.weights"),
    "assemble": ("echo_coef",),
    "finish": ("kl.target", "entropy.target"),
}
"""{method of PolicyGradient: options that it applies}."""


def check_overrides(cls: type[Any], base: type[Any], config: PolicyGradientConfig) -> None:
    """Raises ConfigError if an option is set that an overridden method of ``base`` applies, unless the override calls
    ``super()`` or its class names the option in ``applies``."""
    for owner in _up_to(cls, base):
        if unknown := sorted(set(vars(owner).get("applies", ())) - IS_SET.keys()):
            raise ConfigError(f"{owner.__name__}.applies names {unknown}; there are {', '.join(IS_SET)}")
    for method, options in APPLIED_BY.items():
        replaced = _replaced(cls, base, method)
        if replaced is None:
            continue
        owner, stated = replaced
        lost = [option for option in options if IS_SET[option](config) and option not in stated]
        if lost:
            raise ConfigError(
                f"algorithm.{', algorithm.'.join(lost)}: set, but {owner.__name__}.{method}() of algorithm "
                f"{cls.name!r} replaces the method that applies {'it' if len(lost) == 1 else 'them'}, without effect. "
                f"Leave it out. If the override applies it, its author writes {owner.__name__}.applies = {tuple(lost)}."
            )


def replaces(cls: type[Any], base: type[Any], method: str) -> bool:
    """Whether an override of the base's method does not call it."""
    return _replaced(cls, base, method) is not None


def _replaced(cls: type[Any], base: type[Any], method: str) -> tuple[type[Any], tuple[str, ...]] | None:
    """The class whose override replaces the base's method, and the options that it and its subclasses declare to apply;
    None if the method of ``base`` is used."""
    stated: tuple[str, ...] = ()
    for owner in _up_to(cls, base):
        stated += tuple(vars(owner).get("applies", ()))
        own = vars(owner).get(method)
        if own is not None and not _calls_base(own, method):
            return owner, stated
    return None


def _up_to(cls: type[Any], base: type[Any]) -> Iterator[type[Any]]:
    for owner in cls.__mro__:
        if owner is base:
            return
        yield owner


def _calls_base(function: Any, method: str) -> bool:
    """Whether the code contains the names ``super`` and the method, as in ``super().credit(batch)``."""
    names = function.__code__.co_names if isinstance(function, FunctionType) else ()
    return "super" in names and method in names
