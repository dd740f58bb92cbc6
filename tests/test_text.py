"""Text: documents as they really are, large files, packing, and the way to the devices."""

import json
import logging
import mmap
import os
import time

import numpy as np
import pytest
from texting import load, many_files, read, stream_of, write

from jaxtrain.data import documents as documents_lib
from jaxtrain.data import text as text_lib
from jaxtrain.data.files import find_files
from jaxtrain.data.load import Loader, eval_batches
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.tokenizing import SEPARATOR, ByteTokenizer
from jaxtrain.errors import ConfigError, DataError, ExitCode
from jaxtrain.mesh import make_mesh

D1_JSONL = b"\r\n".join(
    [b'\xef\xbb\xbf{"text":"a"}', b"", b'{"text":"b"}', b'{"text":""}', b'{"text":"\xff"}']
    + [b'{"text":"z"}']
)


# Case D1


def test_d1_json_lines(tmp_path):
    write(tmp_path, {"d.jsonl": D1_JSONL.replace(b"\xff", b"c")})
    documents, reader = read(tmp_path / "d.jsonl")
    assert documents == [b"a", b"b", b"c", b"z"]
    assert reader.counts.empty_documents == 1
    assert reader.counts.notes() == ["1 document without text"]
    reader.raise_problems()


def test_d1_bad_byte_in_json_lines(tmp_path):
    write(tmp_path, {"d.jsonl": D1_JSONL})
    with pytest.raises(DataError) as caught:
        load(tmp_path / "d.jsonl")
    offset = D1_JSONL.index(b"\xff")
    assert f"d.jsonl:5 (byte offset {offset}) is not UTF-8: byte 0xff" in str(caught.value)
    assert "--data.on_bad_bytes=replace" in str(caught.value)
    assert caught.value.exit_code == ExitCode.UNUSABLE
    documents, reader = read(tmp_path / "d.jsonl", replace=True)
    assert documents == [b"a", b"b", "\N{REPLACEMENT CHARACTER}".encode(), b"z"]
    assert reader.counts.replaced_bytes == 1
    assert "1 bad byte replaced" in reader.counts.notes()
    reader.raise_problems()


def test_d1_a_line_that_is_only_a_bad_byte_is_dropped_and_counted(tmp_path):
    write(tmp_path, {"d.jsonl": b'{"text":"a"}\r\n\xff\r\n{"text":"b"}'})
    with pytest.raises(DataError, match=r"d.jsonl:2 \(byte offset 14\)"):
        load(tmp_path / "d.jsonl")
    documents, reader = read(tmp_path / "d.jsonl", replace=True)
    assert documents == [b"a", b"b"]
    assert (reader.counts.replaced_bytes, reader.counts.dropped_records) == (1, 1)
    assert "1 broken record dropped" in reader.counts.notes()


def test_d1_plain_text(tmp_path):
    write(tmp_path, {"d.txt": b"\xef\xbb\xbfa\r\n\r\nb\r\nlast"})
    assert read(tmp_path / "d.txt")[0] == [b"a\n\nb\nlast"]
    write(tmp_path, {"d.txt": b"\xef\xbb\xbfa\r\n\r\nb\xff\xffc\r\nlast"})
    with pytest.raises(DataError, match=r"d.txt:3 \(byte offset 9\) is not UTF-8: byte 0xff"):
        load(tmp_path / "d.txt")
    documents, reader = read(tmp_path / "d.txt", replace=True)
    assert documents == ["a\n\nb\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}c\nlast".encode()]
    assert reader.counts.replaced_bytes == 2


def test_the_field_of_json_lines_says_nothing_to_a_plain_file(tmp_path):
    write(tmp_path, {"a.txt": "some text, long enough"})
    message = r"json_field=body is read from files of records only \(JSON lines, Parquet.*"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, json_field="body")


def test_d1_a_file_of_no_bytes_is_skipped_with_a_warning(tmp_path, caplog):
    write(tmp_path, {"a.txt": "some text, long enough", "b.txt": b"", "c.txt": b"\xef\xbb\xbf"})
    train, _, info = load(tmp_path, sequence_length=4)
    assert info.counts.empty_files == ["b.txt"]
    assert info.counts.empty_documents == 1
    assert stream_of(train).startswith(b"\xffsome text")
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "1 empty file skipped (b.txt)" in warnings[0]


@pytest.mark.parametrize("contents", [b"", b"\xef\xbb\xbf"])
def test_d1_nothing_left_is_an_error(tmp_path, contents):
    write(tmp_path, {"a.txt": contents})
    for source in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(DataError, match=r"no training data in data.source="):
            load(source)


# Documents


def test_a_bad_byte_far_into_a_file_is_located(tmp_path, monkeypatch):
    # Pieces of 8 bytes split many of the two-byte characters before it.
    monkeypatch.setattr(documents_lib, "_DECODED_BYTES", 8)
    text = "na\u00efve\n" * 50
    data = text.encode() + b"x\xe9t\xe9\n" + text.encode()
    write(tmp_path, {"a.txt": data})
    offset = len(text.encode()) + 1
    with pytest.raises(DataError, match=rf"a.txt:51 \(byte offset {offset}\).*byte 0xe9"):
        load(tmp_path)
    documents, reader = read(tmp_path / "a.txt", replace=True)
    assert documents == [data.decode("utf-8", "replace").encode()]
    assert reader.counts.replaced_bytes == 2
    # A replacement character that was there before is not counted.
    write(tmp_path, {"a.txt": "\N{REPLACEMENT CHARACTER} \u00e9" + "x" * 20})
    assert read(tmp_path / "a.txt", replace=True)[1].counts.replaced_bytes == 0


def test_a_character_cut_off_at_the_end_is_a_bad_byte(tmp_path):
    write(tmp_path, {"a.txt": "abc\u00e9".encode()[:-1]})
    with pytest.raises(DataError, match=r"a.txt:1 \(byte offset 3\)"):
        load(tmp_path)


def test_all_bad_files_are_named_at_once(tmp_path):
    write(tmp_path, {**{f"f{i}.txt": b"ok\n\xff" for i in range(7)}, "good.txt": "good"})
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert [f"f{i}.txt:2 (byte offset 3)" in message for i in range(7)] == [True] * 5 + [False] * 2
    assert message.endswith("and 2 more files")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops}", "d.jsonl:2 is not JSON"),
        (b'["a"]', "d.jsonl:2 has no field 'text' .it has: list."),
        (b'{"body":"x","id":1}', "d.jsonl:2 has no field 'text' .it has: body, id."),
        (b'{"text":5}', "d.jsonl:2 has int, not text, in field 'text'"),
        (rb'{"text":"\ud800"}', "d.jsonl:2 escapes half a surrogate pair"),
        (b"[" * 100_000, "d.jsonl:2 is not JSON"),
    ],
)
def test_records_that_hold_no_text_are_named(tmp_path, line, message):
    write(tmp_path, {"d.jsonl": b'{"text":"a"}\n' + line + b'\n{"text":"b"}\n'})
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_half_a_surrogate_pair_can_be_replaced(tmp_path):
    write(tmp_path, {"d.jsonl": rb'{"text":"x\ud800y\ud83d\ude00"}'})
    documents, reader = read(tmp_path / "d.jsonl", replace=True)
    assert documents == ["x\N{REPLACEMENT CHARACTER}y\N{GRINNING FACE}".encode()]
    assert reader.counts.replaced_bytes == 1


def test_the_field_of_json_lines_can_be_chosen(tmp_path):
    write(tmp_path, {"d.ndjson": json.dumps({"body": "x\r\ny", "text": "no"})})
    assert read(tmp_path / "d.ndjson", json_field="body")[0] == [b"x\ny"]


def test_binary_files_are_skipped_in_a_folder_and_an_error_alone(tmp_path, caplog):
    write(tmp_path, {"picture.png": b"\x89PNG\0\0", "a.txt": "plain text " * 3})
    _, _, info = load(tmp_path, sequence_length=4)
    assert info.counts.binary_files == ["picture.png"]
    assert "1 binary file skipped (picture.png)" in caplog.text
    write(tmp_path, {"wide.txt": "text".encode("utf-16")})
    with pytest.raises(DataError, match=r"wide.txt holds NUL bytes: .*iconv -f utf-16 -t utf-8"):
        load(tmp_path / "wide.txt")


def test_files_of_a_folder_are_found_in_a_fixed_order(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": "1",
            "a/z.txt": "2",
            "a/b/c.md": "3",
            "a.txt": "4",
            "q.txt": "5",
            ".hidden": "6",
            ".git/config": "7",
            "__pycache__/x.py": "8",
        },
    )
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    found = [file.relative for file in find_files(str(tmp_path))]
    # The folder a is reached by its name and by a link to it, but read once.
    assert found == ["a.txt", "a/b/c.md", "a/z.txt", "b.txt", "q.txt"]


def test_a_source_may_be_globs_and_lists_over_several_roots(tmp_path):
    a, b = tmp_path / "disk1", tmp_path / "disk2"
    write(a, {"x/z.txt": "1", "x/y.txt": "2", "w.jsonl": "3"})
    write(b, {"x/z.txt": "4", "odd,name*.txt": "5"})
    names = lambda source: [file.relative for file in find_files(str(source))]  # noqa: E731
    assert names(f"{b}, {a}") == [
        "disk2/odd,name*.txt",
        "disk2/x/z.txt",
        "disk1/w.jsonl",
        "disk1/x/y.txt",
        "disk1/x/z.txt",
    ]
    assert names(tmp_path / "disk*" / "**" / "z.txt") == ["z.txt", "z.txt"]
    assert [file.path for file in find_files(f"{a}/x/z.txt,{a}/x/*.txt")] == [
        f"{a}/x/z.txt",
        f"{a}/x/y.txt",
    ]
    # What exists is taken as it stands.
    assert names(b / "odd,name*.txt") == ["odd,name*.txt"]


def test_missing_and_unreadable_sources_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"data.source=/no/such does not exist; give stdlib, or"):
        load("/no/such")
    with pytest.raises(DataError, match=r"data.source=/no/such\*.txt matches nothing; give stdlib"):
        load("/no/such*.txt")
    with pytest.raises(DataError, match=r"'/no/such' in data.source=.* does not exist; give"):
        load("stdlib,/no/such")
    with pytest.raises(DataError, match="the folder holds no files"):
        load(tmp_path)
    write(tmp_path, {"a.txt": "text " * 100})
    monkeypatch.setattr(text_lib, "_available_memory", lambda: 999)
    with pytest.raises(DataError, match=r"has 500 B in files .* and 999 B are free"):
        load(tmp_path)
    monkeypatch.undo()

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path / "a.txt"))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"a.txt cannot be read: Permission denied"):
        load(tmp_path)


# Large files


def is_mapped(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def test_large_files_are_mapped_and_give_the_same_text(tmp_path, monkeypatch):
    lines = "".join(f"line {i}: caf\u00e9\n" for i in range(300))
    write(
        tmp_path, {"large.txt": b"\xef\xbb\xbf" + lines.encode(), "small.txt": "small text\n" * 8}
    )
    monkeypatch.setattr(text_lib, "MAPPED_BYTES", 1000)
    monkeypatch.setattr(documents_lib, "_DECODED_BYTES", 64)
    train, held_out, info = load(tmp_path, sequence_length=16, validation_fraction=0.1)
    assert info.counts.documents == 2
    maps = [stream for stream in train._streams if is_mapped(stream)]
    assert len(maps) == 1
    assert bytes(maps[0]) == lines.encode()[: len(maps[0])]
    rows = train.read(np.arange(len(train)))
    counted = bytes(rows["targets"][rows["loss_mask"] > 0].astype(np.uint8))
    assert lines.encode()[1 : len(maps[0])] in counted
    assert b"small text\nsmall text" in counted
    total = len(lines.encode()) + 8 * 11
    assert 0.05 < held_out.num_tokens / total < 0.2
    # A file that shrinks while it is mapped must not kill the process.
    os.truncate(tmp_path / "large.txt", 500)
    with pytest.raises(DataError, match=r"large.txt shrank from .* to 500 bytes"):
        train.read(np.arange(len(train)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"\xff", r"a.txt:101 \(byte offset 600\) is not UTF-8"),
        (b"\r\n", "a.txt has Windows line ends and is too large"),
        (b"\xe9", r"a.txt:101 \(byte offset 600\)"),
    ],
)
def test_large_files_are_checked_before_they_are_mapped(tmp_path, monkeypatch, bad, message):
    monkeypatch.setattr(text_lib, "MAPPED_BYTES", 100)
    for piece in (7, 64, 601, 2**20):
        monkeypatch.setattr(documents_lib, "_DECODED_BYTES", piece)
        write(tmp_path, {"a.txt": b"hello\n" * 100 + bad + b"more\n"})
        with pytest.raises(DataError, match=message):
            load(tmp_path, sequence_length=8)
        # A lone carriage return is no Windows line end.
        write(tmp_path, {"a.txt": b"hello\n" * 100 + b"50%\r100%\n"})
        load(tmp_path, sequence_length=8)


# The standard library, and the whole way to the devices


def test_stdlib_is_there_split_by_file_and_fast():
    started = time.process_time()  # whatever else the machine does
    train, held_out, info = text_datasets(TextDataConfig())
    seconds = time.process_time() - started
    again = text_datasets(TextDataConfig())[0]
    assert info.split == "files"
    assert info.counts.notes() == []
    assert info.train_tokens > 5_000_000
    assert 0.02 < info.eval_tokens / info.train_tokens < 0.1
    assert train.fingerprint == again.fingerprint
    assert all(not file.relative.startswith("test/") for file in find_files("stdlib"))
    # 0.07 s on an idle core.
    assert seconds < 2
    text = ByteTokenizer().decode(held_out.read(np.arange(20))["tokens"].reshape(-1))
    assert "import" in text or "def " in text


def test_batches_of_text_reach_the_devices_as_they_stand_in_the_file(tmp_path):
    text = "".join(f"{i:06d}" for i in range(300))
    write(tmp_path, {"a.txt": text})
    train, held_out, _ = load(tmp_path, sequence_length=6, validation_fraction=0.1)
    mesh = make_mesh("data:2,fsdp:4")
    counted = 0.0
    seen = []
    for arrays, _ in eval_batches(held_out, mesh, batch_size=8):
        mask = np.asarray(arrays["loss_mask"])
        counted += mask.sum()
        seen.append(np.asarray(arrays["targets"])[mask > 0])
    assert counted == held_out.num_tokens
    assert bytes(np.concatenate(seen).astype(np.uint8)) == stream_of(held_out)[1:]
    with Loader(train, mesh, global_batch_size=len(train) // 8 * 8, seed=0) as loader:
        arrays = next(loader).arrays
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "loss_mask": "float32",
    }
    for row, mask in zip(*(np.asarray(arrays[k]) for k in ("targets", "loss_mask")), strict=True):
        assert ByteTokenizer().decode(row[mask > 0]).strip("\n") in text


def test_order_off_reads_the_text_from_start_to_end(tmp_path):
    write(tmp_path, {"a.txt": "abcdefghijklmnopqrstuvwxyz"})
    train, _, _ = load(tmp_path, sequence_length=3, validation_fraction=0, shuffle=False)
    with Loader(train, make_mesh("data:8"), global_batch_size=8) as loader:
        arrays = next(loader).arrays
    assert (
        ByteTokenizer().decode(np.asarray(arrays["targets"]).reshape(-1))
        == "abcdefghijklmnopqrstuvwx"
    )


# Packing


@pytest.mark.parametrize("policy", ["split", "best_fit"])
def test_packed_text_has_the_targets_of_the_stream(tmp_path, policy):
    write(tmp_path, {"a.txt": "one", "b.jsonl": '{"text":"two two"}\n{"text":"three"}'})
    plain, _, _ = load(tmp_path, sequence_length=8, validation_fraction=0)
    packed, held_out, info = load(
        tmp_path, sequence_length=8, validation_fraction=0, packing=policy
    )
    rows = packed.read(np.arange(len(packed)))
    assert (rows["loss_mask"] == (rows["segment_ids"] > 0)).all()
    targets = rows["targets"][rows["loss_mask"] > 0]
    assert sorted(targets.tolist()) == sorted(stream_of(plain)[1:])
    assert info.train_tokens == packed.num_tokens == plain.num_tokens == 18
    assert held_out is None
    # A document begins with its separator, which nothing of another one stands before.
    begins = (rows["positions"] == 0) & (rows["segment_ids"] > 0)
    assert (rows["tokens"][begins] == SEPARATOR).sum() == 3
    assert begins.sum() == {"split": 5, "best_fit": 3}[policy]
    assert f"3 documents packed by {policy} into 3 rows of 8 tokens, 75.00 % full" in info.summary()
    assert "a token attends to its own document" in info.summary()
    across, _, info = load(
        tmp_path, sequence_length=8, packing=policy, cross_document_attention=True
    )
    assert set(across.read(np.array([0]))) == {"tokens", "targets", "loss_mask"}
    assert "a token attends to the whole row" in info.summary()


def test_packed_text_is_held_out_and_measured_as_the_stream_is(tmp_path):
    source = many_files(tmp_path)
    facts = []
    for packing in ("none", "best_fit"):
        _, held_out, info = load(source, validation_fraction=0.1, packing=packing)
        facts.append(info.facts(held_out))
    data = [fact.pop("data") for fact in facts]
    assert facts[0] == facts[1]
    assert "validation_entropy_order_2" in facts[0]
    assert data[1].startswith(data[0] + "; ")


def test_packing_a_mapped_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lib, "MAPPED_BYTES", 100)
    write(tmp_path, {"a.txt": "some text\n" * 20})
    with pytest.raises(ConfigError, match=r"packing=split packs documents, and .*a.txt is used as"):
        load(tmp_path, sequence_length=8, packing="split")
    with pytest.raises(ConfigError, match="cross_document_attention=true is read only with packin"):
        TextDataConfig(cross_document_attention=True)
