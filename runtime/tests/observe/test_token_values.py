import pytest
import torch
from rlhf.ops.trajectories import assemble
from rlhf.types import Annotation, Group, Row, Trajectory, Turn
from rlhf_runtime.checkpoint.sample_table import read_samples
from rlhf_runtime.checkpoint.saved_groups import read_groups, write_groups
from rlhf_runtime.loop.reports import token_values

ROW = Row({}, "rows", 0)
OLD, REFERENCE = Annotation("policy", "logprobs", "old_logprobs"), Annotation("reference", "logprobs", "ref_logprobs")


def samples():
    """Two samples: one of two turns with 3 sampled tokens, one of 2 tokens."""
    prompt = Turn([1, 2], False, text="1+1=")
    dialogue = [
        prompt,
        Turn([5, 6], True, [-0.5, -0.25], text="2"),
        Turn([9], False),
        Turn([7], True, [-1.0], text="3"),
    ]
    short = [prompt, Turn([5, 8], True, [-0.5, -0.125], text="\ud83d")]  # half of a character: written as JSON
    return [
        Group(ROW, 4, [Trajectory(ROW, turns, (4, n), reward=float(n)) for n, turns in enumerate((dialogue, short))])
    ]


def credited(groups):
    batch = assemble(groups)
    numbers_N = torch.arange(batch.tokens, dtype=torch.float32)
    return batch.with_column("tok", "old_logprobs", -numbers_N).with_column("tok", "advantages", 0 * numbers_N + 0.5)


def test_values_of_sampled_tokens_are_recorded_by_role_and_output(tmp_path):
    groups = samples()
    values = token_values(credited(groups), [OLD, REFERENCE])
    write_groups(tmp_path / "step-000001.arrow", groups, token_values=values)
    recorded = [sample["token_values"] for _, sample in read_samples(tmp_path / "step-000001.arrow")]
    assert [{name: [*map(float, v)] for name, v in sample.items()} for sample in recorded] == [
        {"policy/logprobs": [-2.0, -3.0, -5.0], "advantages": [0.5]},
        {"policy/logprobs": [-8.0, -9.0], "advantages": [0.5]},
    ]
    assert read_groups(tmp_path / "step-000001.arrow", lambda source, index: ROW) == groups


def test_samples_that_were_not_trained_on_have_no_values():
    batch = credited(samples())
    assert [*token_values(batch.keep(torch.tensor([False, True])), [OLD])] == [(4, 1)]
    masked = batch.tok["loss_mask"].clone()
    masked[2] = False  # a token of the first sample: its values would be those of other tokens
    assert [*token_values(batch.with_column("tok", "loss_mask", masked, over=None), [OLD])] == [(4, 1)]


@pytest.mark.parametrize("names", [["old_logprobs"], ["old_logprobs", "group"]])
def test_a_batch_of_other_units_than_samples_has_no_values(names):
    assert token_values(credited(samples()).select_columns(["loss_mask", *names]), [OLD]) == {}
