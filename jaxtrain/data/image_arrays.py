"""Images that lie in arrays: .npz archives and idx files (the format of MNIST), plain or .gz.

What comes out is {"image": [N, H, W, C], "label": int32 [N]}, read into memory as it was stored.

Legend: N images, H height, W width, C channels.
"""

import gzip
import os
import re
import zipfile
import zlib

import numpy as np

from jaxtrain.errors import DataError

Arrays = dict[str, np.ndarray]

_NPZ_KEYS = (("x", "y", "x_test", "y_test"), ("x_train", "y_train", "x_test", "y_test"))
_IDX_NAME = re.compile(r"(?P<part>.*)images(?P<sep>[-.])idx3(?P<end>[-.]ubyte(\.gz)?)")
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_PARTS = {"train-": "training", "t10k-": "test", "test-": "test"}


def read_npz(path: str) -> tuple[Arrays, Arrays | None]:
    """Returns (images, those of x_test and y_test or None) of an .npz archive.

    Its arrays are x [N, H, W] or [N, H, W, C] and y [N] or [N, 1], or, as Keras names them, x_train
    and y_train; x_test and y_test may be beside them. Pixels are uint8, uint16 or floats.

    Raises:
        DataError: for other keys, shapes or dtypes, and for what is no such archive.
    """
    what = "is not an .npz archive of plain arrays"
    way_out = "write it with numpy.savez(path, x=..., y=...)"
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} {what}, or is truncated; {way_out}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = set(archive.files)
            keys = next((keys for keys in _NPZ_KEYS if set(keys[:2]) <= names), None)
            if keys is None:
                raise DataError(
                    f"{path} must hold arrays x and y, or x_train and y_train (and, if you like,"
                    f" x_test and y_test); it holds {', '.join(sorted(names)) or 'nothing'}"
                )
            test = names & set(keys[2:])
            if len(test) == 1:
                raise DataError(f"{path} has {test.pop()} alone; x_test and y_test go together")
            values = {key: archive[key] for key in keys if key in names}
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} {what} ({error}); {way_out}") from error
    x, y, x_test, y_test = keys
    held_out = None
    if test:
        held_out = _checked(values[x_test], values[y_test], f"{path}: {x_test}", y_test)
    return _checked(values[x], values[y], f"{path}: {x}", y), held_out


def is_idx(path: str) -> bool:
    """Whether a path names an idx file of images, or a folder that holds one."""
    return bool(_idx_files(path))


def read_idx(path: str) -> tuple[Arrays, Arrays | None]:
    """Returns (images, the test images or None) of idx files.

    Args:
        path: of a file of images (...images-idx3-ubyte, .gz): its labels lie beside it; or of the
            folder with train-images..., train-labels... and, for the test, t10k-...

    Raises:
        DataError: for a missing, broken or truncated file.
    """
    found = _idx_files(path)
    if os.path.isfile(path):
        return _read_pair(path), None
    parts: dict[str, str] = {}
    for name in found:
        part = _PARTS.get(_part(name))
        # Plain files sort before their .gz.
        if part:
            parts.setdefault(part, os.path.join(path, name))
    if "training" not in parts:
        raise DataError(
            f"data.source={path} must hold train-images-idx3-ubyte and train-labels-idx1-ubyte"
            f" (or .gz); of images it holds {', '.join(found)}; name one of them, or add those"
        )
    train = _read_pair(parts["training"])
    return train, _read_pair(parts["test"]) if "test" in parts else None


def _idx_files(path: str) -> list[str]:
    if os.path.isdir(path):
        return sorted(name for name in os.listdir(path) if _IDX_NAME.fullmatch(name))
    return [path] if _IDX_NAME.fullmatch(os.path.basename(path)) else []


def _part(name: str) -> str:
    match = _IDX_NAME.fullmatch(name)
    return match["part"] if match else ""


def _read_pair(path: str) -> Arrays:
    """Reads a file of images and the one of labels beside it, compressed or not."""
    folder, name = os.path.split(path)
    labels = name.replace("images", "labels").replace("idx3", "idx1")
    plain = labels.removesuffix(".gz")
    tried = [os.path.join(folder, name) for name in dict.fromkeys((labels, plain, f"{plain}.gz"))]
    label_path = next((path for path in tried if os.path.exists(path)), None)
    if label_path is None:
        raise DataError(f"{path} needs its labels beside it, in {labels}, which does not exist")
    return _checked(_read_array(path), _read_array(label_path), path, label_path)


def _read_array(path: str) -> np.ndarray:
    """Reads one idx file: 0, 0, type, number of dims, the dims (big-endian), the values."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); make or fetch it anew") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_TYPES:
        raise DataError(
            f"{path} is no idx file: it must begin with 0, 0 and a type of"
            f" {', '.join(map(str, _IDX_TYPES))}; it begins with {list(data[:4])}"
        )
    dims, dtype = data[3], np.dtype(_IDX_TYPES[data[2]])
    start = 4 + 4 * dims
    shape = tuple(np.frombuffer(data[4:start], ">u4").tolist()) if len(data) >= start else None
    if shape is None or len(data) - start != int(np.prod(shape)) * dtype.itemsize:
        size = "a header of more" if shape is None else f"values of shape {list(shape)} and more"
        raise DataError(
            f"{path} is truncated or damaged: its header promises {size} bytes than the"
            f" {len(data)} that it has, or fewer; make or fetch it anew"
        )
    values = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _checked(image: np.ndarray, label: np.ndarray, where: str, label_name: str) -> Arrays:
    """Brings images to [N, H, W, C] and labels to int32 [N]."""
    shape = image.shape
    image_NHWC = image[..., None] if image.ndim == 3 else image
    if image_NHWC.ndim != 4 or image_NHWC.shape[-1] not in (1, 3):
        is_first = image.ndim == 4 and shape[1] in (1, 3)
        way_out = (
            "its channels come first, move them with numpy.moveaxis(x, 1, -1)"
            if is_first
            else "give images of one size, grey or red, green and blue"
        )
        raise DataError(
            f"{where} must have shape [N, H, W], or [N, H, W, C] with 1 or 3 channels C; got"
            f" {list(shape)}; {way_out}"
        )
    if image.dtype not in (np.uint8, np.uint16) and image.dtype.kind != "f":
        raise DataError(
            f"{where} has dtype {image.dtype}, whose range of brightness is not known; give uint8"
            f" (0..255), uint16 (0..65535), or floats, which are taken as they are"
        )
    if image.dtype.kind == "f" and not np.isfinite(image).all():
        raise DataError(f"{where} holds values that are not finite; mend or leave out those images")
    label_N = label[:, 0] if label.ndim == 2 and label.shape[1] == 1 else label
    if label_N.ndim != 1 or label_N.dtype.kind not in "iu" or len(label_N) != len(image):
        raise DataError(
            f"{label_name} must hold one whole number for each of the {len(image)} images, its"
            f" class; got {label.dtype}{list(label.shape)}"
        )
    if len(label_N) and not 0 <= label_N.min() <= label_N.max() < 2**31:
        raise DataError(
            f"{label_name}: classes count from 0; got {label_N.min()} to {label_N.max()}"
        )
    return {"image": image_NHWC, "label": label_N.astype(np.int32)}


def scaled(image: np.ndarray) -> np.ndarray:
    """Pixels as they go to the devices: uint8, or float32, to which uint16 is brought as 0..1."""
    if image.dtype == np.uint8:
        return image
    if image.dtype.kind == "u":
        return image.astype(np.float32) / np.float32(np.iinfo(image.dtype).max)
    return image.astype(np.float32, copy=False)
