"""Documents in a stream, and the part of them that is held out."""

import json

import numpy as np
import pytest
from texting import load, many_files, stream_of, write

from jaxtrain.data.files import find_files
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.text_split import Text, split_texts
from jaxtrain.errors import ConfigError, DataError


def test_documents_stand_between_separators(tmp_path):
    write(
        tmp_path, {"a.txt": "one", "b.jsonl": '{"text":"two"}\n{"text":"three"}', "c.txt": "four"}
    )
    train, held_out, info = load(tmp_path, sequence_length=4, validation_fraction=0)
    assert stream_of(train) == b"\xffone\xfftwo\xffthree\xfffour\xff"
    assert held_out is None
    assert (info.split, info.train_tokens, info.eval_tokens) == ("none", 19, 0)
    assert (info.vocab_size, info.tokenizer) == (256, "bytes")


def names_in(dataset):
    documents = stream_of(dataset).split(b"\xff")[1:-1]
    return {document[:5] for document in documents}, b"".join(documents)


def test_many_files_are_split_by_file(tmp_path):
    source = many_files(tmp_path)
    train, held_out, info = load(source, validation_fraction=0.1)
    assert info.split == "files"
    assert (info.train_files, info.eval_files) == (
        len(names_in(train)[0]),
        len(names_in(held_out)[0]),
    )
    train_names, held_out_names = names_in(train)[0], names_in(held_out)[0]
    assert train_names.isdisjoint(held_out_names)
    assert len(train_names | held_out_names) == 200
    total = info.train_tokens + info.eval_tokens
    assert 0.04 < info.eval_tokens / total < 0.2
    # Each byte, and a separator for each document, is a target once.
    assert total == 200 + sum(file.size for file in find_files(source))


def test_a_file_stays_on_its_side_when_others_come(tmp_path):
    source = many_files(tmp_path, count=150)
    before = names_in(load(source, validation_fraction=0.1)[1])[0]
    many_files(tmp_path, count=200)
    after = names_in(load(source, validation_fraction=0.1)[1])[0]
    assert {name for name in after if int(name) < 150} == before
    assert len(after) > len(before)


def test_the_split_is_pinned(tmp_path):
    # It must not change from version to version: validation data would leak into training.
    source = many_files(tmp_path, count=100)
    held_out = names_in(load(source, validation_fraction=0.05)[1])[0]
    assert sorted(map(int, held_out)) == [19, 38, 48, 89, 99]


def test_one_file_is_split_at_its_end_after_a_line(tmp_path):
    lines = "".join(f"line {i} is here\n" for i in range(500))
    write(tmp_path, {"a.txt": lines})
    train, held_out, info = load(tmp_path / "a.txt", validation_fraction=0.1)
    first, last = (stream_of(part).strip(b"\xff").decode() for part in (train, held_out))
    assert info.split == "ends"
    assert first + last == lines
    assert last.startswith("line 45")
    assert abs(len(last) / len(lines) - 0.1) < 0.01


def test_text_without_lines_is_cut_between_characters(tmp_path):
    text = "\u20ac" * 100
    write(tmp_path, {"a.txt": text})
    # 30, 31 and 32 bytes from the end: at a character of three bytes, and inside of it.
    for fraction in (30 / 300, 31 / 300, 32 / 300):
        train, held_out, _ = load(tmp_path, validation_fraction=fraction, sequence_length=4)
        first, last = (stream_of(part).strip(b"\xff").decode() for part in (train, held_out))
        assert first + last == text
        assert len(last) == 10


def test_a_file_of_many_records_is_split_between_records(tmp_path):
    write(tmp_path, {"d.jsonl": "\n".join(json.dumps({"text": f"{i:03d}" * 5}) for i in range(99))})
    train, held_out, info = load(tmp_path / "d.jsonl", validation_fraction=0.05)
    first, last = (stream_of(part).strip(b"\xff").split(b"\xff") for part in (train, held_out))
    assert info.split == "ends"
    assert [d[:3] for d in first + last] == [f"{i:03d}".encode() for i in range(99)]
    assert all(len(document) == 15 for document in first + last)
    assert 4 <= len(last) <= 5


def test_files_of_very_different_size_are_split_at_their_ends():
    # With 20 names or so one hashes below 0.05: held out whole, it would be nearly everything.
    for i in range(100):
        large = Text(f"large{i}.txt", [b"a long line of text\n" * 1000])
        small = Text(f"small{i}.txt", [b"tiny\n" * 10])
        how, train, held_out = split_texts([large, small], 0.05)
        assert how == "ends"
        assert [text.relative for text in train] == [large.relative, small.relative]
        assert 0.04 < sum(text.size for text in held_out) / (large.size + small.size) < 0.06


def test_split_texts_keeps_every_byte():
    rng = np.random.default_rng(1)
    for _ in range(200):
        texts = [
            Text(f"f{i}", [bytes(rng.integers(32, 127, size).astype(np.uint8)) for size in sizes])
            for i, sizes in enumerate(
                rng.integers(1, 50, rng.integers(1, 5)) for _ in range(rng.integers(1, 6))
            )
        ]
        how, train, held_out = split_texts(texts, float(rng.choice([0.01, 0.1, 0.5])))
        assert sum(t.size for t in train) + sum(t.size for t in held_out) == sum(
            t.size for t in texts
        )
        assert train
        assert all(t.size for t in train + held_out)
        assert (how == "none") == (not held_out)


def test_too_little_text_is_an_error_with_numbers(tmp_path):
    write(tmp_path, {"a.txt": "only a few words"})
    message = r"15 training tokens \(and 3 held out\) .* data.sequence_length=64; use a smaller"
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.txt", sequence_length=64, validation_fraction=0.1)
    with pytest.raises(ConfigError, match="sequence_length"):
        TextDataConfig(sequence_length=0)
    with pytest.raises(ConfigError, match="on_bad_bytes"):
        TextDataConfig(on_bad_bytes="ignore")
