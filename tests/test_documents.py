"""Documents of compressed and columnar files, and of parts of files read by several processes."""

import gzip
import json
import random

import preparing
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxtrain.data import array_records
from jaxtrain.data import streams as streams_lib
from jaxtrain.data.documents import Reader
from jaxtrain.data.files import find_files
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.errors import DataError


def file_at(path):
    (file,) = find_files(str(path))
    return file


def reader(**options):
    return Reader(**{"replace": False, "json_field": "text", "skip_binary": False, **options})


def texts(count=50):
    rng = random.Random(0)
    return [
        f"{i}: caf\u00e9 " + "\n".join("x" * rng.randrange(40) for _ in range(9))
        for i in range(count)
    ]


def json_lines(documents):
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


def compress(data, ending, frames=1):
    """Several frames after each other, as `cat` and parallel compressors make them."""
    size = -(-len(data) // frames)
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    if ending == ".gz":
        return b"".join(gzip.compress(piece) for piece in pieces)
    return b"".join(pa.Codec("zstd").compress(piece).to_pybytes() for piece in pieces)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("block", [7, 2**24])
def test_compressed_json_lines(tmp_path, monkeypatch, ending, frames, block):
    monkeypatch.setattr(streams_lib, "_BLOCK_BYTES", block)
    path = tmp_path / f"d.jsonl{ending}"
    path.write_bytes(compress(json_lines(texts()), ending, frames))
    ours = reader()
    assert ours.read(file_at(path)) == [text.encode() for text in texts()]
    assert (ours.counts.files, ours.counts.documents) == (1, 50)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_damaged_compressed_file_is_named(tmp_path, ending):
    path = tmp_path / f"d.jsonl{ending}"
    path.write_bytes(compress(json_lines(texts()), ending)[:-9])
    with pytest.raises(DataError, match=rf"d.jsonl{ending} cannot be decompressed .*; make or"):
        text_datasets(TextDataConfig(source=str(path)))


def write_table(path, documents, **options):
    parquet.write_table(pa.table({"id": range(len(documents)), "text": documents}), path, **options)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path, kind):
    documents = [*texts(), None, "", "a\r\nb"]
    table = pa.table({"body": pa.array(documents, kind)})
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=10)
    ours = reader(json_field="body")
    expected = [text.replace("\r\n", "\n").encode() for text in documents if text]
    assert ours.read(file_at(tmp_path / "d.parquet")) == expected
    assert ours.counts.empty_documents == 2
    # Row groups 2 to 4, as a part that another process reads.
    part = [d for some in ours.documents(file_at(tmp_path / "d.parquet"), 2, 5) for d in some]
    assert part == expected[20:50]


def test_parquet_without_the_column_or_cut_off_is_named(tmp_path):
    path = tmp_path / "d.parquet"
    write_table(path, texts())
    with pytest.raises(DataError, match=r"d.parquet has no column 'body' \(it has: id, text\)"):
        text_datasets(TextDataConfig(source=str(path), json_field="body"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"d.parquet cannot be read as Parquet"):
        text_datasets(TextDataConfig(source=str(path)))


def test_a_bad_byte_in_parquet_names_its_row(tmp_path):
    path = tmp_path / "d.parquet"
    column = pa.array([b"fine", b"b\xffd"]).view(pa.string())
    parquet.write_table(pa.table({"text": column}), path)
    with pytest.raises(DataError, match=r"d.parquet: row 1 \(byte 1 of its text\) is not UTF-8"):
        text_datasets(TextDataConfig(source=str(path)))
    assert reader(replace=True).read(file_at(path))[1] == "b\ufffdd".encode()


def example(**features):
    """A tf.train.Example by hand: each field is its number and kind, its length and its bytes."""

    def field(number, data):
        size, length = len(data), b""
        while size >= 128:
            length, size = length + bytes([size % 128 + 128]), size // 128
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    entries = b""
    for name, values in features.items():
        kind = 1 if isinstance(values[0], bytes) else 3  # BytesList or Int64List
        data = [field(1, v) if kind == 1 else bytes([8, v]) for v in values]
        feature = field(kind, b"".join(data))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


@pytest.mark.parametrize("kind", ["text", "json", "example"])
def test_array_record(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(array_records, "_READ_RECORDS", 7)
    wanted = [text.encode() for text in texts()]
    make = {
        "text": lambda text: text,
        "json": lambda text: json.dumps({"id": 1, "text": text.decode()}).encode(),
        "example": lambda text: example(id=[1], text=[text], lang=[b"fr"]),
    }[kind]
    path = tmp_path / "d.array_record-00000-of-00016"
    preparing.array_record(path, [make(text) for text in wanted])
    ours = reader()
    assert ours.read(file_at(path)) == wanted
    assert ours.counts.documents == 50
    part = [d for some in reader().documents(file_at(path), 20, 31) for d in some]
    assert part == wanted[20:31]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [example(content=[b"a"], id=[1])] * 9,
            r"record 0 has no field 'text' \(it has: content, id\); name .* --data.json_field$",
        ),
        ([example(text=[b"a"]), b"\xff"], r"record 1 is no tf.train.Example, as the first .*$"),
        ([example(text=[b"a", b"b"])], r"record 0 has 2 texts, not one, in field 'text'$"),
        ([example(text=[3])], r"record 0 has 0 texts, not one, in field 'text'$"),
        ([b'{"text": "a"}', b"a"], "record 1 is no JSON object, as the first record .*$"),
        ([b'{"body": 1}'], r"record 0 has no field 'text' \(it has: body\); .*$"),
        ([b'{"text": 1}'], "record 0 has int, not text, in field 'text'$"),
        ([b"fine", b"b\xffd"], r"record 1 \(byte 1 of its text\) is not UTF-8; .*$"),
    ],
)
def test_a_bad_record_of_array_record_is_named(tmp_path, records, message):
    path = tmp_path / "d.array_record"
    preparing.array_record(path, records)
    with pytest.raises(DataError, match=f"^d.array_record: {message}"):
        text_datasets(TextDataConfig(source=str(path)))


@pytest.mark.parametrize("end", [100_000, 300])
def test_a_damaged_array_record_is_named(tmp_path, end):
    path = tmp_path / "d.array_record"
    preparing.array_record(path, [text.encode() for text in texts()])
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(DataError, match=r"^d.array_record cannot be read as ArrayRecord \(.*\)"):
        text_datasets(TextDataConfig(source=str(path)))


def test_array_record_without_records_has_no_text(tmp_path):
    preparing.array_record(tmp_path / "d.array_record", [])
    with pytest.raises(DataError, match=r"no training data in data\.source"):
        text_datasets(TextDataConfig(source=str(tmp_path)))


@pytest.mark.parametrize("size", [1, 5, 64, 100, 1000])
def test_parts_of_json_lines_hold_every_record_once(tmp_path, monkeypatch, size):
    monkeypatch.setattr(streams_lib, "_BLOCK_BYTES", 50)
    path = tmp_path / "d.jsonl"
    documents = texts(20)
    path.write_bytes(json_lines(documents)[:-1])
    file = file_at(path)
    found = []
    for start in range(0, file.size, size):
        for some in reader().documents(file, start, min(start + size, file.size)):
            found += some
    assert found == [text.encode() for text in documents]


@pytest.mark.parametrize("size", [16, 100, 1000])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_parts_of_plain_text_hold_every_byte_once(tmp_path, size, line_end):
    path = tmp_path / "d.txt"
    text = "\ufeff" + line_end.join(f"line {i}: \u20ac{' ' * (i % 3)}" for i in range(200))
    path.write_bytes(text.encode())
    file = file_at(path)
    ours = reader()
    starts = range(0, file.size, size)
    found = [
        d for start in starts for some in ours.documents(file, start, start + size) for d in some
    ]
    assert b"".join(found) == text[1:].replace("\r\n", "\n").encode()
    assert (ours.counts.files, ours.counts.documents) == (1, 1)


def test_bad_records_can_be_left_out_and_counted(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = [
        b'{"text":"a"}',
        b"{oops",
        b'{"text":"\xff"}',
        b'{"no":1}',
        '{"text":"\u00e9"}'.encode(),
    ]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    ours = reader(skip_bad=True, flags="--")
    assert ours.read(file_at(path)) == [b"a", "\u00e9".encode()]
    assert ours.counts.skipped_documents == 3
    assert [problem.partition(" ")[0] for problem in ours.problems] == [
        f"d.jsonl:{line}" for line in (2, 3, 4)
    ]
    assert "name the field with --json_field" in ours.problems[2]
    # The line is that of the file, also for who reads a part of it.
    part = reader(skip_bad=True)
    list(part.documents(file_at(path), 20, file_at(path).size))
    assert part.problems == [p.replace("--json", "--data.json") for p in ours.problems[1:]]
