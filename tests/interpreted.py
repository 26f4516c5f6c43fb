"""Triton's interpreter, made fit for Liger's kernels: they then compute on CPU tensors, slowly, in fp32.

In a process that was started with ``TRITON_INTERPRET=1``, as Triton reads it when kernels are defined. Not bf16: the
interpreter computes with its bits as integers.
"""

from __future__ import annotations

from typing import Any


def complete_the_interpreter() -> None:
    """Three things that the compiler has and the interpreter (Triton 3.9) has not: arguments that are floats become
    tensors, and libdevice's rsqrt and tanh."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    before = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return before(argument)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
