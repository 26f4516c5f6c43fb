"""Rows with images: where images come from, and the tokens that stand for them."""

import base64
import io
import json
from dataclasses import replace

import pytest
from PIL import Image
from rlhf.errors import DataError
from rlhf_hub.processors import load_processor
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data import source_layouts
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.data.tokenizer import load_tokenizer
from rlhf_testing.image_models import FAMILIES, drawing, tiny_image_model

RED, BLUE = drawing(40, 24, "red"), drawing(24, 40, "blue", "JPEG")
PLACE = {"type": "image"}
USER = [{"role": "user", "content": [PLACE, {"type": "text", "text": "ab"}, PLACE]}]
ANSWER = {"role": "assistant", "content": "yes"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = {}

    def model(family="qwen2_5_vl"):
        if family not in paths:
            paths[family] = str(tiny_image_model(tmp_path_factory.mktemp(family), family))
        return paths[family]

    return model


@pytest.fixture
def data(models, tmp_path):
    """Rows as TrainData; ``red.png`` and ``blue.jpg`` lie beside them."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.jpg").write_bytes(BLUE)

    def load(rows, form="prompts", family="qwen2_5_vl", images=None, column=None, answers=False, **section):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = models(family)
        section = DataSection(train=(SourceSection(path=str(path)),), shuffle=False, images=column, **section)
        return TrainData(section, load_tokenizer(model), form, 0, answers, images=images or ImageTokens(model))

    return load


def url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def short_ids(ids, images):
    """``ids`` with ``Image.short`` in place of the tokens of each image."""
    result = ids.tolist()
    for image in reversed(images):
        result[image.start : image.start + image.tokens] = image.short
    return result


def opened(*files):
    return [Image.open(io.BytesIO(file)) for file in files]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_a_prompt_are_those_of_the_processor(data, models, family):
    prompts = data([{"prompt": USER, "images": ["red.png", "blue.jpg"]}], family=family)
    turn = prompts.template.encode_prompt(*prompts.take(1))
    processor = load_processor(models(family))
    parts = prompts.template.chat
    text = parts.text(USER, answer=True)
    expected = processor(images=opened(RED, BLUE), text=[text], add_special_tokens=False)["input_ids"][0]
    assert list(turn.ids) == list(expected)
    assert list(short_ids(turn.ids, turn.images)) == processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [i.data for i in turn.images] == [RED, BLUE]
    for image in turn.images:
        assert processor.image_token_id in turn.ids[image.start : image.start + image.tokens]
    assert [len(i.short) for i in turn.images] == [1, 1]


def test_tokens_of_images_are_not_trained_on_and_the_answer_is(data):
    row = {"messages": [*USER, ANSWER], "images": ["red.png", "blue.jpg"]}
    for loss_on in ("completion", "all"):
        demos = data([row], "demonstrations", "idefics3", loss_on=loss_on)
        [sequence] = demos.examples(demos.take(1))[0].sequences
        spans = {p for i in sequence.images for p in range(i.start, i.start + i.tokens)}
        trained = {p for p, m in enumerate(sequence.loss_mask) if m}
        assert not spans & trained
        if loss_on == "completion":
            answer_ids = [sequence.ids[p] for p in sorted(trained)]
            assert demos.template.tokenizer.decode(answer_ids) == "yes<eos>"
        else:
            assert spans | trained == set(range(len(sequence.ids)))


def test_images_after_the_last_trained_answer_are_left_out_with_their_messages(data):
    last_messages = [*USER, {**ANSWER, "weight": 0}]
    names = ["red.png", "blue.jpg"]
    row = {"messages": [*USER, ANSWER, *last_messages], "images": [*names, *names]}
    rows = [row, {"messages": [*USER, ANSWER], "images": names}]
    demos = data(rows, "demonstrations", "idefics3", loss_on="assistant")
    sequences = [example.sequences[0] for example in demos.examples(demos.take(2))]
    assert sequences[0] == sequences[1]
    assert [i.data for i in sequences[0].images] == [RED, BLUE]


def test_both_answers_of_a_pair_follow_the_images(data):
    pairs = data([{"prompt": USER, "chosen": "a", "rejected": "b", "images": ["red.png", "blue.jpg"]}], "pairs")
    first, second = pairs.examples(pairs.take(1))[0].sequences
    assert first.images == second.images
    front = first.images[1].start + first.images[1].tokens
    assert first.ids[:front] == second.ids[:front]


def test_a_pair_may_differ_in_an_image_only(data):
    """The same answer after two images of one size, which have the same tokens."""
    other = url(drawing(40, 24, "blue"))
    talks = [[{"role": "user", "content": [{**PLACE, "image": image}]}, ANSWER] for image in ("red.png", other)]
    pairs = data([{"chosen": talks[0], "rejected": talks[1]}], "pairs", loss_on="assistant")
    first, second = pairs.examples(pairs.take(1))[0].sequences
    assert first.ids == second.ids
    assert first.images != second.images
    with pytest.raises(DataError, match="have the same tokens, so there is no preference to learn"):
        data([{"chosen": talks[0], "rejected": talks[0]}], "pairs", loss_on="assistant").check(1)


IMAGE_ANSWER = {"role": "assistant", "content": [{**PLACE, "image": "blue.jpg"}, {"type": "text", "text": "a"}]}
FROM_COLUMN = {"role": "assistant", "content": [PLACE, {"type": "text", "text": "a"}]}


@pytest.mark.parametrize("chosen", ["<|image_pad|> a", [FROM_COLUMN]])
def test_a_pair_has_one_prompt_also_where_an_answer_names_a_place(data, chosen):
    """The column's image would be in the chosen answer, and before the text of the rejected one's prompt."""
    row = {"prompt": "look", "chosen": chosen, "rejected": "b", "images": "red.png"}
    with pytest.raises(
        DataError, match="chosen answer has placeholders for 1 images of column 'images' and the rejected answer for 0"
    ):
        data([row], "pairs").check(1)
    pairs = data([{**row, "chosen": [IMAGE_ANSWER], "rejected": "b"}], "pairs")
    first, second = pairs.examples(pairs.take(1))[0].sequences
    assert [[i.data for i in s.images] for s in (first, second)] == [[RED, BLUE], [RED]]


def test_an_answer_that_stands_for_a_sample_holds_no_image(data):
    for answer, images in (("<|image_pad|> a", "red.png"), ([IMAGE_ANSWER], [])):
        with pytest.raises(DataError, match="line 1: the answer contains an image, but it is used as a sam"):
            data([{"prompt": "look", "response": answer, "images": images}], answers=True).check(1)


@pytest.mark.parametrize(
    ("value", "files"),
    [
        ("red.png", [RED]),
        (["blue.jpg", "file://red.png"], [BLUE, RED]),
        ({"bytes": None, "path": "red.png"}, [RED]),
        ([url(RED)], [RED]),
        (None, []),
        ([], []),
    ],
)
def test_images_without_a_place_come_before_the_first_users_text(data, value, files):
    rows = data([{"prompt": "hi", "images": value}])
    turn = rows.template.encode_prompt(*rows.take(1))
    parts = [*(PLACE for _ in files), {"type": "text", "text": "hi"}]
    assert [i.data for i in turn.images] == files
    text = rows.template.chat.text([{"role": "user", "content": parts}], answer=True)
    assert list(short_ids(turn.ids, turn.images)) == rows.template.tokenizer(text)["input_ids"]


def test_images_in_messages_and_in_a_column_keep_their_order(data):
    parts = [
        {"type": "image", "image": "blue.jpg"},
        {"type": "text", "text": "a"},
        PLACE,
        {"type": "image_url", "image_url": {"url": url(RED)}},
    ]
    rows = data([{"prompt": [{"role": "user", "content": parts}], "images": "red.png"}])
    assert [i.data for i in rows.template.encode_prompt(*rows.take(1)).images] == [BLUE, RED, RED]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_a_column_fills_parts_and_placeholders_in_their_order(data, family):
    """Also beside parts that hold an image of their own."""
    mark = data([{"prompt": "hi"}], family=family).template.images.marks(1)
    blue = {"type": "image", "image": "blue.jpg"}
    parts = [{"type": "text", "text": f"a {mark} b"}, blue, PLACE, {"type": "text", "text": mark}]
    messages = [{"role": "user", "content": parts}]
    rows = data([{"prompt": messages, "images": ["red.png", "blue.jpg", "red.png"]}], family=family)
    assert [i.data for i in rows.template.encode_prompt(*rows.take(1)).images] == [RED, BLUE, BLUE, RED]
    marked = [{"role": "user", "content": [*parts[:2], *(2 * parts[3:])]}]
    rows = data([{"prompt": marked, "images": "red.png"}], family=family)
    with pytest.raises(DataError, match=r"4 placeholders for images in the text, but 2 images; .*'<.*>' in plain text"):
        rows.check(1)


@pytest.mark.parametrize(("family", "answer"), [("qwen2_5_vl", "yes<image>"), ("idefics3", "yes")])
def test_a_common_mark_is_the_place_of_an_image(data, family, answer):
    """Also where it is not the model's placeholder; in answers it is text."""
    texts = ("<image>a", "<image><image>", " <image> b")
    parts = (
        [PLACE, {"type": "text", "text": "a"}],
        [PLACE, PLACE],
        [{"type": "text", "text": " "}, PLACE, {"type": "text", "text": " b"}],
    )
    images = {"images": ["red.png", "blue.jpg", "red.png", "blue.jpg"]}
    encoded = []
    for contents in (texts, parts):
        messages = [
            m for content in contents for m in ({"role": "user", "content": content}, {**ANSWER, "content": answer})
        ]
        rows = data([{"messages": messages, **images}], "demonstrations", family=family, max_images=4)
        encoded.append(rows.template.encode_demonstration(*rows.take(1)).sequences[0])
    assert list(encoded[0].ids) == list(encoded[1].ids)
    assert [i.data for i in encoded[0].images] == [RED, BLUE, RED, BLUE]


def test_a_run_knows_whether_its_data_have_images(data):
    assert not data([{"prompt": [{"role": "user", "content": [{"text": "a part without a type"}]}]}]).has_images
    parts = [{"role": "user", "content": [{"type": "image", "image": "red.png"}]}]
    assert data([{"prompt": "hi", "images": None}]).has_images
    assert data([{"prompt": parts}]).has_images
    assert not data([{"prompt": "hi"}]).has_images
    assert not data([{"prompt": "hi", "images": None}], max_images=0).has_images


def test_the_first_row_with_an_image_may_come_late(data):
    """Before the first step the run must know whether its models read images."""
    prompt = [{"role": "user", "content": [{"type": "image", "image": "red.png"}]}]
    text = [{"role": "user", "content": "hi"}]
    for late in ({"prompt": prompt}, {"prompt": "look", "images": "red.png"}):
        rows = data([{"prompt": text}, {"prompt": "more text"}, late])
        assert rows.has_images
        images_of_rows = [rows.template.encode_prompt(row).images for row in rows.take(3)]
        assert [[i.data for i in images] for images in images_of_rows] == [[], [], [RED]]
    turn = {"role": "assistant", "content": "yes"}
    pair = {"prompt": text, "chosen": turn, "rejected": {**turn, "content": [PLACE | {"image": "red.png"}]}}
    assert data([{**pair, "rejected": turn}, pair], form="pairs").has_images


def test_plain_text_has_the_placeholders_of_the_model(data):
    rows = data([{"prompt": "a<|image_pad|>b", "images": "red.png"}], template="plain")
    turn = rows.template.encode_prompt(*rows.take(1))
    prefix_ids, after = rows.template.tokenizer("a")["input_ids"], rows.template.tokenizer("b")["input_ids"]
    assert turn.images[0].start == len(prefix_ids)
    assert list(turn.ids[turn.images[0].start + turn.images[0].tokens :]) == after


def test_a_text_row_does_not_load_the_processor(data, monkeypatch):
    import rlhf_runtime.data.image_tokens as module

    monkeypatch.setattr(module, "load_processor", lambda *_: pytest.fail("the processor was loaded"))
    rows = data([{"prompt": "hi"}])
    assert rows.template.encode_prompt(*rows.take(1)).images == ()


REFUSED = {
    "lacking": ("no.png", "image 0: the image '.*no.png' cannot be read: No such file"),
    "device": ("/dev/null", "image 0: the image '/dev/null' is neither a file nor a link to one"),
    "corrupt": (url(RED[:-40]), "image 0: the image cannot be read as an image: OSError: image file is truncated"),
    "text": (url(b"hello"), "cannot be read as an image: UnidentifiedImageError: cannot identify image file. Correct"),
    "far": ("https://host/a.png", "is a URL, and URLs are not downloaded: save the image beside the data"),
    "number": (3, "an image must be a path, a data: URL, bytes, .* got int 3"),
    "thin": (url(drawing(2000, 4)), "the model's processor refuses an image of 2000x4 pixels: ValueError"),
    "many": (["red.png"] * 3, "the row has 3 images, over data.max_images = 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_image_that_cannot_be_used_names_the_row(data, case):
    value, message = REFUSED[case]
    rows = data([{"prompt": "hi"}, {"prompt": "hi", "images": value}], max_images=2)
    with pytest.raises(DataError, match=rf"rows.jsonl, line 2: .*{message}"):
        rows.check(2)


def test_as_many_placeholders_as_images_are_needed(data):
    for prompt, images, message in (
        (
            USER,
            ["red.png"],
            r"2 image parts \(or '<image>' in texts\) of the messages hold no image, but column 'images' holds 1",
        ),
        ("<image> or <image>?", ["red.png"], "2 image parts .* hold no image, but column 'images' holds 1"),
        ("<|image_pad|><|image_pad|>", ["red.png"], "2 placeholders for images in the text, but 1 image;"),
        ("<|image_pad|>", [], "1 placeholder for images in the text, but 0 images"),
    ):
        with pytest.raises(DataError, match=f"line 1: {message}"):
            data([{"prompt": prompt, "images": images}]).check(1)


def test_a_run_without_images_refuses_them(data):
    row = {"prompt": "hi", "images": "red.png"}
    for rows, reason in (
        (data([row], images="the policy is a text-only model"), "the policy is a text-only model"),
        (data([row], max_images=0), "data.max_images = 0"),
    ):
        with pytest.raises(DataError, match=f"line 1: there are images, but {reason}"):
            rows.check(1)


def test_physical_tokens_count_and_a_row_is_dropped_whole(data):
    row = {"prompt": "hi", "images": "red.png"}
    long = data([row]).judge(data([row]).take(1)[0]).tokens
    rows = data([row, {"prompt": "hi"}], max_tokens=long, too_long="drop")
    assert rows.take(1)[0].index == 1
    assert rows.dropped == 1


def test_equal_rows_of_training_and_evaluation_have_the_images_of_their_own_folders(models, tmp_path):
    """Both splits of a folder of images have a `metadata.jsonl`, so both sources have the same name."""
    for split, image in (("train", RED), ("test", BLUE)):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0.png").write_bytes(image)
        (tmp_path / split / "metadata.jsonl").write_text(json.dumps({"prompt": "what?", "image": "0.png"}) + "\n")
    sources = [(SourceSection(path=str(tmp_path / split / "metadata.jsonl")),) for split in ("train", "test")]
    section = DataSection(train=sources[0], eval=sources[1])
    data = TrainData(section, load_tokenizer(models()), "prompts", 0, images=ImageTokens(models()))
    rows = [*data.take(1), *data.eval_rows()]
    assert [data.template.encode_prompt(row).images[0].data for row in (*rows, *rows)] == [RED, BLUE, RED, BLUE]


def test_a_named_column_of_images_must_exist(data):
    row = {"prompt": "hi", "photo": "red.png"}
    with pytest.raises(DataError, match=r"no column 'photos' for images.*Did you mean 'photo'"):
        data([row], column="photos")
    rows = data([row], column="photo")
    assert len(rows.template.encode_prompt(*rows.take(1)).images) == 1


def test_a_column_named_image_is_read_where_the_policy_reads_images(data):
    row = {"prompt": "hi", "image": "red.png", "response": "yes"}
    for form in ("prompts", "demonstrations"):
        rows = data([row], form)
        assert rows.has_images
        assert [i.data for i in rows.template.encode_prompt(*rows.take(1)).images] == [RED]
    assert not data([row], images="the policy is a text-only model").has_images
    assert not data([row], max_images=0).has_images
    for options in ({"images": "the policy is a text-only model"}, {"max_images": 0}):
        for value in ("red.png", [{"path": "red.png"}], "data:image/png;base64,AA"):
            rows = data([{**row, "image": None}, {**row, "image": value}], **options)
            assert len(rows.take(1)) == 1
            with pytest.raises(DataError, match="line 2: there are images, but"):
                rows.take(1)
        assert len(data([{**row, "image": "python:3.12"}], **options).take(1)) == 1
    second = data([{**row, "images": "blue.jpg"}])
    assert [i.data for i in second.template.encode_prompt(*second.take(1)).images] == [BLUE]


def test_grey_and_turned_images_become_upright_rgb(data, tmp_path):
    grey = Image.new("L", (40, 24), 128)
    exif = grey.getexif()
    exif[274] = 6  # a viewer turns it by 90 degrees
    grey.save(tmp_path / "turned.jpg", exif=exif)
    rows = data([{"prompt": "hi", "images": "turned.jpg"}])
    [image] = rows.template.encode_prompt(*rows.take(1)).images
    [picture] = opened(image.data)
    assert (picture.mode, picture.size) == ("RGB", (24, 40))


def test_the_fingerprint_knows_the_files_of_images(data, tmp_path):
    forms = [{"type": "image", "path": "red.png"}, {"type": "image_url", "image_url": {"url": "red.png"}}]
    rows = [{"prompt": [{"role": "user", "content": [form]}]} for form in forms]
    for row in ({"prompt": "hi", "images": "red.png"}, *rows):
        first, second = (data([row]).fingerprints() for _ in range(2))
        (tmp_path / "red.png").write_bytes(RED[:-1] + b"x")
        assert first == second != data([row]).fingerprints()
        (tmp_path / "red.png").write_bytes(RED)


def test_the_fingerprint_of_a_run_without_images_reads_no_row(data, monkeypatch):
    def refuse(source, columns):
        raise AssertionError("rows are read")

    monkeypatch.setattr(source_layouts, "with_image_files", refuse)
    assert data([{"prompt": "hi"}], max_images=0).fingerprints()
    assert data([{"prompt": "hi"}], images="the policy is a text-only model").fingerprints()
    with pytest.raises(AssertionError, match="rows are read"):
        data([{"prompt": "hi"}])


def test_parquet_and_saved_datasets_hold_images(models, tmp_path):
    import datasets

    rows = {"prompt": ["hi", "ho"], "images": [[{"bytes": RED, "path": None}], []]}
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        section = DataSection(train=(SourceSection(path=str(path)),), shuffle=False)
        train_data = TrainData(section, load_tokenizer(models()), "prompts", 0, images=ImageTokens(models()))
        turns = [train_data.template.encode_prompt(row) for row in train_data.take(2)]
        assert [[i.data for i in turn.images] for turn in turns] == [[RED], []]


# ------------------------------------------------------------------------- observations and chats


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_an_observation_with_images_is_a_users_message(data, family):
    template = data([{"prompt": "hi"}], family=family).template
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
    parts = [PLACE, PLACE, {"type": "text", "text": "look"}]
    text = template.chat.text([*turns, {"role": "user", "content": parts}], answer=True)
    turn = template.observations.encode("look", closed=False, images=[RED, BLUE])
    prefix = template.chat.text(turns[:1], answer=True) + "a"
    assert [i.data for i in turn.images] == [RED, BLUE]
    assert list(short_ids(turn.ids, turn.images)) == template.tokenizer(text.removeprefix(prefix))["input_ids"]
    marked = template.observations.encode("look " + template.images.marks(1), images=[RED])
    assert [i.data for i in marked.images] == [RED]
    with pytest.raises(DataError, match="image 0: the image cannot be read"):
        template.observations.encode("look", images=[b"x"])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_messages_for_programs_have_a_part_for_each_placeholder_of_a_text(data, family):
    mark = {"qwen2_5_vl": "<|image_pad|>", "llava": "<image>"}[family]
    talk = [{"role": "user", "content": f"a{mark}b"}, ANSWER, {"role": "user", "content": [PLACE]}]
    rows = data([{"prompt": talk, "images": ["red.png", "blue.jpg"]}], family=family)
    [row] = rows.take(1)
    if family == "qwen2_5_vl":  # whose template writes other tokens around a part
        with pytest.raises(DataError, match="differently from the placeholder in the prompt"):
            rows.template.prompt_messages(row)
        return
    turn = rows.template.messages.encode(rows.template.prompt_messages(row))
    assert replace(turn, messages=(), text="") == replace(rows.template.encode_prompt(row), text="")
    assert [i.data for i in turn.images] == [RED, BLUE]


def test_a_chat_with_images_goes_on_token_by_token(data):
    rows = data([{"prompt": USER, "images": ["red.png", "blue.jpg"]}])
    [row] = rows.take(1)
    template = rows.template
    messages = template.prompt_messages(row)
    assert json.loads(json.dumps(messages))[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    first = template.messages.encode(messages)
    assert replace(first, messages=()) == template.encode_prompt(row)
    question = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(RED)}}]}]
    answer = {"role": "assistant", "content": "a"}
    following = template.messages.encode_following(messages, answer, question, closed=False)
    sampled = template.tokenizer("a")["input_ids"]
    full = template.messages.encode([*messages, answer, *question])
    assert [*first.ids, *sampled, *following.ids] == list(full.ids)
    assert [i.data for i in following.images] == [RED]
    with pytest.raises(DataError, match="only rows of local files may contain"):
        template.messages.encode([{"role": "user", "content": [{"type": "image", "path": "red.png"}]}])


def test_an_image_of_a_tool_stands_between_its_texts(data):
    template = data([{"prompt": "hi"}]).template
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(RED)}}]}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "a", "tool_calls": [call]}
    parts = [{"type": "text", "text": "here"}, {"type": "image_url", "image_url": {"url": url(BLUE)}}]
    results = [{"role": "tool", "tool_call_id": "1", "content": [*parts, {"type": "text", "text": "there"}]}]
    first, full = template.messages.encode(messages), template.messages.encode([*messages, answer, *results])
    following = template.messages.encode_following(messages, answer, results, closed=False)
    assert [*first.ids, *template.tokenizer("a")["input_ids"], *following.ids] == list(full.ids)
    assert [i.data for i in full.images] == [RED, BLUE]
    [image] = following.images
    front, rest = (
        template.tokenizer.decode(part) for part in (following.ids[: image.start], following.ids[image.start :])
    )
    assert front.endswith("here<|vision_start|>")
    assert "<|vision_end|>there<eos>" in rest


def test_a_placeholder_that_a_program_writes_is_refused(data):
    template = data([{"prompt": "hi"}]).template
    with pytest.raises(DataError, match="1 placeholder for images in the text, but 0 images"):
        template.messages.encode([{"role": "user", "content": "what is <|image_pad|>?"}])
    with pytest.raises(DataError, match="1 placeholder for images in the text, but 0 images"):
        template.observations.encode("what is <|image_pad|>?")


def test_the_preview_shows_images_as_their_size(data):
    from rlhf_runtime.data.preview import preview

    result = preview(data([{"prompt": "hi", "images": "red.png", "response": "x"}], "demonstrations"), 1)
    [sequence] = result["shown"][0]["sequences"]
    assert "<|vision_start|>[image 40x24]<|vision_end|>hi" in "".join(sequence["texts"])
    assert len(sequence["texts"]) == sequence["tokens"]


def test_objects_of_a_python_program_become_files(models, tmp_path):
    import numpy
    from rlhf_runtime.python.object_files import ObjectFiles

    pixels = numpy.zeros((24, 40, 3), numpy.uint8)
    values = [opened(RED)[0], pixels, BLUE, [str(tmp_path / "red.png")]]
    (tmp_path / "red.png").write_bytes(RED)
    path = ObjectFiles(tmp_path / "run").rows("train", [{"prompt": "hi", "images": value} for value in values])
    section = DataSection(train=(SourceSection(path=path),), shuffle=False)
    rows = TrainData(section, load_tokenizer(models()), "prompts", 0, images=ImageTokens(models()))
    images = [rows.template.encode_prompt(row).images[0] for row in rows.take(4)]
    pictures = [image for [image] in (opened(i.data) for i in images)]
    assert [i.size for i in pictures] == [(40, 24), (40, 24), (24, 40), (40, 24)]
    assert pictures[0].tobytes() == pictures[3].tobytes() == opened(RED)[0].tobytes()
    assert images[2].data == BLUE
    with pytest.raises(DataError, match=r"row 1, 'vectors'.*the pixel mode 'F'; use 8 bits per channel"):
        ObjectFiles(tmp_path / "other").rows("train", [{"prompt": "hi"}, {"vectors": numpy.ones((3, 4), "float32")}])


def test_an_environments_images_cross_a_process():
    from rlhf.types import EnvStep
    from rlhf_runtime.calls.plugin_process import plain
    from rlhf_runtime.calls.returned_values import InvalidResult, check_step, step_from_json

    step = EnvStep("look", images=(RED, BLUE))
    assert step_from_json(json.loads(json.dumps(check_step(step), default=plain))) == step
    with pytest.raises(InvalidResult, match="allowed: contents of image files, bytes"):
        check_step(EnvStep(images=["red.png"]))


PARTS_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% for p in m.content %}"
    "{{ '<|image_pad|>' if p.type == 'image' else p.text if p.type == 'text' }}{% endfor %}{{ '<eos>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As SmolVLM's and LLaVA's: content that is a text is left out."""


def test_a_template_that_reads_parts_only_gets_parts(data, tmp_path):
    (tmp_path / "parts.jinja").write_text(PARTS_ONLY)
    rows = [{"prompt": "hi", "response": "yes"}, {"prompt": "hi", "response": "no", "images": "red.png"}]
    demos = data(rows, "demonstrations", chat_template=str(tmp_path / "parts.jinja"))
    decode = demos.template.tokenizer.decode
    for row, image in zip(demos.take(2), ("", "<|image_pad|>"), strict=True):
        [sequence] = demos.examples([row])[0].sequences
        text = decode(short_ids(sequence.ids, sequence.images))
        assert text == f"<|im_start|>user\n{image}hi<eos>\n<|im_start|>assistant\n{row['response']}<eos>"
        trained = [i for i, m in zip(sequence.ids, sequence.loss_mask, strict=True) if m]
        assert decode(trained) == f"{row['response']}<eos>"
    assert demos.template.observations.encode("more").text == "\nuser\nmore\nassistant\n"
