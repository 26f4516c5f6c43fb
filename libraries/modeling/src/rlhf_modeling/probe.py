"""When a model is loaded, checks which ways of computing it are correct. The reference is transformers' forward pass of
a single sequence with eager attention. A faster way must give the same hidden states. (Other attention functions omit
parts that they cannot compute: ``sdpa`` ignores Gemma 2's soft-capping of scores. A class that chooses its attention at
construction keeps the attention with which it was loaded.)

The config does not say whether packing is correct for a model. Recurrent layers carry a state from one packed sequence
into the next, some classes ignore the attention function, some build their own masks. So short sequences are computed
both ways. Every window and chunk of the model is set shorter than the sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rlhf.errors import CapabilityError, ModelError
from rlhf.interfaces import ModelSpec
from torch import Tensor, nn

from rlhf_modeling.attention import kinds_of_layers, use_attention, use_packed_attention
from rlhf_modeling.determinism import seeded
from rlhf_modeling.images.architecture import NOT_HERE
from rlhf_modeling.images.packing_check import attach_images, image_sequence, own_statement, packed_with_text
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.noise import noise_settings
from rlhf_modeling.pretrained import quiet
from rlhf_modeling.probe_rows import MOST_OFF, probe_rows, share_off, short_lengths, wrong
from rlhf_modeling.stored import in_bf16, in_fp32


def probe(model: LoadedModel, spec: ModelSpec) -> None:
    """Choose the model's layout and the scale of its logits. The weights must be whole, or gathered by hooks.

    Raises ModelError if transformers cannot compute the model from token ids alone, if a token's hidden state is not
    finite or depends on later tokens, or if the logits are not the head's logits, scaled and capped.
    """
    model.layout, model.boundaries, model.notes = "alone", False, ()
    attach_images(model, spec)
    use_attention(model.module, "eager")
    with torch.no_grad(), quiet(), short_lengths(model.module), in_fp32(model.module):
        rows = probe_rows(model)
        try:
            truth = [_hidden(model, ids) for ids in rows]
            if spec.role.trained:
                model.noisy = _draws(model, rows[1])
        except Exception as cause:  # any exception: the model's code is not ours
            raise ModelError(
                f"{_name(model, spec)} cannot be computed by transformers from token ids alone "
                f"({type(cause).__name__}: {cause}). Use another decoder-only model."
            ) from cause
        if not all(bool(hidden.isfinite().all()) for hidden in truth):
            raise ModelError(
                f"{_name(model, spec)} computes hidden states that are not finite numbers: its weights are damaged, or "
                "contain NaN or infinity. Use another checkpoint of this model."
            )
        if wrong(_hidden(model, rows[1][:8]), truth[1][:8]):
            raise ModelError(
                f"{_name(model, spec)} is not causal: the hidden states of a token depend on later tokens, so its "
                "log-probs would see the answer. Use a decoder-only model (for BERT, set is_decoder in its config)."
            )
        if model.kind == "lm" and not find_logit_scale(model, rows[2], truth[2]):  # few tokens: these are whole logits
            raise ModelError(
                f"{_name(model, spec)} does more to its logits than a linear head, a factor from its config and a soft "
                "cap; its log-probs would be wrong here, so it is refused."
            )
        image_truth = _image_truth(model, rows)
        reason = _choose(model, rows, torch.cat(truth))
        if model.layout == "alone":
            _choose_attention(model, rows, torch.cat(truth))
        if image_truth is not None:
            _check_images(model, rows, image_truth)
    if spec.images and model.images is None:
        raise ModelError(f"the data have images, but {_name(model, spec)} {model.no_images}.")
    if in_bf16(model.module):
        _require_storage(model, spec, rows[0])
    _write_notes(model, spec, reason)


@torch.no_grad()
def _require_storage(model: LoadedModel, spec: ModelSpec, ids_T: Tensor) -> None:
    """Raises CapabilityError if the model's code cannot compute with weights that are stored in bf16."""
    try:
        with torch.autocast(ids_T.device.type, torch.bfloat16):
            _hidden(model, ids_T)
    except Exception as cause:  # any exception: the model's code is not ours
        raise CapabilityError(
            f"{_name(model, spec)} cannot be computed with weights in bf16 ({type(cause).__name__}: {cause}). Set "
            "storage = 'fp32' for this role."
        ) from cause


def _name(model: LoadedModel, spec: ModelSpec) -> str:
    return f"{type(model.module).__name__} ({spec.path!r}, role {spec.role.name!r})"


def _hidden(model: LoadedModel, ids_T: Tensor) -> Tensor:
    """fp32 [T, H]."""
    return model.hidden(ids_T, torch.arange(len(ids_T), device=ids_T.device), [len(ids_T)]).float()


# ------------------------------------------------------------------------------------------------ layouts


def _choose(model: LoadedModel, rows: list[Tensor], want_NH: Tensor) -> str:
    """Set the fastest layout that gives ``want_NH``. Returns why faster layouts do not; empty if the fastest one
    does."""
    ids_N, lens = torch.cat(rows), [len(ids) for ids in rows]
    position_N = torch.cat([torch.arange(n, device=ids_N.device) for n in lens])
    reason = ""
    for boundaries in (False, True):
        model.layout, model.boundaries = "packed", boundaries
        with kinds_of_layers() as kinds:
            problem = _attempt(model, lambda: model.hidden(ids_N, position_N, lens), want_NH)
        if not problem:
            model.layers = frozenset(kinds)
            break
        reason = reason or problem
    else:
        model.layout, model.boundaries = "alone", False
        return reason
    if model.boundaries:
        return reason

    def sharing() -> Tensor:
        hidden_MH, place_N = model.compute(ids_N, position_N, lens, share=True)
        assert place_N is not None
        return hidden_MH[place_N]

    model.layout = "shared"
    if reason := _attempt(model, sharing, want_NH):
        model.layout = "packed"
    return reason


def _choose_attention(model: LoadedModel, rows: list[Tensor], want_NH: Tensor) -> None:
    """Set ``sdpa`` if the model accepts it and it is correct, else eager attention.

    Raises ModelError if sequences of equal length in one call give other hidden states than each sequence alone.
    """
    ids_N, lens = torch.cat(rows), [len(ids) for ids in rows]
    if use_attention(model.module, "sdpa") and not wrong(model.hidden(ids_N, ids_N, lens), want_NH):
        return
    use_attention(model.module, "eager")
    share = share_off(model.hidden(ids_N, ids_N, lens), want_NH)
    if share > MOST_OFF:
        raise ModelError(
            f"{type(model.module).__name__} computes different hidden states for sequences of equal length in one call "
            f"than for each sequence alone ({share:.0%} of a probe's tokens). Use another model."
        )


def _image_truth(model: LoadedModel, rows: list[Tensor]) -> Tensor | None:
    """fp32 [T, H] of a sequence with an image, by the model's own forward pass. None if the model reads no images."""
    if model.images is None:
        return None
    try:
        return own_statement(model, *image_sequence(model, rows))
    except Exception as cause:  # any exception: the model's code is not ours
        model.images, model.no_images = None, f"cannot be computed with images by transformers ({_describe(cause)})"
        return None


def _check_images(model: LoadedModel, rows: list[Tensor], want_TH: Tensor) -> None:
    """Unset :attr:`LoadedModel.images` if a sequence with an image gets other hidden states in a row with other
    sequences."""
    try:
        hidden = packed_with_text(model, rows, *image_sequence(model, rows))
        share = max(share_off(got_TH, want_TH) for got_TH in hidden)
        reason = f"{share:.0%} of a probe's tokens get different hidden states" if share > MOST_OFF else ""
    except Exception as cause:  # any exception: the model's code is not ours
        reason = _describe(cause)
    if reason:
        model.images = None
        model.no_images = NOT_HERE.format(reason)


def _attempt(model: LoadedModel, compute: Callable[[], Tensor], want_NH: Tensor) -> str:
    """What is wrong with ``compute`` under packed attention; empty if it is correct."""
    try:
        use_packed_attention(model.module)
        share = share_off(compute(), want_NH)
    except Exception as cause:  # any exception: some classes of transformers expect other arguments or shapes
        return _describe(cause)
    return f"{share:.0%} of a probe's tokens get different hidden states" if share > MOST_OFF else ""


def _describe(cause: Exception) -> str:
    text = str(cause).split("\n")[0]
    return text if isinstance(cause, ModelError) else f"{type(cause).__name__}: {text}"


# ------------------------------------------------------------------------------------------------- noise


def _draws(model: LoadedModel, ids_T: Tensor) -> bool:
    """Whether the model draws random numbers in training, so that two seeds give different results."""
    training = [part for part in model.module.modules() if part.training]
    model.module.train()

    def hidden(seed: int) -> Tensor:
        with seeded(seed, ids_T.device):
            return _hidden(model, ids_T)

    try:
        first = hidden(0)
        # The third pass excludes differences that do not come from the seed, such as the order of sums on a GPU.
        return not torch.equal(first, hidden(1)) and torch.equal(first, hidden(0))
    finally:
        _evaluate(model.module, training)


def _evaluate(module: nn.Module, training: list[nn.Module]) -> None:
    module.eval()
    for part in training:
        part.training = True


def _write_notes(model: LoadedModel, spec: ModelSpec, reason: str) -> None:
    notes, name = [], type(model.module).__name__
    if model.layout == "alone":
        notes.append(
            f"{name} cannot be computed packed ({reason}). Sequences of each length are computed in a separate call: "
            "the numbers are the same, but this is slower."
        )
    elif model.layout == "packed" and not model.boundaries:
        notes.append(f"{name}: a prefix that sequences share is computed separately for each of them ({reason}).")
    if model.noisy and (noise := noise_settings(model.module)):
        settings = ", ".join(f"{key} = {value:g}" for key, value in noise.items())
        notes.append(
            f"{name} draws noise while it is trained ({settings} in its config): gradients depend on how batches are "
            "divided into micro-batches, and prefixes that sequences share are computed separately for each of them."
        )
    model.notes = tuple(f"{spec.role.name}: {note}" for note in notes)


def find_logit_scale(model: LoadedModel, ids_T: Tensor, hidden_TH: Tensor) -> bool:
    """Set ``loaded.logit_scale``. Unset ``softcap`` if the config has one that the model's class does not apply (such
    as LLaVA with a text part that has one). Returns False if no factor turns the head's logits into the model's logits,
    or if the head reads something other than the hidden states.

    Args:
        hidden_TH: the body's hidden states of ``ids_T``.
    """
    if model.head.in_features != hidden_TH.shape[-1]:
        return False
    want_TV = model.module(input_ids=ids_T[None], use_cache=False).logits[0].float()
    for cap in dict.fromkeys((model.softcap, None)):
        model.softcap, model.logit_scale = cap, 1.0
        if not _is_close(model.logits(hidden_TH), want_TV):
            model.logit_scale = _nearest_of_config(model, hidden_TH, want_TV)
        if _is_close(model.logits(hidden_TH), want_TV):
            return True
    return False


def _nearest_of_config(model: LoadedModel, hidden_TH: Tensor, want_TV: Tensor) -> float:
    """The number in the config, or the inverse of one, that is closest to the measured factor."""
    plain_TV, cap = model.head(hidden_TH).float(), model.softcap
    if cap is not None:
        # Inverts the cap. At the cap itself the inverse is infinite.
        want_TV = cap * torch.atanh((want_TV / cap).clamp(-0.999999, 0.999999))
    fitted = float((plain_TV * want_TV).sum() / (plain_TV * plain_TV).sum())
    config = model.module.config.get_text_config().to_dict()
    numbers = [float(v) for v in config.values() if isinstance(v, int | float) and v]
    return min((scale for v in numbers for scale in (v, 1 / v)), key=lambda scale: abs(scale - fitted), default=1.0)


def _is_close(got_TV: Tensor, want_TV: Tensor) -> bool:
    return got_TV.shape == want_TV.shape and torch.allclose(got_TV.float(), want_TV, rtol=1e-4, atol=1e-4)
