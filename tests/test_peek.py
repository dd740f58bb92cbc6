"""--peek: what it prints and draws is what training gets."""

import base64
import io
import re

import experimenting
import numpy as np
import picturing
import pytest
from PIL import Image

from jaxtrain.config import RunConfig
from jaxtrain.data.images import ImageDataConfig, image_datasets
from jaxtrain.data.load import Loader
from jaxtrain.data.order import sample_indices
from jaxtrain.mesh import make_mesh
from jaxtrain.peek import peek


def shown(page):
    """The pixels of the images in a page, as [R, H, W]."""
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    pixels = []
    for data in found:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            pixels.append(np.asarray(image))
    return np.stack(pixels)


@pytest.fixture
def pictures(tmp_path):
    root = picturing.class_folders(tmp_path / "pictures", 12)
    return image_datasets(ImageDataConfig(source=str(root), augment="crop_flip"))


def test_images_are_those_of_the_first_batch(pictures, tmp_path):
    train, _, info = pictures
    config = RunConfig(peek=5, seed=3, global_batch_size=8, workdir=str(tmp_path / "run"))
    text = peek(train, config, class_names=info.classes)
    with Loader(train, make_mesh("data:8"), global_batch_size=8, seed=3) as loader:
        batch = next(loader).arrays
    page = (tmp_path / "run" / "peek.html").read_text()
    wanted = np.asarray(batch["image"])[:5, ..., 0]
    np.testing.assert_array_equal(shown(page), wanted)
    labels = [f"{label} ({info.classes[label]})" for label in batch["label"][:5].tolist()]
    assert re.findall(r"label: (\d.*)", text) == labels
    assert re.findall(r"<b>(.*?)</b>", page) == labels
    rows = sample_indices(3, len(train), np.arange(5)).tolist()
    assert [int(row) for row in re.findall(r"row (\d+) of the data", text)] == rows
    for line in ("image: uint8[8, 8, 8, 1]", "label: int32[8]", "loss_mask: float32[8]"):
        assert f"  {line}\n" in text
    assert text.endswith(f"the images are in {tmp_path / 'run' / 'peek.html'}")
    # Self-contained, and no control over a terminal.
    assert "http" not in page
    assert text.isascii()


def test_without_a_workdir_nothing_is_written(pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert "peek.html" not in peek(pictures[0], RunConfig(peek=2))
    assert sorted(tmp_path.rglob("*")) == before


def test_images_beyond_0_to_1_are_stretched_and_that_is_said(tmp_path):
    image = np.linspace(-2, 2, 32, dtype=np.float32).reshape(2, 4, 4, 1)
    peek({"image": image}, RunConfig(peek=2, workdir=str(tmp_path)))
    page = (tmp_path / "peek.html").read_text()
    assert (shown(page).min(), shown(page).max()) == (0, 255)
    assert "-2 is black" in page


def test_text_is_shown_by_segment_with_what_the_loss_leaves_out():
    row = {
        "tokens": np.array([[72, 105, 10, 27, 33, 0, 0, 0]], np.int32),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0, 0, 0]], np.int32),
        "loss_mask": np.array([[1, 1, 0, 1, 1, 0, 0, 0]], np.float32),
    }
    text = peek(row, RunConfig(peek=9), decode=lambda tokens: "".join(map(chr, tokens)))
    assert text.splitlines()[1:] == [
        "  tokens: int32[32, 8]",
        "  segment_ids: int32[32, 8]",
        "  loss_mask: float32[32, 8]",
        "row 0 of the data, sample 0 of the run",
        r"  segment 1 [0:3]: 'Hi\n'",
        r"  segment 2 [3:5]: '\x1b!'",
        "  padding [5:8]",
        "  segment_ids: [8] 0 to 2, mean 0.875",
        "  loss_mask: 4 of 8 positions count; left out: [2:3] [5:8]",
    ]


def test_train_lm_shows_the_text_that_it_trains_on(tmp_path):
    source = experimenting.write_text(tmp_path / "text.txt")
    words = [*experimenting.TINY, f"--data.source={source}", "--workdir=", "--peek=3"]
    ended = experimenting.succeed("train_lm", *words)
    pieces = re.findall(r"text \[0:32\]: '(.*)'", ended.out)
    assert len(pieces) == 3
    whole = source.read_text().replace("\n", "\\n")
    assert all(piece in whole for piece in pieces)
    assert "compiled in" not in ended.err
    assert "32 of 32 positions count" in ended.out


def test_train_image_shows_digits_and_can_be_trained_afterwards(tmp_path):
    words = [f"--workdir={tmp_path / 'run'}", "--num_steps=1"]
    ended = experimenting.succeed("train_image", *words, "--peek=2")
    assert "image: float32[64, 8, 8, 1]" in ended.out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["peek.html"]
    experimenting.succeed("train_image", *words, num_devices=1)
