"""Converts the protocol buffers of the Tinker protocol to arrays and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from rlhf_cli.serve_training.losses import READS, TARGETS, BadRequest, LossChoice

DTYPES: Mapping[Any, np.dtype[Any]] = {pb.DTYPE_FLOAT32: np.dtype(np.float32), pb.DTYPE_INT64: np.dtype(np.int64)}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Datum:
    """One sequence: n input tokens, and arrays with n rows, one row for the prediction of each token."""

    ids: Array
    """int32 [n]"""
    inputs: Mapping[str, Array]
    """``target_tokens`` int64 [n] or [n, K], and the floats of the loss, of equal shape."""


@dataclass(frozen=True)
class Learning:
    """A request to compute a loss, with or without learning from it."""

    model: str
    number: int
    """Number of the request among the requests of its model."""
    data: Sequence[Datum]
    loss: LossChoice
    learns: bool


def read_learning(body: bytes, vocabulary: int, longest: int) -> Learning:
    """Read a request. Raises BadRequest."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError is another class in each of its implementations
        raise BadRequest(f"the body is not a ForwardBackwardRequest: {error}") from None
    options: dict[str, Any] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.text if value.HasField("text") else value.number
    loss = LossChoice.checked(message.loss_fn, options)
    data = [_datum(number, datum, loss, vocabulary, longest) for number, datum in enumerate(message.data)]
    if not data:
        raise BadRequest("the request has no data")
    if len({datum.inputs[TARGETS].shape[1:] for datum in data}) > 1:
        raise BadRequest("all data must have the same number of target tokens per position; some data differ")
    return Learning(message.model_id, message.seq_id, data, loss, not message.forward_only)


def _datum(number: int, message: Any, loss: LossChoice, vocabulary: int, longest: int) -> Datum:
    label = f"datum {number}"
    ids = _ids(message.model_input, label)
    if not 1 <= len(ids) < longest:
        raise BadRequest(f"{label} has {len(ids)} tokens; this server takes 1 to {longest - 1} (data.max_tokens)")
    inputs = {name: _dense(value, f"{label}, {name}") for name, value in message.loss_fn_inputs.items()}
    needed = {TARGETS, *READS[loss.name]}
    if missing := needed - inputs.keys():
        raise BadRequest(f"{label} lacks {sorted(missing)}: loss {loss.name!r} reads {sorted(needed)}")
    if unread := inputs.keys() - needed:
        raise BadRequest(f"{label}: loss {loss.name!r} does not read {sorted(unread)}. Remove them")
    targets = inputs[TARGETS]
    if targets.dtype != np.int64 or targets.ndim not in (1, 2) or len(targets) != len(ids):
        raise BadRequest(f"{label}: target_tokens must be int64 with a row for each of {len(ids)} tokens, "
                         f"got {targets.dtype} {targets.shape}")  # fmt: skip
    check_ids(ids, vocabulary, label)
    check_ids(targets, vocabulary, f"{label}, target_tokens")
    for name in READS[loss.name]:
        if inputs[name].shape != targets.shape or not np.isfinite(inputs[name]).all():
            raise BadRequest(f"{label}: {name} must be finite and have the shape of target_tokens, {targets.shape}; "
                             f"got {inputs[name].shape}")  # fmt: skip
    return Datum(ids, {n: v if n == TARGETS else v.astype(np.float32) for n, v in inputs.items()})


def _ids(chunks: Any, label: str) -> Array:
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in chunks):
        raise BadRequest(f"{label}: this server takes only tokens, no images and no sound")
    parts = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in chunks]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def check_ids(ids: Array, vocabulary: int, label: str) -> None:
    """Raises BadRequest for a token that the model does not have."""
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        raise BadRequest(f"{label} has tokens from {ids.min()} to {ids.max()}; the model's are 0 to {vocabulary - 1}")


def _dense(message: Any, label: str) -> Array:
    """A tensor as an array; entries that a sparse one does not list are 0."""
    if message.dtype not in DTYPES:
        raise BadRequest(f"{label}: number format {message.dtype} is neither float32 nor int64")
    dtype, shape = DTYPES[message.dtype], tuple(message.shape)
    try:
        if not message.HasField("sparse_csr"):
            dense = np.frombuffer(message.dense, dtype)
            return dense.reshape(shape) if shape else dense
        csr = message.sparse_csr
        rows, columns = np.frombuffer(csr.crow_indices, np.int64), np.frombuffer(csr.col_indices, np.int64)
        array = np.zeros(shape, dtype)
        array[np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns] = np.frombuffer(csr.values, dtype)
        return array
    except (ValueError, IndexError) as error:
        raise BadRequest(f"{label}: the bytes are not an array of shape {shape}: {error}") from None


def write_learned(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """The answer to :class:`Learning`: the log-probs of the targets of each datum, float32 [n] or [n, K]."""
    sizes = np.cumsum([0, *(logprobs_T.size * 4 for logprobs_T in logprobs)], dtype=np.int64)
    tensor = pb.BatchedTensor(
        data=b"".join(np.ascontiguousarray(logprobs_T, np.float32).tobytes() for logprobs_T in logprobs),
        offsets=sizes.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=list(logprobs[0].shape[1:]),
    )
    record = pb.ArrayRecord(type_tag="ArrayRecord", num_datums=len(logprobs), fields={"logprobs": tensor})
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=dict(metrics)
    )
    return message.SerializeToString()


@dataclass(frozen=True)
class Drawn:
    """A sample: its tokens, their log-probs, and whether it ended by itself, not by its token limit."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool


def write_samples(samples: Sequence[Drawn], prompt_logprobs: Array | None) -> bytes:
    """The answer with samples. ``prompt_logprobs``: float32, one for each token of the prompt, NaN for the first; None:
    not requested."""
    message = pb.SampleResponse()
    for sample in samples:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sample.ids, np.int32).tobytes(),
            logprobs=np.asarray(sample.logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, np.float32).tobytes()
    return message.SerializeToString()
