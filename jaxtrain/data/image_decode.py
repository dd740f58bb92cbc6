"""One image file to pixels, whatever kind of image it holds. The only module that imports Pillow.

- Upright: the orientation that a camera wrote into EXIF is applied.
- What is transparent shows white, as on a page, not the colours that happen to lie under it.
- Palettes, CMYK and other colour spaces become red, green and blue; colour becomes grey by luma.
- 16 bits of grey become 8 by scaling (Pillow's own conversion cuts off everything above 255).
  32-bit images have no known range and are refused.
- Of an animation the first picture.

Legend: H height, W width, C channels.
"""

import io

import numpy as np
from PIL import Image, ImageOps

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""Of the files that are taken for images."""

_ORIENTATION = 0x0112
# These turn an image by a quarter, and so exchange height and width.
_TURNED = (5, 6, 7, 8)
_GREY_MODES = ("1", "L", "LA", "La")


class BadImageError(Exception):
    """A file that is no image, or a broken one; its text is the reason, without the file."""


def look_at(path: str) -> tuple[tuple[int, int], bool]:
    """Returns ((height, width) upright, whether it has colour) from the head of a file.

    Raises:
        BadImageError: if it has no head of an image.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            # Asked for EXIF, a PNG that has none in its head is decoded whole, to look behind it.
            is_known = image.format != "PNG" or "exif" in image.info
            if is_known and image.getexif().get(_ORIENTATION) in _TURNED:
                width, height = height, width
            is_grey = image.mode in _GREY_MODES or image.mode.startswith(("I", "F"))
            return (height, width), not is_grey
    except Exception as error:
        raise BadImageError(_reason(error, path)) from error


def decode(path: str, *, size: int, num_channels: int) -> np.ndarray:
    """Returns the pixels of a file, uint8 [H, W, C].

    Args:
        path: of the file.
        size: H and W in pixels: the image is scaled until it covers this square, and what sticks
            out is cut off on both sides alike; 0: as it is.
        num_channels: 1 (grey) or 3 (red, green, blue).

    Raises:
        BadImageError: if it cannot be decoded.
    """
    try:
        with Image.open(path) as file:
            if size:
                # A JPEG of many times the size is decoded at a half, a quarter or an eighth.
                file.draft(None, (size, size))
            ImageOps.exif_transpose(file, in_place=True)
            image = _flat(file, "L" if num_channels == 1 else "RGB")
            if size and image.size != (size, size):
                image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    # Damaged files make Pillow raise errors of many kinds.
    except Exception as error:
        raise BadImageError(_reason(error, path)) from error
    return pixels[:, :, None] if num_channels == 1 else pixels


def _flat(image: Image.Image, mode: str) -> Image.Image:
    """The image without transparency, in mode L or RGB."""
    if image.mode.startswith("I;16"):
        wide = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("it has 32 bits for a pixel, whose range of brightness is not known")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image)
        image = page
    # Pillow would make a copy of what is converted already.
    return image if image.mode == mode else image.convert(mode)


def _reason(error: Exception, path: str) -> str:
    """What is wrong, in one line and without the path, which stands before it."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "it is no image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()).replace(path, "the file")
    return text or type(error).__name__


def png(image_HWC: np.ndarray) -> bytes:
    """A PNG file of pixels, uint8 with 1 or 3 channels."""
    stream = io.BytesIO()
    pixels = image_HWC[:, :, 0] if image_HWC.shape[2] == 1 else image_HWC
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG")
    return stream.getvalue()
