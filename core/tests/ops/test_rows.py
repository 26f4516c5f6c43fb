"""Rows become units; rows without a trained token are left out."""

from rlhf.ops.rows import pack_rows
from rlhf.types import Row
from rlhf.types.examples import Example, Sequence


def row(*masks):
    sequences = [Sequence([10 * role + i for i in range(len(mask))], mask, role) for role, mask in enumerate(masks)]
    return Example(Row({}, "data", 0), sequences)


def test_rows_are_units_with_their_masks_and_roles():
    batch = pack_rows([row([False, True]), row([False, True, True], [False, False])])
    assert batch.ids_N.tolist() == [0, 1, 0, 1, 2, 10, 11]
    assert batch.tok["loss_mask"].tolist() == [False, True, False, True, True, False, False]
    assert (batch.unit_B.tolist(), batch.role_B.tolist()) == ([0, 1, 1], [0, 0, 1])


def test_rows_without_a_trained_token_are_left_out():
    """A mask of the first token alone trains nothing, because no output predicts that token."""
    first_alone, one_of_two = row([True, False]), row([False, True], [True, False])
    assert pack_rows([first_alone, row([False])]) is None
    assert pack_rows([]) is None
    assert pack_rows([first_alone, one_of_two]).units == 1
    assert pack_rows([one_of_two], all) is None
