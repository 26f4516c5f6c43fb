"""Images stay with the tokens that stand for them."""

import torch
from rlhf.ops.batch import concat
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.trajectories import assemble
from rlhf.types import GenerationRequest, Group, Image, Row, Sampling, Trajectory, Turn
from rlhf.types.images import joined_images

RED, BLUE = b"red", b"blue"


def unit(*images: Image) -> UnitData:
    mask = {"loss_mask": [False] * 4 + [True]}
    answer = SequenceData([4, 5], {"loss_mask": [True] * 2})
    return UnitData([SequenceData([1, 9, 9, 2, 3], mask, images=images), answer])


def test_equal_tokens_with_other_images_are_another_context():
    red, blue = (GenerationRequest([1, 9], 0, Sampling(), (Image(data, 1, 1, [9]),)) for data in (RED, BLUE))
    assert red.context_key != blue.context_key
    assert red.context_key == GenerationRequest([1, 9], 5, Sampling(), red.images).context_key
    assert red.context_key != GenerationRequest([1, 9], 5, Sampling(), red.images, base=True).context_key


def test_operations_on_batches_keep_images_with_their_sequences():
    red, blue = Image(RED, 1, 2, [9]), Image(BLUE, 1, 2, [9])
    batch = pack([unit(red), unit(), unit(blue)])
    assert batch.images_B == ((red,), (), (), (), (blue,), ())
    assert batch.select([2, 1]).images_B == ((blue,), (), (), ())
    assert batch.between(1, 3).images_B == ((), (), (blue,), ())
    assert batch.between(1, 2).images_B == ()
    assert batch.keep(torch.tensor([True, False, True, True, False, True])).images_B == ((red,), (), (), ())
    assert concat([batch.between(1, 2), batch.between(0, 1)]).images_B == ((), (), (red,), ())
    assert batch.to("cpu").select_columns([]).images_B == batch.images_B
    assert pack([unit()]).images_B == ()


def test_turns_with_images_become_sequences_with_images():
    red, blue = Image(RED, 1, 2, [9]), Image(BLUE, 0, 2, [9])
    turns = [
        Turn([1, 9, 9], False, images=(red,)),
        Turn([5], True, [-1.0]),
        Turn([9, 9, 2], False, images=(blue,)),
        Turn([6], True, [-1.0]),
        Turn([1, 2], False, fresh=True),
        Turn([7], True, [-1.0]),
    ]
    row = Row({}, "s", 0)
    plain = Trajectory(row, [Turn([1, 2], False), Turn([7], True, [-1.0])], (0, 0), reward=1.0)
    with_images = Trajectory(row, turns, (0, 1), reward=1.0)
    batch = assemble([Group(row, 0, [plain, with_images])])
    assert batch.lens_B.tolist() == [3, 8, 3]
    assert batch.images_B == ((), (red, blue.moved(4)), ())
    assert joined_images((len(t.ids), t.images) for t in turns[:4]) == (red, blue.moved(4))
    tok = assemble([Group(row, 0, [plain, with_images])], observations=True).tok
    assert batch.ids_N[tok["observation_mask"]].tolist() == [2], "tokens that stand for an image are no observation"
