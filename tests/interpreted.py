"""Changes Triton's interpreter so that it can run Liger's kernels on CPU tensors, slowly, in fp32.

The process must be started with ``TRITON_INTERPRET=1``, because Triton reads it when kernels are defined. bf16 does not
work: the interpreter treats its bits as integers.
"""

from __future__ import annotations

from typing import Any


def complete_the_interpreter() -> None:
    """Adds three features of the compiler that the interpreter (Triton 3.9) lacks: arguments that are floats become
    tensors, and libdevice's rsqrt and tanh."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
