"""Image files of every kind become the pixels that a person would see."""

import numpy as np
import picturing
import pytest
from PIL import Image

from jaxtrain.data.image_decode import BadImageError, decode, look_at

GREY = picturing.grey(0, 6, 10)
COLOR = np.stack([GREY, GREY[::-1], 255 - GREY], axis=-1)


def grey(path, size=0):
    return decode(str(path), size=size, num_channels=1)


def rgb(path, size=0):
    return decode(str(path), size=size, num_channels=3)


def test_grey_and_color_images_keep_their_pixels(tmp_path):
    path = picturing.save(tmp_path / "grey.png", GREY)
    np.testing.assert_array_equal(grey(path)[..., 0], GREY)
    np.testing.assert_array_equal(rgb(path), np.stack([GREY] * 3, axis=-1))
    assert look_at(str(path)) == ((6, 10), False)
    path = picturing.save(tmp_path / "color.png", COLOR)
    np.testing.assert_array_equal(rgb(path), COLOR)
    luma = COLOR @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(grey(path)[..., 0], luma, atol=1)
    assert look_at(str(path)) == ((6, 10), True)


# What each value of EXIF's orientation asks for, written as a function of the stored pixels.
UPRIGHT = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[:, ::-1],
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x.swapaxes(0, 1)[::-1],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_images_are_upright(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(COLOR).save(tmp_path / "turned.png", exif=exif)
    wanted = UPRIGHT[orientation](COLOR)
    np.testing.assert_array_equal(rgb(tmp_path / "turned.png"), wanted)
    assert look_at(str(tmp_path / "turned.png"))[0] == wanted.shape[:2]


def test_what_is_transparent_is_white(tmp_path):
    alpha = np.full(GREY.shape, 255, np.uint8)
    alpha[:, :5] = 0
    alpha[0, 9] = 128
    path = picturing.save(tmp_path / "rgba.png", np.dstack([COLOR, alpha]))
    found = rgb(path)
    np.testing.assert_array_equal(found[:, :5], 255)
    np.testing.assert_array_equal(found[1:, 5:], COLOR[1:, 5:])
    np.testing.assert_allclose(found[0, 9], COLOR[0, 9] / 2 + 127.5, atol=1.5)
    path = picturing.save(tmp_path / "la.png", np.dstack([GREY, alpha]))
    np.testing.assert_array_equal(grey(path)[:, :5], 255)
    np.testing.assert_array_equal(grey(path)[1:, 5:, 0], GREY[1:, 5:])
    assert not look_at(str(path))[1]


def test_palettes_become_their_colors(tmp_path):
    colors = np.random.default_rng(0).integers(0, 256, (50, 3)).astype(np.uint8)
    image = Image.fromarray(GREY)
    image.putpalette(colors.tobytes())
    image.save(tmp_path / "palette.png")
    with Image.open(tmp_path / "palette.png") as stored:
        assert stored.mode == "P"
    np.testing.assert_array_equal(rgb(tmp_path / "palette.png"), colors[GREY])
    image.save(tmp_path / "clear.png", transparency=bytes([0] * 10 + [255] * 40))
    wanted = np.where((GREY < 10)[..., None], 255, colors[GREY])
    np.testing.assert_array_equal(rgb(tmp_path / "clear.png"), wanted)


def test_16_bits_of_grey_are_scaled_and_not_cut_off(tmp_path):
    wide = np.array([[0, 257, 1000, 30_000], [32_896, 40_000, 65_000, 65_535]], np.uint16)
    path = picturing.save(tmp_path / "wide.png", wide)
    np.testing.assert_array_equal(grey(path)[..., 0], np.round(wide / 257).astype(np.uint8))
    assert not look_at(str(path))[1]


def test_32_bits_are_refused(tmp_path):
    path = picturing.save(tmp_path / "float.tif", GREY.astype(np.float32))
    with pytest.raises(BadImageError, match="32 bits for a pixel"):
        grey(path)


def test_black_and_white_and_cmyk(tmp_path):
    Image.fromarray(GREY > 20).save(tmp_path / "one_bit.png")
    np.testing.assert_array_equal(grey(tmp_path / "one_bit.png")[..., 0], (GREY > 20) * 255)
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "red.tif")
    np.testing.assert_array_equal(rgb(tmp_path / "red.tif")[0, 0], [255, 0, 0])


def test_images_are_brought_to_a_square_without_being_squeezed(tmp_path):
    # 40 x 20, white on the outer quarters left and right, a disc's bounding square in the middle.
    wide = np.full((20, 40, 3), 255, np.uint8)
    wide[:, 10:30] = (10, 20, 30)
    path = picturing.save(tmp_path / "wide.png", wide)
    found = rgb(path, size=10)
    assert found.shape == (10, 10, 3)
    np.testing.assert_array_equal(found[:, 1:9], np.broadcast_to([10, 20, 30], (10, 8, 3)))
    # An image of the right size is not touched.
    path = picturing.save(tmp_path / "exact.png", COLOR[:, :6])
    np.testing.assert_array_equal(rgb(path, size=6), COLOR[:, :6])


def test_a_large_jpeg_is_close_to_its_pixels_after_scaling(tmp_path):
    ramp = np.broadcast_to(np.linspace(0, 255, 512).astype(np.uint8)[:, None], (512, 512))
    Image.fromarray(np.ascontiguousarray(ramp)).save(tmp_path / "large.jpg", quality=95)
    found = grey(tmp_path / "large.jpg", size=16)[..., 0]
    np.testing.assert_allclose(found[:, 8], ramp.reshape(16, 32, 512).mean((1, 2)), atol=3)


@pytest.mark.parametrize("ending", ["png", "jpg", "gif", "bmp", "tif"])
def test_a_truncated_file_is_bad_and_named_without_its_path(tmp_path, ending):
    noise = np.random.default_rng(1).integers(0, 256, (64, 64)).astype(np.uint8)
    path = picturing.truncate(picturing.save(tmp_path / f"cut.{ending}", noise))
    with pytest.raises(BadImageError) as caught:
        grey(path)
    assert str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_file_that_is_no_image_is_bad(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.png").write_bytes(b"")
    for name in ("text.png", "empty.png"):
        for read in (grey, lambda path: look_at(str(path))):
            with pytest.raises(BadImageError, match=r"^it is no image$"):
                read(tmp_path / name)
    with pytest.raises(BadImageError, match="No such file"):
        grey(tmp_path / "missing.png")
