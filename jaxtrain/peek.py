"""`--peek=N`: the first rows of the training data, exactly as the model will see them.

They are read as a run from step 0 reads them: in its order, with its random changes. Printed are
the arrays of a batch, then each row: tokens as text, cut where one document or piece ends and the
next begins, with the positions that the loss leaves out; images by class and brightness. Where
there are images, `workdir/peek.html` shows them: one file that needs nothing else.

Legend: R rows, T length, H height, W width, C channels.
"""

import base64
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config import RunConfig
from jaxtrain.data.sources import as_dataset, dataset_indices, name_of, read_training, require_rows
from jaxtrain.output_files import replace_file

Decode = Callable[[Sequence[int]], str]

_SHOWN_RANGES = 8


def peek(
    train_data: Any,
    config: RunConfig,
    *,
    decode: Decode | None = None,
    class_names: Sequence[str] = (),
) -> str:
    """Returns what there is to print; writes `peek.html` where there are images and a workdir.

    Args:
        train_data: a Dataset, or what `as_dataset` makes one of.
        config: its `peek` rows are shown (at most as many as a batch has and the data holds).
        decode: tokens -> text; None: tokens are shown as numbers.
        class_names: of the labels 0, 1, ...; those without a name are shown as numbers.

    Raises:
        DataError: when there are no rows, or they cannot be read.
    """
    dataset = as_dataset(train_data)
    require_rows(dataset, "training")
    positions_R = np.arange(min(config.peek, config.global_batch_size, len(dataset)))
    indices_R = dataset_indices(dataset, config.seed, positions_R)
    arrays = read_training(dataset, indices_R, config.seed, positions_R)
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    lines = [f"{name_of(dataset)}: {len(dataset):,} rows; a batch of {config.global_batch_size} is"]
    for name, array in arrays.items():
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        lines.append(f"  {name}: {dtype}{[config.global_batch_size, *array.shape[1:]]}")
    titles = [f"row {row} of the data, sample {at} of the run" for at, row in enumerate(indices_R)]
    for at, title in enumerate(titles):
        row = {name: array[at] for name, array in arrays.items()}
        lines += [title, *(f"  {line}" for line in row_lines(row, decode, class_names))]
    images = [name for name, array in arrays.items() if _is_image(array[0])]
    if images and config.workdir and jax.process_index() == 0:
        os.makedirs(config.workdir, exist_ok=True)
        path = Path(config.workdir) / "peek.html"
        cells = [
            _cell(
                title,
                arrays[images[0]][at],
                _label({n: a[at] for n, a in arrays.items()}, class_names),
            )
            for at, title in enumerate(titles)
        ]
        replace_file(path, _page(lines[: len(arrays) + 1], cells).encode())
        lines.append(f"the images are in {path}")
    return "\n".join(lines)


def row_lines(
    row: Mapping[str, np.ndarray], decode: Decode | None, class_names: Sequence[str]
) -> Iterator[str]:
    """Yields what is said of one row (arrays without a dim of rows)."""
    label = _label(row, class_names)
    if label:
        yield f"label: {label}"
    for name, array in row.items():
        if name == "tokens" and array.ndim == 1:
            yield from _text_lines(row, decode)
        elif name == "loss_mask":
            yield from _mask_lines(array)
        elif name != "label" and array.size:
            shape = f"{list(array.shape)} " if array.ndim else ""
            yield f"{name}: {shape}{array.min():.4g} to {array.max():.4g}, mean {array.mean():.4g}"


def _text_lines(row: Mapping[str, np.ndarray], decode: Decode | None) -> Iterator[str]:
    """The pieces of a row; segment 0 is padding."""
    tokens_T = row["tokens"]
    segment_T = row.get("segment_ids", np.ones(len(tokens_T), np.int32))
    cuts = [0, *(np.flatnonzero(np.diff(segment_T)) + 1).tolist(), len(tokens_T)]
    for start, stop in itertools.pairwise(cuts):
        piece = tokens_T[start:stop].tolist()
        if not segment_T[start]:
            yield f"padding [{start}:{stop}]"
            continue
        name = f"segment {segment_T[start]}" if "segment_ids" in row else "text"
        # Escaped: a terminal must not obey what stands in the data.
        yield f"{name} [{start}:{stop}]: {ascii(decode(piece)) if decode else piece}"


def _mask_lines(mask: np.ndarray) -> Iterator[str]:
    if not mask.ndim:
        yield f"loss_mask: {float(mask):g}"
        return
    is_left_out = mask.reshape(-1) == 0
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_left_out, [False]))))
    ranges = [f"[{start}:{stop}]" for start, stop in edges.reshape(-1, 2).tolist()]
    more = f" and {len(ranges) - _SHOWN_RANGES} more" if len(ranges) > _SHOWN_RANGES else ""
    left_out = f"; left out: {' '.join(ranges[:_SHOWN_RANGES])}{more}" if ranges else ""
    yield f"loss_mask: {int((~is_left_out).sum())} of {mask.size} positions count{left_out}"


def _label(row: Mapping[str, np.ndarray], class_names: Sequence[str]) -> str:
    if "label" not in row or row["label"].ndim:
        return ""
    number = int(row["label"])
    is_named = 0 <= number < len(class_names)
    return f"{number} ({class_names[number]})" if is_named else str(number)


def _is_image(array: np.ndarray) -> bool:
    return array.ndim == 3 and array.shape[-1] in (1, 3)


def _cell(title: str, image_HWC: np.ndarray, label: str) -> str:
    """An image with its class; brightness as it is, 0 black, 1 or 255 white, or stretched."""
    from jaxtrain.data.image_decode import png

    low, high, note = 0.0, 255.0 if image_HWC.dtype == np.uint8 else 1.0, ""
    if image_HWC.min() < 0 or image_HWC.max() > high:
        low, high = float(image_HWC.min()), float(image_HWC.max())
        note = f"; {low:.4g} is black, {high:.4g} white"
    values = (image_HWC.astype(np.float64) - low) / ((high - low) or 1.0) * 255
    data = base64.b64encode(png(np.round(values).astype(np.uint8))).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(title)}">'
        f"<figcaption><b>{escape(label)}</b><br>{escape(title + note)}</figcaption></figure>"
    )


def _page(head: Sequence[str], cells: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<title>training data - jaxtrain</title>\n<style>\n"
        "body { font: 14px sans-serif; margin: 2em; }\n"
        "figure { display: inline-block; width: 160px; margin: 0 1em 1em 0; }\n"
        "img { width: 160px; image-rendering: pixelated; border: 1px solid #888; }\n"
        f"</style>\n</head>\n<body>\n<pre>{escape(chr(10).join(head))}</pre>\n"
        f"{''.join(cells)}\n</body>\n</html>\n"
    )
