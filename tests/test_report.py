"""The report: right numbers, whole whatever is missing, self-contained, no backend."""

import html
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import chart_scales
from jaxtrain.charts import Series, line_chart
from jaxtrain.layout_audit import audit
from jaxtrain.mesh import make_mesh
from jaxtrain.metrics import JsonlWriter
from jaxtrain.report import write_report
from jaxtrain.report_run import read_run


def record(step: int, **more) -> dict:
    """A training record; the loss falls from 6 towards 2."""
    return {
        "step": step,
        "loss": 2.0 + 4.0 * math.exp(-step / 100),
        "grad_norm": 1.0 / step,
        "learning_rate": 1e-3,
        "tokens": step * 2048,
        "samples": step * 32,
        "samples_per_second": 781.25,
        "tokens_per_second": 50_000.0,
        "step_seconds": 0.04,
        "input_wait_seconds": 0.001,
        "host_seconds": 0.002,
        "read_seconds": 0.003,
        "h2d_seconds": 0.001,
        "mfu": None,
        **more,
    }


def init(key):
    del key
    return {"layer": {"kernel": jnp.zeros((64, 16)), "bias": jnp.zeros((3,))}}, {}


def apply(params, model_state, batch, *, key, train):
    del params, key, train
    return batch, model_state


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A workdir with every file."""
    workdir = tmp_path_factory.mktemp("runs") / "first <run>"
    writer = JsonlWriter(workdir / "metrics.jsonl")
    for step in range(10, 401, 10):
        writer.write(record(step, **({"checkpoint_seconds": 0.25} if step == 200 else {})))
        if step % 100 == 0:
            loss = 2.1 + 4.0 * math.exp(-step / 100) + (0.5 if step == 400 else 0.0)
            evaluation = {"eval": True, "loss": loss, "accuracy": step / 800, "rows": 360.0}
            evaluation["eval_seconds"] = 1.5
            writer.write({"step": step, **evaluation})
    writer.close()
    layout = audit((init, apply), make_mesh("fsdp:8"), optax.adam(1e-3), allow_replicated=1)
    (workdir / "audit.json").write_text(json.dumps(layout.to_json()))
    config = {"num_steps": 400, "seed": 0, "mesh": "fsdp:8", "precision": "float32"}
    config |= {"optimizer": {"learning_rate": 0.5, "name": "adamw"}, "model": {"num_layers": 7}}
    files = {
        "config.json": {
            "config": config,
            "changed": {"mesh": "fsdp:-1", "optimizer.learning_rate": 0.001},
            "versions": {"jax": "0.12.0", "python": "3.12.1"},
        },
        "run.json": {
            "describe": {
                "bigram entropy": 2.9,
                "some other loss": 99.0,
                "parameters": 1_049_216,
                "source": "<b>text</b>",
            },
            "compile_seconds": 7.5,
            "memory": {"argument": 1024, "temp": 2048, "total": 3072},
            "environment": {"devices": "8 x cpu", "command": "python train.py '--workdir=a b'"},
        },
    }
    for name, content in files.items():
        (workdir / name).write_text(json.dumps(content))
    return workdir


@pytest.fixture
def workdir(whole, tmp_path) -> Path:
    """A copy to take things away from."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


class _Checker(html.parser.HTMLParser):
    """Checks that every element is closed in order, and collects the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and data.strip():
            self.text.append(data.strip())


def render(workdir: Path) -> tuple[str, str]:
    """The page of a workdir, checked, and its text."""
    path = write_report(workdir)
    assert path == workdir / "report.html"
    page = path.read_text(encoding="ascii")
    # Self-contained: nothing that a browser would fetch or run.
    assert not re.search(r"<script|<link|<img|<iframe|@import|src=|https?:|javascript:", page)
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert len(re.findall(r'<clipPath id="(\w+)"', page)) == len(
        set(re.findall(r'<clipPath id="(\w+)"', page))
    )
    assert "nan" not in re.sub(r">[^<]*<", "><", page)  # no coordinate is one
    return page, "\n".join(_Checker(page).text)


def tile(page: str, name: str) -> tuple[str, str]:
    """Value and note of a tile."""
    pattern = rf'"name">{name}</div><div class="value">(.*?)</div><div class="more">(.*?)</div>'
    match = re.search(pattern, page)
    assert match is not None, name
    return re.sub(r"</?small>", "", match[1]), match[2]


def test_headline(whole):
    page, text = render(whole)
    assert "<title>first &lt;run&gt; - jaxtrain</title>" in page
    assert "finished" in text
    assert "step 400 of 400" in text
    assert "8 x cpu" in text
    assert "mesh fsdp:8" in text
    best = f"best {2.1 + 4 * math.exp(-3):.3f} at step 300"
    last = 2.6 + 4 * math.exp(-4)
    note = f"at step 400; {best}; {2.9 - last:.4f} below bigram entropy; 360 rows"
    assert tile(page, "Evaluation loss") == (f"{last:.3f}", note)
    assert tile(page, "Evaluation accuracy") == ("0.5000", "at step 400")
    assert tile(page, "Training loss")[0] == f"{2 + 4 * math.exp(-4):.3f}"
    assert tile(page, "Throughput") == ("50.0k tokens/s", "median; 40.0 ms a step")
    assert tile(page, "Tokens seen") == ("819k", "12,800 rows")
    assert tile(page, "Memory per device")[0] == "3.00 KiB"
    assert "Utilisation" not in page  # mfu is null on a CPU


def test_where_the_time_went(whole):
    run = read_run(whole)
    # 400 steps: 37 ms compute, 1 ms waiting (a quarter of it for transfers), 2 ms Python.
    expected = {
        "compute": 400 * 0.037,
        "input wait": 400 * 0.00075,
        "transfer wait": 400 * 0.00025,
        "logging/host": 400 * 0.002,
        "evaluation": 4 * 1.5,
        "checkpoint": 0.25,
        "compile": 7.5,
    }
    assert run.time_parts == pytest.approx(expected)
    page, text = render(whole)
    assert "Limited by compute." in text
    assert tile(page, "Time") == ("0:30", "7.50 s of it compiling")
    shares = dict(re.findall(r"</span>([a-z/ ]+)</td>.*?<td.*?>[^<]*</td><td.*?>([0-9.]+)%", page))
    total = sum(expected.values())
    assert {name: float(share) for name, share in shares.items()} == pytest.approx(
        {name: 100 * seconds / total for name, seconds in expected.items()}, abs=0.051
    )


def test_time_that_no_record_accounts_for(workdir):
    (workdir / "run.json").write_text(json.dumps({"wall_seconds": 100.0}))
    assert read_run(workdir).time_parts["other"] == pytest.approx(100 - 400 * 0.04 - 6.25)
    (workdir / "run.json").write_text(json.dumps({"wall_seconds": 100, "checkpoint_seconds": 2}))
    assert read_run(workdir).time_parts["checkpoint"] == 2.25
    assert read_run(workdir).time_parts["other"] == pytest.approx(100 - 400 * 0.04 - 8.25)
    (workdir / "run.json").write_text(json.dumps({"wall_seconds": 1.0}))
    assert "other" not in read_run(workdir).time_parts


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"input_wait_seconds": 0.02, "read_seconds": 0.03}, "Limited by input. Steps wait"),
        ({"input_wait_seconds": 0.02, "h2d_seconds": 0.03}, "Limited by transfer. Steps wait"),
        ({"host_seconds": 0.03}, "Limited by logging/host. Python around the step"),
    ],
)
def test_what_limits_the_run(tmp_path, times, verdict):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        writer.write(record(step, **times))
    writer.close()
    assert verdict in render(tmp_path)[1].replace("\n", " ")


def test_steps_covered_by_records(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in (1010, 1020, 1030, 1035):  # begun from another run's checkpoint
        writer.write(record(step))
    writer.close()
    assert read_run(tmp_path).steps_covered() == [10, 10, 10, 5]


def test_the_curve_is_where_the_axis_says(tmp_path):
    losses = [6.0, 3.5, 2.25, 3.0, 2.0]
    points = [(float(step), loss) for step, loss in enumerate(losses, start=1)]
    chart = line_chart([Series("training", "s1", points)], width=600, height=300)
    ticks = re.findall(r'<text class="tick" x="[\d.]+" y="([\d.]+)">([\d.]+)</text>', chart)
    pixels, values = np.array(ticks, float).T
    slope, offset = np.polyfit(pixels - 4, values, 1)  # texts stand 4 pixels below their line
    (path,) = re.findall(r'class="line s1" d="M([^"]*)"', chart)
    drawn = [float(point.split()[1]) for point in path.split("L")]
    np.testing.assert_allclose(slope * np.array(drawn) + offset, losses, atol=0.02)
    log = line_chart([Series("training", "s1", points)], width=600, height=300, log=True)
    ticks = re.findall(r'<text class="tick" x="[\d.]+" y="([\d.]+)">([\d.]+)</text>', log)
    pixels, values = np.array(ticks, float).T
    slope, offset = np.polyfit(pixels - 4, np.log(values), 1)
    (path,) = re.findall(r'class="line s1" d="M([^"]*)"', log)
    drawn = [float(point.split()[1]) for point in path.split("L")]
    np.testing.assert_allclose(np.exp(slope * np.array(drawn) + offset), losses, rtol=0.01)


def test_thinning_keeps_the_extremes_and_the_typical_value():
    points = [(float(i), 1.0) for i in range(100_000)]
    points[77_777] = (77_777.0, 50.0)
    frame = chart_scales.Frame(1000, 300, (0.0, 99_999.0), (0.0, 50.0))
    columns = chart_scales.columns_of(points, frame)
    assert len(columns) <= 240
    assert max(high for _, _, _, high in columns) == 50.0
    assert {median for _, median, _, _ in columns} == {1.0}
    rows = [[float(i), 1.0] for i in range(1000)]
    rows[500][1] = 101.0
    means = chart_scales.column_means(rows)
    assert sum(mean for _, mean in means) / len(means) == pytest.approx(1.1, rel=0.05)


def test_the_size_of_the_page_does_not_grow_with_the_run(whole, tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 5001):
        writer.write(record(step))
    writer.close()
    page, _ = render(tmp_path)
    assert len(page) < 400_000


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("low", "high"), [(0.1, 0.9), (2.0, 5.6), (3.0, 3.001), (1e-4, 1e-3), (1, 1e6), (0.99, 1.01)]
)
def test_ticks_are_round_and_inside(low, high, log):
    values = chart_scales.ticks(low, high, log, 5)
    assert 2 <= len(values) <= 14
    assert all(low * (1 - 1e-9) <= value <= high * (1 + 1e-9) for value in values)
    assert values == sorted(set(values))
    assert all(len(f"{value:.4g}") <= 7 for value in values)


def test_the_loss_is_shown_with_what_it_is_compared_with(whole):
    page, text = render(whole)
    assert page.count('line class="reference"') == 2  # linear and logarithmic
    assert "bigram entropy 2.900" in text
    assert "parameters 1" not in text  # a fact, not a loss
    assert "some other loss" in text  # but it would flatten the curve


def test_the_steep_first_steps_do_not_flatten_the_rest(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 1001):
        writer.write(record(step, loss=50.0 - step if step < 10 else 3.0 - step / 1000))
    writer.close()
    page, text = render(tmp_path)
    assert "The first steps, up to 49.00, are above the frame." in text
    linear, logarithmic = page.split('<div class="pane">')[1:]
    labels = [re.findall(r'class="tick" x=[^>]*>([\d.]+)<', part) for part in (linear, logarithmic)]
    assert max(map(float, labels[0])) < 3.5
    assert max(map(float, labels[1])) > 30


def test_configuration_shows_what_was_changed(workdir):
    _, text = render(workdir)
    after = text[text.index("changed from the default") :]
    changed, rest = after.split("the rest of the configuration")
    assert "mesh\nfsdp:8\nfsdp:-1" in changed
    assert "optimizer.learning_rate\n0.5\n0.001" in changed
    assert "seed" not in changed
    assert "seed\n0" in rest
    assert "model.num_layers\n7" in rest


def test_a_configuration_without_a_list_of_changes_is_shown_whole(workdir):
    config = json.loads((workdir / "config.json").read_text())
    del config["changed"]
    (workdir / "config.json").write_text(json.dumps(config))
    _, text = render(workdir)
    assert "changed from the default" not in text
    assert "configuration (7 fields)" in text


def test_layout_and_environment(whole):
    page, text = render(whole)
    assert "params: 2 arrays, 524 B per device" in text
    assert re.search(r"layer/kernel\nfloat32\[64, 16\]\n-\nP\('fsdp'.*\n512 B\n", text)
    assert re.search(r"opt_state: \d arrays", text)
    assert "python train.py '--workdir=a b'" in text
    assert "<b>text</b>" in text  # as text
    assert "<b>text</b>" not in page
    assert "jax\n0.12.0" in text


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "run.json", "audit.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[1, 2]", b"{}"])
def test_a_missing_or_broken_file_breaks_nothing(workdir, name, content):
    (workdir / name).unlink()
    if content is not None:
        (workdir / name).write_bytes(content)
    _, text = render(workdir)
    if content != b"{}" or name == "metrics.jsonl":
        assert f"{name} (" in text
    assert ("Evaluation loss" in text) == (name != "metrics.jsonl")


def test_an_empty_directory(tmp_path):
    _, text = render(tmp_path)
    assert "no records" in text
    assert "config.json (not there)" in text


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1, "loss": 5.5}],
        [{"step": 0, "loss": 5.5}],
        [{"step": 0, "loss": 5.5}, {"step": 9, "loss": float("nan")}],
        [record(1)],
        [record(1), record(2)],
        [{"step": 3, "eval": True, "loss": 1.0, "accuracy": 0.5}],
        [record(s, loss=3.0, grad_norm=0.0) for s in range(1, 9)],
        [record(s, loss=-1.0 * s) for s in range(1, 9)],
        [record(s, loss=0.0, step_seconds=0.0) for s in range(1, 9)],
        [record(s, loss=float("nan"), grad_norm=float("inf")) for s in range(1, 9)],
        [record(s, loss=1e30**s) for s in range(1, 9)],
        [record(7), record(7), record(5)],
    ],
)
def test_runs_that_are_odd(tmp_path, records):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for one in records:
        writer.write(one)
    writer.close()
    _, text = render(tmp_path)
    assert f"step {max(one['step'] for one in records)}" in text


def test_values_that_are_not_finite_are_seen(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 30):
        writer.write(record(step, loss=float("nan") if step == 17 else 3.0 - step / 20))
    writer.close()
    page, text = render(tmp_path)
    assert "1 logged loss not finite" in text
    assert "training at step 17: nan" in page
    assert tile(page, "Training loss")[0] == f"{3 - 29 / 20:.3f}"


def test_a_run_that_did_not_finish_says_so(workdir):
    config = json.loads((workdir / "config.json").read_text())
    config["config"]["num_steps"] = 500
    (workdir / "config.json").write_text(json.dumps(config))
    assert "not finished\nstep 400 of 500" in render(workdir)[1]


def test_no_backend_and_no_leftovers(workdir):
    code = "import sys; from jaxtrain.report import write_report; write_report(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(workdir)],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "a_backend_that_cannot_start"},
    )
    before = (workdir / "report.html").read_bytes()
    assert sorted(path.name for path in workdir.iterdir()) == [
        "audit.json",
        "config.json",
        "metrics.jsonl",
        "report.html",
        "run.json",
    ]
    write_report(workdir)
    assert (workdir / "report.html").read_bytes() == before  # a function of the files
