"""Image files: every form of an image becomes an RGB file that trainers, engines and programs read alike."""

import base64
import io

import numpy
import pytest
from PIL import Image
from rlhf.errors import DataError
from rlhf_runtime.data.image_files import data_url, image_file


def opened(data):
    return Image.open(io.BytesIO(data))


FORMS = {
    "transparent": (Image.new("RGBA", (40, 24), (255, 0, 0, 0)), "PNG", (255, 0, 0)),
    "palette": (Image.new("RGB", (40, 24), "blue").convert("P"), "GIF", (0, 0, 255)),
    "bitmap": (Image.new("RGB", (40, 24), "blue"), "BMP", (0, 0, 255)),
    "tiff": (Image.new("RGB", (40, 24), "blue"), "TIFF", (0, 0, 255)),
    "one pixel": (Image.new("RGB", (1, 1), "red"), "PNG", (255, 0, 0)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_image_becomes_rgb_in_a_format_that_programs_know(form):
    image, file_format, colour = FORMS[form]
    file = io.BytesIO()
    image.save(file, file_format)
    data = image_file(file.getvalue(), None)
    result = opened(data)
    assert (result.mode, result.size, result.getpixel((0, 0))) == ("RGB", image.size, colour)
    assert data_url(data).startswith("data:image/png;base64,")
    assert image_file(data, None) == data == image_file(image, None)


def test_a_palette_with_a_transparent_colour_becomes_a_file_without_transparency():
    file = io.BytesIO()
    Image.new("P", (4, 4)).save(file, "PNG", transparency=0)
    assert "transparency" in opened(file.getvalue()).info
    assert "transparency" not in opened(image_file(file.getvalue(), None)).info


def test_a_program_that_draws_an_image_is_not_run():
    file = io.BytesIO()
    Image.new("RGB", (40, 24)).save(file, "EPS")
    with pytest.raises(DataError, match=r"is a program \(EPS\), which is not run; convert it to PNG"):
        image_file(file.getvalue(), None)


def test_a_turned_image_of_pil_is_turned_as_its_file_is():
    picture, file = Image.new("RGB", (40, 24)), io.BytesIO()
    exif = picture.getexif()
    exif[274] = 6
    picture.save(file, "JPEG", exif=exif)
    for source in (file.getvalue(), opened(file.getvalue())):
        assert opened(image_file(source, None)).size == (24, 40)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("uint16", (24, 40), "the image has the pixel mode 'I;16'; use 8 bits per channel"),
        ("float32", (24, 40), "the image has the pixel mode 'F'; use 8 bits per channel"),
        ("float32", (24, 40, 3), r"an array of shape \(24, 40, 3\) is not an image"),
        ("uint8", (0, 40, 3), r"an array of shape \(0, 40, 3\) is not an image"),
    ],
)
def test_pixels_that_would_be_cut_off_at_255_are_refused(kind, shape, message):
    with pytest.raises(DataError, match=message):
        image_file(numpy.ones(shape, kind), None)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_an_image_in_base64_without_a_data_url_is_named_by_its_start(form, tmp_path):
    file = io.BytesIO()
    Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), "uint8")).save(file, form, quality=100)
    with pytest.raises(DataError, match=r"is too long for a path.*in base64, write it as a data: URL"):
        image_file(base64.b64encode(file.getvalue()).decode(), tmp_path)
