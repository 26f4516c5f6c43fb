"""A program that shows the policy images, as the OpenAI API writes them."""

import base64

import pytest
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.data.template import Template
from rlhf_testing.image_models import drawing, tiny_image_model

RED, BLUE = drawing(40, 24, "red"), drawing(24, 40, "blue")

PREAMBLE = """
def shown(image):
    url = f"data:image/png;base64,{image}"
    parts = [FORM, {"type": "text", "text": "colour?"}]
    return {"role": "user", "content": parts}

def say(messages):
    status, answer = ask(base_url, api_key, messages, max_tokens=6)
    assert status == 200, answer
    return [*messages, answer["choices"][0]["message"]]

red, blue = IMAGES
said = say([shown(red)])
"""
SHOWS = """
say([*said, shown(blue)])
say([shown(blue)])
"""
GOES_ON_TWICE = """
say([*said, shown(blue)])
say([*said, {"role": "user", "content": "and now?"}])
"""


@pytest.fixture
def lab(laboratory, tmp_path):
    path = tiny_image_model(tmp_path / "model")
    lab = laboratory(path)
    lab.template = Template(lab.trainer.tokenizer, DataSection(), ImageTokens(str(path)))
    yield lab
    lab.close()


FORMS = {
    "url": '{"type": "image_url", "image_url": {"url": url}}',
    "base64": '{"type": "image", "base64": image, "text": None}',
}


def shows(lines: str, form: str = "url") -> str:
    images = [base64.b64encode(image).decode() for image in (RED, BLUE)]
    return (PREAMBLE + lines).replace("IMAGES", repr(images)).replace("FORM", FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_equal_texts_with_other_images_are_other_conversations(lab, program, form):
    trajectory = lab.one(program(shows(SHOWS, form)))
    assert trajectory.status != "failed", trajectory.error
    assert trajectory.info["rollout/sequences/conversation"] == 1
    assert [[i.data for i in t.images] for t in trajectory.turns if not t.sampled] == [[RED], [BLUE], [BLUE]]


def test_a_conversation_that_goes_on_twice_from_one_answer_keeps_its_images(lab, program):
    """The second time, the answer is context, in one turn with what came before it."""
    trajectory = lab.one(program(shows(GOES_ON_TWICE)))
    assert trajectory.status != "failed", trajectory.error
    first, answer, second, _, third, _ = trajectory.turns
    assert [t.sampled for t in trajectory.turns] == [False, True] * 3
    assert third.fresh
    assert third.ids[: len(first.ids) + len(answer.ids)] == first.ids + answer.ids
    assert [i.data for i in second.images] == [BLUE]
    assert third.images == first.images
    assert first.images[0].data == RED
