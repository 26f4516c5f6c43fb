"""State of the sampled rows: one tensor entry per slot, so that a step is a few vector operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rlhf.errors import ModelError
from rlhf.ops.experts import record_of
from rlhf.types import ExpertLayers, Finish, GenerationRequest, Turn
from rlhf_modeling.stop_strings import StopScanner
from torch import Tensor

from rlhf_plugin_local.token_sampling import Draw, Uniforms, draw

COLUMNS = 64
"""Initial number of steps that fit into the tensors. It is doubled when a row needs more."""


@dataclass(slots=True)
class SampleRow:
    """A row on the host. Its number of steps is the difference of two step counts, so nothing is read back from the
    device."""

    index: int
    """Index of the request in the call."""
    request: GenerationRequest
    uniforms: Uniforms
    scanner: StopScanner | None
    born: int
    """``SampleRows.clock`` when the row's first token was sampled."""
    choices_TLK: np.ndarray | None = None
    """The experts of the prompt's tokens, if they are recorded."""


class SampleRows:
    """Slots 0 .. ``used - 1``. A slot's ``row`` is None after its row finished; the slot is still computed, and
    ignored, until compaction or admission reuses it."""

    _MOVED = (
        "position", "delta", "step", "limit", "last", "alive", "stop_ids", "tokens", "logprobs", "uniforms", "experts",
    )  # fmt: skip

    def __init__(
        self,
        size: int,
        stop_ids: int,
        vocabulary: int,
        eos: Sequence[int],
        decode: Callable,
        device: torch.device,
        layers: ExpertLayers | None = None,
    ) -> None:
        """``size``: largest number of slots. ``stop_ids``: largest number of end and stop tokens of a request.
        ``layers``: the experts that are recorded."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.vocabulary, self.eos, self.decode, self.device = vocabulary, tuple(eos), decode, device
        self.rows: list[SampleRow | None] = []
        self.clock = 0
        """Decoding steps so far."""
        self.position, self.step, self.limit, self.last, self.alive = (zeros(size) for _ in range(5))
        self.delta = zeros(size)
        """Offset that the model adds to positions (:meth:`~rlhf_plugin_local.decoder.Decoder.step`)."""
        self.stop_ids = zeros(size, stop_ids) - 1
        self.tokens = zeros(size, COLUMNS)
        self.logprobs = zeros(size, COLUMNS, dtype=torch.float32)
        self.uniforms = zeros(size, COLUMNS, dtype=torch.float64)
        self.layers = layers
        shape = (0, 0) if layers is None else (len(layers.layers), layers.chosen)
        self.experts = zeros(size, COLUMNS, *shape, dtype=torch.int16)
        """Experts of each sampled token. They are known after the token was an input."""
        self._draw: Draw | None = None
        self._scanned = False

    @property
    def used(self) -> int:
        return len(self.rows)

    @property
    def live(self) -> list[SampleRow]:
        return [row for row in self.rows if row is not None]

    @property
    def holes(self) -> list[int]:
        return [slot for slot, row in enumerate(self.rows) if row is None]

    def _row(self, slot: int) -> SampleRow:
        """The row in an occupied slot."""
        row = self.rows[slot]
        assert row is not None
        return row

    def length(self) -> int:
        """Tokens in the cache of the longest live row after the next step."""
        return max(len(row.request.ids) + self.clock - row.born + 1 for row in self.rows if row is not None)

    def admit(
        self,
        slots: list[int],
        requests: Sequence[tuple[int, GenerationRequest]],
        deltas: Sequence[int],
        choices: Sequence[np.ndarray | None],
    ) -> None:
        """Assign ``slots`` (free ones first, then new ones) to requests that start. ``choices``: the experts of their
        prompts."""
        columns, uniforms = self.uniforms.shape[1], []
        for slot, (index, request), choices_TLK in zip(slots, requests, choices, strict=True):
            s = request.sampling
            scanner = StopScanner(s.stop, self.decode) if s.stop else None
            row = SampleRow(index, request, Uniforms(request.seed), scanner, self.clock, choices_TLK)
            if slot == len(self.rows):
                self.rows.append(row)
            else:
                self.rows[slot] = row
            uniforms.append(row.uniforms.take(columns))
        slot_B = torch.tensor(slots, device=self.device)
        new = [request for _, request in requests]
        self.position[slot_B] = torch.tensor([len(r.ids) for r in new], device=self.device)
        self.delta[slot_B] = torch.tensor(deltas, device=self.device)
        self.limit[slot_B] = torch.tensor([r.sampling.max_new_tokens for r in new], device=self.device)
        self.step[slot_B] = 0
        self.alive[slot_B] = 1
        width = self.stop_ids.shape[1]
        ends = [self.ends(r) for r in new]
        padded = [[*e, *[-1] * (width - len(e))] for e in ends]
        self.stop_ids[slot_B] = torch.tensor(padded, dtype=torch.int64, device=self.device)
        self.uniforms[slot_B] = torch.stack(uniforms).to(self.device)
        self._refresh()

    def ends(self, request: GenerationRequest) -> tuple[int, ...]:
        """Tokens that end this request. ``ignore_eos`` leaves out the model's end tokens, not ``stop_token_ids``."""
        s = request.sampling
        return tuple(dict.fromkeys((*s.stop_token_ids, *(() if s.ignore_eos else self.eos))))

    def record(
        self, slots: list[int] | None, logits_BV: Tensor, choices_SLK: Tensor | None = None
    ) -> list[tuple[int, Finish]]:
        """Sample and record the next token of each row. Returns (slot, finish) of the rows that ended with it.

        ``slots``: newly admitted slots, whose first token is sampled; None: all slots, after a decoding step.
        ``choices_SLK``: the experts of the previous tokens, which were the inputs of the step.
        """
        if slots is None:
            self.clock += 1
            slot_index: slice | Tensor = slice(0, self.used)
            self.position[slot_index] += self.alive[slot_index]
            parameters = self._parameters()
        else:
            slot_index = torch.tensor(slots, device=self.device)
            parameters = Draw.of([self._row(s).request.sampling for s in slots], self.vocabulary, self.device)
        self._fit()
        step_B, alive_B = self.step[slot_index], self.alive[slot_index]
        at_B1 = step_B[:, None]
        token_B, logprob_B = draw(logits_BV, parameters, self.uniforms[slot_index].gather(1, at_B1)[:, 0])
        # Store the tokens, and the experts of the tokens before them.
        rows_B = torch.arange(self.used, device=self.device)[slot_index]
        if choices_SLK is not None:
            self.experts[rows_B, step_B - 1] = choices_SLK.to(torch.int16)
        self.tokens[rows_B, step_B] = token_B
        self.logprobs[rows_B, step_B] = logprob_B
        self.last[slot_index] = token_B
        # Which rows end. Stop strings are searched on the host.
        stopped_B = (token_B[:, None] == self.stop_ids[slot_index]).any(-1)
        broken_B = ~logprob_B.isfinite()
        done_B = (stopped_B | broken_B | (step_B + 1 >= self.limit[slot_index])) & (alive_B > 0)
        self.step[slot_index] += alive_B
        finishes: dict[int, Finish] = {}
        names = slots or range(self.used)
        if self._scanned:
            for slot, token in zip(names, token_B.tolist(), strict=True):
                row = self.rows[slot]
                if row is not None and row.scanner is not None and row.scanner.feed(token):
                    finishes[slot] = "stop"
        ends = done_B.nonzero()[:, 0]
        if broken_B[ends].any():
            index = next(self._row(names[i]).index for i in ends.tolist() if broken_B[i])
            raise ModelError(
                f"the model's logits are not finite (NaN or infinity) at step {self.clock} of sampling, first in "
                f"request {index}. The weights are damaged or the arithmetic overflowed: look at the last "
                "update's gradient norm, or sample in fp32."
            )
        for i, stopped in zip(ends.tolist(), stopped_B[ends].tolist(), strict=True):
            finishes.setdefault(names[i], "stop" if stopped else "length")
        return sorted(finishes.items())

    def sampled_ids(self, slot: int) -> list[int]:
        """The tokens sampled so far for a row."""
        tokens: list[int] = self.tokens[slot, : int(self.step[slot])].tolist()
        return tokens

    def finish(self, finishes: Sequence[tuple[int, Finish]], version: int) -> list[tuple[int, Turn]]:
        """Remove rows from their slots. Returns (position in the requests, turn) of each."""
        if not finishes:
            return []
        slots = [slot for slot, _ in finishes]
        turns = []
        tokens_BT, logprobs_BT = self.tokens[slots].int().cpu().numpy(), self.logprobs[slots].cpu().numpy()
        experts_BTLK = self.experts[slots].cpu().numpy()
        for (slot, reason), ids_T, logprobs_T, experts_TLK in zip(
            finishes, tokens_BT, logprobs_BT, experts_BTLK, strict=True
        ):
            row, self.rows[slot] = self._row(slot), None
            n = self.clock - row.born + 1
            turn = Turn(
                ids=ids_T[:n],
                sampled=True,
                logprobs=logprobs_T[:n],
                versions=((0, version),),
                finish=reason,
                temperature=row.request.sampling.temperature or 1.0,
            )
            turn.text = self.decode(turn.ids)
            if self.layers is not None:
                turn.experts = record_of(np.concatenate([row.choices_TLK, experts_TLK[: n - 1]]), self.layers)
            turns.append((row.index, turn))
        self.alive[slots] = 0
        self.position[slots] = 0  # a free slot writes inside its own memory, also after a resize
        return turns

    def compact(self) -> tuple[list[int], list[int]]:
        """Move the last live rows into free slots. Returns (source slots, target slots), for the cache."""
        live = self.used - len(self.holes)
        target = [slot for slot in self.holes if slot < live]
        source = [slot for slot in range(live, self.used) if self.rows[slot] is not None]
        if source:
            for name in self._MOVED:
                tensor = getattr(self, name)
                tensor[target] = tensor[source]
            for s, t in zip(source, target, strict=True):
                self.rows[t] = self.rows[s]
        del self.rows[live:]
        self._refresh()
        return source, target

    def _refresh(self) -> None:
        self._draw = None
        self._scanned = any(row.scanner for row in self.live)

    def _parameters(self) -> Draw:
        if self._draw is None:
            filler = self.live[0].request.sampling  # for finished rows, whose tokens are ignored
            samplings = [filler if row is None else row.request.sampling for row in self.rows]
            self._draw = Draw.of(samplings, self.vocabulary, self.device)
        return self._draw

    def _fit(self) -> None:
        """Allocate room for one more step of every row. Each row continues its stream of uniforms."""
        columns = self.tokens.shape[1]
        if all(self.clock - row.born < columns - 1 for row in self.live):
            return
        for name in ("tokens", "logprobs", "uniforms", "experts"):
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, torch.zeros_like(old)], 1))
        for slot, row in enumerate(self.rows):
            if row is not None:
                self.uniforms[slot, columns:] = row.uniforms.take(columns).to(self.device)
