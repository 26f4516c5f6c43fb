"""Tiny image-text models load with transformers, and their image processors read a drawn image."""

import io

import pytest
from PIL import Image
from rlhf_testing.image_models import FAMILIES, drawing, tiny_image_model
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_image_model_has_a_tokenizer_a_template_and_an_image_processor(family, tmp_path):
    path = tiny_image_model(tmp_path, family)
    assert AutoConfig.from_pretrained(path).model_type == family
    tokenizer = AutoTokenizer.from_pretrained(path)
    parts = [{"type": "image"}, {"type": "text", "text": "hi"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    image = Image.open(io.BytesIO(drawing(40, 24, "blue")))
    assert len(AutoImageProcessor.from_pretrained(path)([image], return_tensors="pt")["pixel_values"])
