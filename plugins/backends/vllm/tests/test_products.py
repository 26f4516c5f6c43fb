"""How Triton multiplies fp32 numbers for an engine on a GPU: kernels are compiled for one, none is run."""

from __future__ import annotations

import os

import pytest
from rlhf_plugin_vllm.engine.global_state import PRODUCTS, isolated, use_exact_products

triton = pytest.importorskip("triton", reason="no Triton is installed")
tl = pytest.importorskip("triton.language")


def product(a, b, c):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    place = rows * 16 + columns
    tl.store(c + place, tl.dot(tl.load(a + place), tl.load(b + place)))


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """compiled() -> the product's line in the kernel for an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(PRODUCTS, raising=False)

    def compile_it() -> str:
        source = ASTSource(triton.jit(product), dict.fromkeys("abc", "*fp32"))
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        [line] = [line for line in kernel.asm["ttir"].splitlines() if "tt.dot" in line]
        return line

    yield compile_it
    os.environ.pop(PRODUCTS, None)


def test_kernels_for_a_gpu_that_stands_in_multiply_fp32_exactly_after_an_fp32_engine_started(compiled):
    """They are compiled at the first request, after the start has restored the environment."""
    assert "inputPrecision = tf32" in compiled()
    with isolated({}):
        use_exact_products()
    assert "tf32" not in compiled()


def test_the_users_choice_of_products_counts(monkeypatch):
    monkeypatch.setenv(PRODUCTS, "tf32x3")
    use_exact_products()
    assert os.environ[PRODUCTS] == "tf32x3"
