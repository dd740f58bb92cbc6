"""--data.cache_dir: text that is unpacked once."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import preparing
import processes
import pytest

from jaxtrain.data import text_cache
from jaxtrain.data.manifest import Manifest
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.file_lock import lock_file

TEXTS = [preparing.text(f"t{i}", 60) for i in range(200)]


def packed(path, texts, *, bad=()):
    """JSON lines, compressed; the lines `bad` are none."""
    lines = [json.dumps({"text": text}) for text in texts]
    for number in bad:
        lines[number] = "{"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.fixture
def source(tmp_path):
    return packed(tmp_path / "d.jsonl.gz", TEXTS)


def opened(source, tmp_path, **options):
    options = {"validation_fraction": 0, "shuffle": False, "sequence_length": 64, **options}
    config = TextDataConfig(source=str(source), cache_dir=str(tmp_path / "cache"), **options)
    return text_datasets(config)


def stream(dataset):
    """The bytes of all rows that count, one behind the other."""
    rows = dataset.read(np.arange(len(dataset)))
    return bytes(rows["targets"][rows["loss_mask"] > 0].astype(np.uint8))


def entries(tmp_path):
    return sorted(os.listdir(tmp_path / "cache"))


def test_text_comes_back_and_is_unpacked_once(source, tmp_path, monkeypatch):
    train, _, info = opened(source, tmp_path)
    wanted = b"".join(text.encode() + b"\xff" for text in TEXTS)
    assert stream(train) == wanted
    assert info.manifests[0].dtype == "uint8"
    monkeypatch.setattr(text_cache, "make_shards", None)
    again, _, _ = opened(source, tmp_path)
    assert again.fingerprint == train.fingerprint
    assert stream(again) == wanted


def test_a_file_that_changes_is_unpacked_anew(source, tmp_path):
    opened(source, tmp_path)
    status = source.stat()
    packed(source, [*TEXTS[1:], TEXTS[0]])
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    train, _, _ = opened(source, tmp_path)
    assert stream(train).startswith(TEXTS[1].encode())
    assert len(entries(tmp_path)) == 2


def test_the_size_is_announced_and_bounded(source, tmp_path, caplog):
    size = sum(map(len, TEXTS))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "other").write_bytes(bytes(1000))
    with pytest.raises(ConfigError, match=r"cache_gib=.* needs more than the .* that are left"):
        opened(source, tmp_path, cache_gib=size / 2**30)
    assert entries(tmp_path) == ["other"]
    with caplog.at_level("INFO", "jaxtrain"):
        opened(source, tmp_path, cache_gib=2 * (size + 1000) / 2**30)
    assert "cache, which holds 1000 B: unpacking about" in caplog.text


def test_a_bound_without_a_cache_is_refused():
    with pytest.raises(ConfigError, match=r"cache_gib=1 limits data\.cache_dir, which is empty"):
        TextDataConfig(cache_gib=1)


def test_token_shards_need_no_cache(source, tmp_path):
    preparing.prepare(source, tmp_path / "shards")
    with pytest.raises(ConfigError, match=r"cache_dir=.* they are mapped as they lie: leave it"):
        opened(tmp_path / "shards", tmp_path)


def test_documents_that_were_left_out_count_at_every_start(tmp_path):
    source = packed(tmp_path / "d.jsonl.gz", TEXTS, bad=(1, 2))
    message = r"^d\.jsonl\.gz:2 is not JSON .*"
    with pytest.raises(DataError, match=message):
        opened(source, tmp_path)
    train, _, _ = opened(source, tmp_path, on_error="skip:2")
    assert stream(train) == b"".join(t.encode() + b"\xff" for t in [TEXTS[0], *TEXTS[3:]])
    with pytest.raises(DataError, match=r"2 bad documents of .* were left out .*=skip:1; allow"):
        opened(source, tmp_path, on_error="skip:1")


def test_a_field_that_is_not_there_names_the_flag_of_the_run(source, tmp_path):
    with pytest.raises(DataError, match=r"no field 'body' .* with --data\.json_field"):
        opened(source, tmp_path, json_field="body")


SCRIPT = """
import sys
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.progress import setup_logging
setup_logging()
config = TextDataConfig(source=sys.argv[1], cache_dir=sys.argv[2], validation_fraction=0)
print("opened", text_datasets(config)[0].fingerprint)
"""


def started(source, tmp_path):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "cache")],
        env=processes.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(process, word):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError("".join(lines))


def test_processes_that_start_together_wait_for_the_one_that_unpacks(source, tmp_path):
    opened(source, tmp_path)
    (name,) = entries(tmp_path)
    out = tmp_path / "cache" / name
    (out / "manifest.json").unlink()
    (out / ".prepare").mkdir()
    with lock_file(out / ".prepare" / "lock", ValueError):
        waiting = [started(source, tmp_path) for _ in range(2)]
        for process in waiting:
            read_until(process, f"waiting: OUT={out} is being prepared by process {os.getpid()}")
        assert not (out / "manifest.json").exists()
    ends = [process.communicate(timeout=60)[0].splitlines()[-1] for process in waiting]
    assert [process.returncode for process in waiting] == [0, 0]
    assert ends[0] == ends[1]
    assert ends[0].startswith("opened ")
    assert entries(tmp_path) == [name]
    Manifest.read(str(out)).verify()
    assert not (out / ".prepare").exists()
