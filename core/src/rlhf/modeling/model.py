"""Loading a role's model: the body that gives hidden states and the head beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.modeling.adapters import LoraOptions, add_adapters
from rlhf.modeling.attention import packed, use_packed_attention
from rlhf.modeling.kernels import Kernels, use_kernels
from rlhf.modeling.pretrained import EXPECTED, quiet, read
from rlhf.ops.heads import OutputHead
from rlhf.seeds import derive_seed


@dataclass(slots=True)
class LoadedModel:
    """A role's model taken apart: ``body`` gives hidden states, ``head`` maps them to logits or scalars."""

    module: PreTrainedModel
    body: nn.Module
    head: nn.Linear
    kind: str
    """``lm`` | ``scalar`` | ``classes:N``."""
    softcap: float | None = None
    """Gemma 2's ``final_logit_softcapping``: logits become ``softcap * tanh(logits / softcap)``."""
    attention: str = "auto"
    """``auto`` | ``sdpa`` | ``flash``: the kernel on a GPU."""
    fresh_head: bool = False
    """The checkpoint has no head of this kind (a causal language model under a scalar role): :func:`draw_head`."""
    positions: int | None = None
    """Positions that have a learned embedding, where the model has such (GPT-2, OPT): no sequence is longer."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: token ids are below it."""
        embedding: Any = self.module.get_input_embeddings()
        return int(embedding.num_embeddings)

    def require_positions(self, lens: Sequence[int]) -> None:
        """Raises ModelError where a sequence is longer than the model's positions."""
        if self.positions is not None and max(lens) > self.positions:
            raise ModelError(
                f"a sequence has {max(lens)} tokens, but the model has learned embeddings for {self.positions} "
                f"positions only. Set data.max_tokens = {self.positions} or less."
            )

    def hidden(self, ids_N: Tensor, position_N: Tensor, lens: list[int]) -> Tensor:
        """[N, hidden] of packed sequences; ``use_cache=False`` always, whatever the model's config says."""
        with packed(lens, kernel=self.attention):
            out = self.body(input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)
        return out.last_hidden_state[0]

    @property
    def output_head(self) -> OutputHead:
        """The head by itself; it shares memory with the model, whose head must be whole."""
        bias = self.head.bias
        return OutputHead(self.head.weight.detach(), None if bias is None else bias.detach(), self.softcap)

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """[C, vocabulary] or [C, outputs of the head], in the precision of ``hidden_CH``."""
        logits_CV = self.head(hidden_CH)
        if self.softcap is not None:
            logits_CV = self.softcap * torch.tanh(logits_CV / self.softcap)
        return logits_CV


def load_model(
    spec: ModelSpec,
    device: torch.device,
    lora: LoraOptions | None = None,
    divided: bool = False,
    kernels: Kernels = "auto",
) -> LoadedModel:
    """Load ``spec.path`` as the role's kind of model: fp32 weights, evaluation mode, packed attention.

    A scalar or classes head that the checkpoint does not have (a causal language model) is fresh: normal with standard
    deviation 1 / (hidden + 1), no bias, seeded by ``(spec.seed, "head", role)``. With ``lora`` the linear layers get
    adapters, which change nothing at first.

    ``divided``: the caller divides each weight over ranks as it is read (in a context that transformers knows), so what
    needs whole weights is left to it: :func:`draw_head`, :func:`check_head`, adapters and ``kernels``.

    Raises: ModelError where the path is missing or unreadable, weights are missing or of another shape, or the model
    is of a kind that packing or the separate head cannot represent.
    """
    kind = spec.role.head
    auto, from_lm = model_class(spec, read(spec, "model", AutoConfig.from_pretrained))
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "use_safetensors": True}
    if from_lm:
        options["num_labels"] = _outputs(kind)
    with torch.random.fork_rng(devices=[]), quiet():  # what the checkpoint lacks is drawn, not from our state
        module, info = read(spec, "model", auto.from_pretrained, **options)
    require_weights(spec, type(module), info, from_lm)
    use_packed_attention(module)
    loaded = _take_apart(module, kind, spec)
    loaded.fresh_head = from_lm
    loaded.positions = _learned_positions(module)
    if divided:
        module.eval().to(device)
        return loaded
    if from_lm:
        draw_head(loaded, spec)
    if lora is not None:
        add_adapters(module, loaded.head, lora, derive_seed(spec.seed, "lora/" + spec.role.name))
    module.eval().to(device)
    if kind == "lm":
        check_head(loaded, spec)
    use_kernels(loaded, kernels)
    return loaded


def model_class(spec: ModelSpec, config: Any) -> tuple[Any, bool]:
    """(the class of transformers that loads the role's kind of model, whether its head is not in the checkpoint).

    Args:
        config: the model's.

    Raises ModelError where the model is of another kind than the role, and where a role that is not trained would get a
    fresh head: nothing would ever train it.
    """
    kind, outputs, architectures = spec.role.head, _outputs(spec.role.head), config.architectures or ()
    classifies = [a for a in architectures if "Classification" in a]
    if outputs is None:
        if classifies:  # with a tied head it would load without a word
            raise ModelError(
                f"the model {spec.path!r} of role {spec.role.name!r} is a {classifies[0]}, which writes no text, but "
                "the role needs a language model. Name the language model that it was made from."
            )
        return AutoModelForCausalLM, False
    if classifies and config.num_labels != outputs:
        raise ModelError(
            f"the model {spec.path!r} of role {spec.role.name!r} has {config.num_labels} labels, but the role's head "
            f"is {kind!r} ({outputs}). Name a model with {outputs}, or a causal language model to start a fresh head."
        )
    if not classifies and not spec.role.trained:
        raise ModelError(
            f"the model {spec.path!r} of role {spec.role.name!r} is a {', '.join(architectures) or config.model_type}, "
            f"which has no trained {kind!r} head, and this run does not train the role: what it says would be random. "
            f"Name a sequence-classification model with {outputs} label{'s' * (outputs != 1)}."
        )
    return _classification(architectures), not classifies


def require_weights(spec: ModelSpec, model: type, info: Mapping[str, Any], from_lm: bool) -> None:
    """Raises ModelError where the checkpoint lacks weights.

    Args:
        model: the class that was loaded.
        info: what transformers tells of it (``output_loading_info``).
        from_lm: its head is not in the checkpoint.
    """
    missing = sorted(info["missing_keys"])
    if from_lm:
        missing = [name for name in missing if not name.startswith("score.")]
    damaged = missing or sorted(str(m) for m in info["mismatched_keys"])
    if damaged:
        raise ModelError(
            f"the model {spec.path!r} of role {spec.role.name!r} lacks {len(damaged)} weights of a "
            f"{model.__name__} or has them in another shape, e.g. {damaged[0]!r}. {EXPECTED}"
        )


def _learned_positions(module: PreTrainedModel) -> int | None:
    """By the table of embeddings, beside that of tokens, with a row for each position (OPT's has two before them)."""
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    tables = (m for m in module.modules() if isinstance(m, nn.Embedding) and m is not module.get_input_embeddings())
    sizes = {int(table.num_embeddings) for table in tables}
    return positions if positions and sizes & {positions, positions + 2} else None


def draw_head(loaded: LoadedModel, spec: ModelSpec) -> None:
    """Give a fresh head its weights; they must be whole."""
    head = loaded.head
    generator = torch.Generator().manual_seed(derive_seed(spec.seed, "head/" + spec.role.name))
    with torch.no_grad():
        head.weight.copy_(
            torch.empty(head.weight.shape).normal_(0.0, 1.0 / (head.in_features + 1), generator=generator)
        )
        if head.bias is not None:
            head.bias.zero_()


def check_head(loaded: LoadedModel, spec: ModelSpec) -> None:
    """Refuse models that scale or shift their logits in a way this module does not know."""
    device = loaded.head.weight.device
    ids_N = torch.arange(4, device=device) % loaded.head.out_features
    position_N = torch.arange(4, device=device)
    with torch.no_grad():
        ours_NV = loaded.logits(loaded.hidden(ids_N, position_N, [4]))
        with packed([4]):
            out = loaded.module(input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)
    if not torch.allclose(ours_NV, out.logits[0], rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"{type(loaded.module).__name__} ({spec.path!r}) does more to its logits than a linear head and "
            "final_logit_softcapping; its log-probs would be wrong here, so it is refused"
        )


def _classification(architectures: Sequence[str]) -> Any:
    """The same body and a linear head named ``score`` either way; that of a token-classification model has a bias."""
    tokens = any("TokenClassification" in name for name in architectures)
    return AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification


def _outputs(kind: str) -> int | None:
    """Outputs of the head; None for a language model."""
    if kind == "lm":
        return None
    if kind == "scalar":
        return 1
    name, _, count = kind.partition(":")
    if name == "classes" and count.isdecimal() and int(count) > 0:
        return int(count)
    raise ModelError(f"head {kind!r} is not known: use 'lm', 'scalar' or 'classes:N' with N > 0")


def _take_apart(module: PreTrainedModel, kind: str, spec: ModelSpec) -> LoadedModel:
    body = getattr(module, module.base_model_prefix, None)
    head = module.get_output_embeddings() if kind == "lm" else getattr(module, "score", None)
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(module).__name__} ({spec.path!r}, role {spec.role.name!r}) is not a body with one linear "
            f"{'language-model head' if kind == 'lm' else 'head named score'}; use a decoder-only architecture"
        )
    softcap = getattr(module.config, "final_logit_softcapping", None) if kind == "lm" else None
    return LoadedModel(module, body, head, kind, softcap)
