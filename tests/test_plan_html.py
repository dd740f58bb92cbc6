"""plan.html: the bars and the names are there, in the text and on the screen."""

import dataclasses
import json
import re
import shutil
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
from planning import lm_builder

from jaxtrain import RunConfig
from jaxtrain.charts import stacked_bar
from jaxtrain.models.transformer import TransformerConfig
from jaxtrain.plan import commands, html
from jaxtrain.plan.planner import Planner
from jaxtrain.plan.targets import parse_target

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
LENGTH = 32
MODEL = TransformerConfig(
    vocab_size=128, num_layers=2, embed_dim=64, num_heads=4, mlp_dim=128, scan_unroll=1
)
build = lm_builder(MODEL, LENGTH)


@pytest.fixture(scope="module")
def plan():
    """A real plan, given a ranking of three."""
    run = RunConfig(global_batch_size=8, mesh="fsdp:4,tensor:2", remat="full")
    plan = Planner(build, run, parse_target("cpu:8")).plan(run)
    other = dataclasses.replace(plan, reason="data:8 is 1.21x slower: its <sums>", fits=False)
    best = dataclasses.replace(plan, reason="fsdp:4,tensor:2 is the fastest")
    estimate = {
        "mesh": {"data": 1, "fsdp": 8, "tensor": 1}, "remat": "dots", "accumulate_steps": 4,
        "step_seconds": 0.25, "bytes_per_device": 3 * 2**30,
    }  # fmt: skip
    return dataclasses.replace(
        best, ranking=(best, other, other), estimates=(estimate,), num_considered=60
    )


@pytest.fixture(scope="module")
def page(plan):
    """Made from what `plan.json` holds."""
    return html.page(json.loads(json.dumps(plan.to_json())))


def read_png(path):
    """Pixels [height, width, 3] of a picture with 8 bits per channel (the PNG specification)."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, _, color_type = struct.unpack(">IIBB", body[:10])
        packed += body * (kind == b"IDAT")
        at += length + 12
    channels = {2: 3, 6: 4}[color_type]
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, -1)
    above, rows = np.zeros((width, channels), np.uint8), []
    for line in lines:
        row = line[1:].reshape(width, channels)
        if line[0] == 1:
            row = np.cumsum(row, axis=0, dtype=np.uint8)
        elif line[0] == 2:
            row = row + above
        elif line[0] > 2:
            row = _unfiltered(int(line[0]), row, above)
        rows.append(row)
        above = row
    return np.stack(rows)[..., :3]


def _unfiltered(kind, row, above):
    """A row stored as differences to the mean of its neighbours (3) or the nearest of them (4)."""
    result = []
    for channel in range(row.shape[1]):
        left = corner = 0
        values = []
        for x, up in zip(row[:, channel].tolist(), above[:, channel].tolist(), strict=True):
            guess = (left + up) // 2
            if kind == 4:
                near = [(abs(up - corner), left), (abs(left - corner), up)]
                guess = min([*near, (abs(left + up - 2 * corner), corner)], key=lambda n: n[0])[1]
            left, corner = (x + guess) % 256, up
            values.append(left)
        result.append(values)
    return np.array(result, np.uint8).T


class Tags(HTMLParser):
    """Checks that what is opened is closed."""

    VOID = frozenset({"meta", "br", "input", "rect", "line"})

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_well_formed_and_fetches_nothing(page):
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert not re.search(r"<script|<link|@import|url\((?!#)|https?://", page)
    assert all("src" not in attrs for _, attrs in tags.seen)


def test_every_class_of_memory_has_a_bar_and_a_line(page, plan):
    bars = page[page.index("Memory of a device") :]
    bars = bars[: bars.index("</svg>")]
    for name, size in plan.memory.items():
        said = name.replace("_", " ")
        assert f"<title>{said} " in bars
        style = html._CLASSES[name][0]
        assert f'<span class="swatch {style}"></span>{said}</td>' in page
        assert size > 0
    assert "<title>free " in bars
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([\d.]+)"', bars)]
    assert sum(widths) == pytest.approx(1030, abs=2 * len(widths))


def test_the_step_is_a_timeline_with_exposed_communication(page, plan):
    step = page[page.index("Time of a step") :]
    lanes = step.split("</svg>")
    for name in plan.prediction.phases:
        assert f"<title>{name} " in lanes[0]
    for axis, time in plan.communication.items():
        lane = next(lane for lane in lanes if f"communication over {axis}</h3>" in lane)
        assert ("<title>exposed " in lane) == (time.exposed_seconds >= 0)
        assert "<title>hidden " in lane


def test_ranking_has_all_meshes_reasons_and_estimates(page):
    table = page[page.index("Ranked meshes") :]
    assert "60 combinations" in table
    assert table.index("is the fastest") < table.index("1.21x slower: its &lt;sums&gt;")
    assert "mesh fsdp:4,tensor:2, accumulate steps 1, remat full" in table
    assert "<td>fsdp:8</td><td>dots</td>" in table
    assert "3.00 GiB" in table


def test_flags_and_warnings_are_there(page, plan):
    assert f"<code>{' '.join(plan.flags)}</code>" in page
    for warned in plan.warnings:
        assert warned.kind.replace("_", " ") in page
    assert '<span class="pill good">fits</span>' in page


def test_a_plan_that_does_not_fit_says_so_and_marks_the_limit(plan):
    refused = dataclasses.replace(
        plan, fits=False, device_bytes=plan.peak_bytes_per_device // 2, ranking=(), prediction=None
    )
    page = html.page(json.loads(json.dumps(refused.to_json())))
    assert '<span class="pill bad">does not fit</span>' in page
    assert '<line class="limit" x1="515.0"' in page
    assert "<title>free " not in page
    assert "Time of a step" not in page
    assert "Ranked meshes" not in page


def test_a_bar_with_a_limit_is_drawn_to_its_scale():
    inside = stacked_bar([("a", "s1", 25.0)], width=100, height=10, limit=50.0)
    assert 'x="0.0" y="0" width="49.0"' in inside
    assert "limit" not in inside
    beyond = stacked_bar([("a", "s1", 100.0)], width=100, height=10, limit=50.0)
    assert '<line class="limit" x1="50.0"' in beyond
    assert stacked_bar([("a", "s1", 1.0)], width=9, height=9).count("<rect") == 1


def test_plan_writes_both_files(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Planner, "plan", lambda *_: plan)
    run = RunConfig(global_batch_size=8, mesh="fsdp:4,tensor:2", workdir=str(tmp_path / "plans"))
    code = commands.run_plan(build, run, parse_target("cpu:8"))
    assert code == 0
    values = json.loads((tmp_path / "plans/plan.json").read_text())
    assert (tmp_path / "plans/plan.html").read_text() == html.page(values)
    assert "ranking of 3 compiled steps; 60 were estimated" in capsys.readouterr().out


@pytest.mark.skipif(
    BROWSER is None, reason="no browser to look at the page with; apt-get install chromium"
)
def test_bars_are_on_the_screen(page, tmp_path):
    """What a browser draws has the colours of the bars."""
    (tmp_path / "plan.html").write_text(page)
    picture = tmp_path / "plan.png"
    subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--blink-settings=preferredColorScheme=1", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1180,2000", f"--screenshot={picture}", f"{tmp_path / 'plan.html'}",
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    pixels = read_png(picture).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    found = {tuple(map(int, c)): int(n) for c, n in zip(colours, counts, strict=True)}
    for hexadecimal in ("2f6fdb", "d4541b", "8e5bd0"):  # parameters, gradients, optimizer state
        colour = tuple(int(hexadecimal[i : i + 2], 16) for i in (0, 2, 4))
        assert found.get(colour, 0) > 500, (hexadecimal, sys.platform)
