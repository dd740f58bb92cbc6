"""Token shards as datasets: the rows of one stream of tokens, and files that are not whole."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import preparing
import pytest

from jaxtrain import cli
from jaxtrain.data import shards as shards_lib
from jaxtrain.data.manifest import Manifest
from jaxtrain.data.prepare import PrepareConfig, prepare
from jaxtrain.data.shards import shard_datasets
from jaxtrain.data.text import text_datasets, tokenizer_of
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.windows import TextDataset
from jaxtrain.errors import ConfigError, DataError, ExitCode

T = 16


def make(folder, texts, **options):
    """Prepares texts as JSON lines; returns the directory of the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PrepareConfig(**{"shard_bytes": 3000, "workers": 1, **options})
    prepare([str(path)], str(folder / "out"), config)
    return folder / "out"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """10 shards or so of 100 documents."""
    texts = [preparing.text(f"s{i}", 60) for i in range(100)]
    return make(tmp_path_factory.mktemp("shards"), texts)


@pytest.fixture
def copy(out, tmp_path):
    target = tmp_path / "copy"
    subprocess.run(["cp", "-r", out, target], check=True)
    return target


def load(source, **options):
    return text_datasets(TextDataConfig(source=str(source), sequence_length=T, **options))


def reference_rows(stream):
    """(tokens, targets, mask) of the windows of a list of tokens, in plain Python."""
    rows = []
    for start in range(0, len(stream) - 1, T):
        window = list(stream[start : start + T + 1])
        real = len(window) - 1
        window += [0] * (T + 1 - len(window))
        rows.append((window[:-1], window[1:], [1.0] * real + [0.0] * (T - real)))
    return rows


def test_rows_are_the_windows_of_every_shard(out):
    train, held_out, info = load(out, validation_fraction=0)
    manifest = Manifest.read(str(out))
    assert len(manifest.shards) >= 5
    expected = []
    for shard in manifest.shards:
        data = (out / shard.file).read_bytes()
        expected += reference_rows(np.frombuffer(data, np.uint8).tolist())
    assert held_out is None
    assert len(train) == len(expected)
    rng = np.random.default_rng(0)
    # Few rows of many parts, and many rows of few.
    for indices in (np.arange(len(train)), rng.permutation(len(train))[:32], np.array([3, 3, 0])):
        rows = train.read(indices)
        for position, name in enumerate(("tokens", "targets", "loss_mask")):
            wanted = [expected[index][position] for index in indices]
            np.testing.assert_array_equal(rows[name], wanted)
        dtypes = [rows[name].dtype.name for name in ("tokens", "targets", "loss_mask")]
        assert dtypes == ["int32", "int32", "float32"]
    assert info.train_tokens == sum(shard.tokens - 1 for shard in manifest.shards)
    assert train.num_bytes == 0


def test_bytes_in_one_shard_are_the_rows_of_the_text_itself(tmp_path):
    texts = [preparing.text(i, 60) for i in range(20)]
    shards = make(tmp_path, texts, shard_bytes=0)
    ours, _, info = load(shards, validation_fraction=0)
    text, _, text_info = load(tmp_path / "in.jsonl", validation_fraction=0)
    for name, array in text.read(np.arange(len(text))).items():
        np.testing.assert_array_equal(ours.read(np.arange(len(ours)))[name], array)
    assert info.train_tokens == text_info.train_tokens
    name = "validation_entropy_order_2"
    assert info.facts(ours)[name] == text_info.facts(text)[name]


def test_the_ends_of_the_shards_are_held_out_by_whole_documents(out):
    train, held_out, info = load(out, validation_fraction=0.1)
    manifest = Manifest.read(str(out))
    share = info.eval_tokens / (info.train_tokens + info.eval_tokens)
    assert 0.05 < share < 0.2
    documents = {"train": [], "held out": []}
    for name, data in (("train", train), ("held out", held_out)):
        for stream in data._streams:
            assert stream[0] == stream[-1] == manifest.end_of_document
            documents[name] += bytes(stream[1:-1].astype(np.uint8)).split(b"\xff")
    whole = [preparing.text(f"s{i}", 60).encode() for i in range(100)]
    assert sorted(documents["train"] + documents["held out"]) == sorted(whole)
    # Each token but the first of a shard is a target on one side.
    assert info.train_tokens + info.eval_tokens == manifest.tokens - len(manifest.shards)


def test_a_lone_document_is_cut(tmp_path):
    shards = make(tmp_path, [preparing.text(0, 900)])
    _, _, info = load(shards, validation_fraction=0.1)
    assert info.eval_tokens / (info.train_tokens + info.eval_tokens) == pytest.approx(0.1, abs=0.01)


def test_several_roots_are_one_dataset(tmp_path):
    texts = {name: [preparing.text(name + str(i), 60) for i in range(9)] for name in "ab"}
    a, b = (make(tmp_path / name, texts[name]) for name in "ab")
    both, _, info = load(f"{a},{b}", validation_fraction=0)
    parts = [load(root, validation_fraction=0)[0] for root in (a, b)]
    for name in ("tokens", "targets", "loss_mask"):
        wanted = np.concatenate([part.read(np.arange(len(part)))[name] for part in parts])
        np.testing.assert_array_equal(both.read(np.arange(len(both)))[name], wanted)
    assert both.fingerprint not in {part.fingerprint for part in parts}
    assert load(tmp_path / "*" / "out", validation_fraction=0)[0].fingerprint == both.fingerprint
    assert "18 documents" in info.summary()
    other = make(tmp_path / "c", texts["a"], tokenizer="bpe:300")
    with pytest.raises(DataError, match=r"/out and .*c/out are not of one tokenizer: tok"):
        load(f"{a},{other}")
    with pytest.raises(ConfigError, match=r"names token shards .* and other files"):
        load(f"{a},{tmp_path / 'a' / 'in.jsonl'}")


def test_the_fingerprint_follows_the_content(tmp_path):
    texts = [preparing.text(i, 60) for i in range(9)]
    first = load(make(tmp_path / "a", texts))[0].fingerprint
    again = load(make(tmp_path / "b", texts))[0].fingerprint
    changed = load(make(tmp_path / "c", [*texts[:-1], texts[-1][:-2] + "!"]))[0].fingerprint
    assert first == again != changed


def test_large_vocabularies_take_four_bytes():
    streams = [np.arange(70_000, 70_100, dtype=np.uint32)]
    rows = TextDataset(streams, T, vocab_size=80_000).read(np.arange(6))
    np.testing.assert_array_equal(rows["tokens"].reshape(-1), np.arange(70_000, 70_096))
    np.testing.assert_array_equal(rows["targets"].reshape(-1), np.arange(70_001, 70_097))


def test_the_vocabulary_is_checked_against_the_model(out):
    info = load(out)[2]
    info.check_vocabulary(256)
    message = r"model.vocab_size=200 is smaller than the 256 tokens of .* \(tokenizer bytes\)"
    with pytest.raises(ConfigError, match=message):
        info.check_vocabulary(200)


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    copy = make(tmp_path, [preparing.text(f"s{i}", 60) for i in range(100)], tokenizer="bpe:300")
    path = copy / "shard-00002.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[5] = 999
    tokens.tofile(path)
    train, _, _ = load(copy, validation_fraction=0)
    with pytest.raises(DataError, match=r"shard-00002.bin holds the token 999, outside its vocab"):
        train.read(np.arange(len(train)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: os.remove(p / "shard-00001.bin"), "shard-00001.bin, named by manifest.json"),
        (lambda p: os.remove(p / "shard-00001.idx"), "shard-00001.idx, named by manifest.json"),
        (lambda p: os.truncate(p / "shard-00001.bin", 100), "is cut off: it has 100 bytes"),
        (lambda p: (p / "shard-00000.idx").write_bytes(b"x" * 9999), "is too long: it has 9999"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text('{"version": 2}'), "has version 2 of"),
    ],
)  # fmt: skip
def test_files_that_are_not_whole_are_named_at_once(copy, damage, message):
    damage(copy)
    with pytest.raises(DataError, match=message) as caught:
        load(copy)
    assert caught.value.exit_code == ExitCode.UNUSABLE


def test_checksums_find_a_changed_byte(copy, capsys):
    cli.main(["jaxtrain", "verify-shards", str(copy)])
    assert re.fullmatch(rf"{copy}: \d+ shards, all whole\n", capsys.readouterr().out)
    with open(copy / "shard-00003.bin", "r+b") as file:
        file.seek(10)
        byte = file.read(1)
        file.seek(10)
        file.write(bytes([byte[0] ^ 1]))
    load(copy)
    with pytest.raises(SystemExit) as ended:
        cli.main(["jaxtrain", "verify-shards", str(copy)])
    assert ended.value.code == ExitCode.UNUSABLE
    assert "shard-00003.bin: not the checksum of manifest.json" in capsys.readouterr().err


def test_a_shard_that_shrinks_in_use_is_an_error_and_no_dead_process(copy):
    script = f"""
import os
import numpy as np
from jaxtrain.data.shards import shard_datasets
data = shard_datasets({str(copy)!r}, {T})[0]
data.read(np.arange(len(data)))
os.truncate({str(copy / "shard-00002.bin")!r}, 0)
try:
    data.read(np.arange(len(data)))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.returncode
    assert done.stdout.startswith("DataError ")
    assert "shard-00002.bin shrank from" in done.stdout


def test_an_unfinished_preparation_is_named(copy):
    (copy / ".prepare").mkdir()
    load(copy)  # only its tidying up is missing
    os.remove(copy / "manifest.json")
    with pytest.raises(DataError, match=r"has not come to its end; run the same jaxtrain prepare"):
        load(copy)


def test_options_of_text_are_refused(out):
    for option in ({"json_field": "body"}, {"on_bad_bytes": "replace"}):
        with pytest.raises(ConfigError, match=r"is read from text only, and .* holds token"):
            load(out, **option)


def test_too_few_tokens_are_an_error_with_numbers(tmp_path):
    shards = make(tmp_path, ["tiny"])
    with pytest.raises(DataError, match=r"5 training tokens are fewer than one row of .*length=16"):
        load(shards, validation_fraction=0)
    with pytest.raises(DataError, match="is no directory of token shards"):
        shard_datasets(str(tmp_path / "in.jsonl"), T)


def test_a_folder_of_text_with_a_manifest_of_its_own_is_text(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "mine", "name": "a book"}')
    (tmp_path / "a.txt").write_text("some text " * 20)
    assert load(tmp_path)[2].counts.files == 2


def test_the_tokenizer_lies_beside_the_shards(tmp_path):
    texts = [preparing.text(i, 60) for i in range(9)]
    shards = make(tmp_path, texts, tokenizer="bpe:300")
    config = TextDataConfig(source=str(shards))
    tokenizer = tokenizer_of(config)
    assert tokenizer.decode(tokenizer.encode([texts[0].encode()])[0]) == texts[0]
    assert tokenizer_of(TextDataConfig()).name == "bytes"
    (shards / "tokenizer.json").write_bytes((shards / "tokenizer.json").read_bytes() + b" ")
    with pytest.raises(DataError, match="is not the tokenizer that made the shards"):
        tokenizer_of(config)


def test_many_shards_raise_the_limit_of_open_files(monkeypatch):
    calls = []
    monkeypatch.setattr(shards_lib.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(shards_lib.resource, "setrlimit", lambda _, limits: calls.append(limits))
    shards_lib._allow_descriptors(500)
    assert calls == []
    shards_lib._allow_descriptors(2000)
    assert calls == [(3024, 4096)]
    with pytest.raises(DataError, match=r"9,000 shards are mapped at once, .* \(ulimit -n 10024\)"):
        shards_lib._allow_descriptors(9000)
