"""What an allocator keeps: of one heap the largest it was, of large blocks what lives."""

from __future__ import annotations

from rlhf_plugin_plan.heap import CHURN, HOLES, LARGE, Size, allocator, tensors, total


def test_blocks_below_32_mib_share_the_heap():
    assert tensors(100, LARGE - 1) == Size(100, 100)
    assert tensors(100, LARGE) == Size(100, 0)
    assert total([tensors(100, 1), tensors(50, LARGE)]) == Size(150, 100)


def test_the_heap_stays_as_large_as_it_was():
    """Layers need 300 of the heap; then the head 50 of it and 400 in large blocks: 300 + 400 are taken, not 450."""
    layers, head = Size(300, 300), Size(450, 50)
    holes = int(HOLES * 300)
    assert allocator([layers, head], Size(), "cpu") == holes + 300 + 400 - 450
    assert allocator([head], Size(), "cpu") == int(HOLES * 50)


def test_what_rests_in_the_heap_has_holes_too():
    assert allocator([Size(300, 300)], Size(900, 600), "cpu") == int(HOLES * 900)


def test_a_gpu_keeps_a_share_of_the_fullest_moment():
    assert allocator([Size(300, 300), Size(450, 50)], Size(900, 600), "cuda") == int(CHURN * 450)
