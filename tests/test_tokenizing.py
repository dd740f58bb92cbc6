"""Tokenizers agree with the library they come from; what text contains stays text."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxtrain.data import tokenizing
from jaxtrain.data.files import find_files
from jaxtrain.data.tokenizing import (
    ByteTokenizer,
    LibraryTokenizer,
    bpe_size,
    open_tokenizer,
    train_bpe,
)
from jaxtrain.errors import ConfigError, DataError

TEXTS = [
    "plain words, 123\n\n  and\tna\u00efve \N{GRINNING FACE} <|endoftext|> more",
    "",
    "x",
    "if x:\r\n    return  <|endoftext|>\n",
]


@pytest.fixture(scope="module")
def documents():
    """Some files of the standard library."""
    return [Path(file.path).read_bytes() for file in find_files("stdlib")[:14]]


@pytest.fixture(scope="module")
def trained(documents):
    return train_bpe(documents, 500)


def test_bytes():
    tokenizer = open_tokenizer("bytes")
    encoded = tokenizer.encode([text.encode() for text in TEXTS])
    assert [bytes(tokens).decode() for tokens in encoded] == TEXTS
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (256, 255)
    assert tokenizer.decode([*encoded[0], 255, *encoded[2], 255]) == f"{TEXTS[0]}\nx\n"
    with pytest.raises(ConfigError, match="end_of_document is for tokenizers of files"):
        open_tokenizer("bytes", "</s>")


def test_training_is_that_of_the_library_and_repeats(documents, trained, tmp_path):
    reference = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    texts = [document.decode() for document in documents]
    reference.train_from_iterator(
        texts, 500, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False
    )
    ours = LibraryTokenizer(trained, "ours")
    assert ours.vocab_size == 500
    assert [t.tolist() for t in ours.encode(documents)] == [
        encoding.ids for encoding in reference.encode_batch(texts)
    ]
    # In another process, where the library hashes with another seed.
    paths = [file.path for file in find_files("stdlib")[:14]]
    script = f"""
import hashlib, pathlib
from jaxtrain.data.tokenizing import train_bpe
print(hashlib.sha256(train_bpe([pathlib.Path(p).read_bytes() for p in {paths}], 500)).hexdigest())
"""

    def digest():
        words = [sys.executable, "-c", script]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert digest() == digest()


def test_text_that_looks_like_a_special_token_stays_text(trained):
    tokenizer = LibraryTokenizer(trained, "ours")
    for text, tokens in zip(TEXTS, tokenizer.encode([t.encode() for t in TEXTS]), strict=True):
        assert tokenizer.end_of_document not in tokens
        assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([tokenizer.end_of_document]) == "\n"


def test_nothing_is_added_cut_or_filled_up(trained):
    reference = Tokenizer.from_str(trained.decode())
    demanding = Tokenizer.from_str(trained.decode())
    demanding.enable_truncation(3)
    demanding.enable_padding(length=100)
    demanding.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    ours = LibraryTokenizer(demanding.to_str().encode(), "demanding")
    text = "several words, more than three"
    assert ours.encode([text.encode()])[0].tolist() == reference.encode(text).ids


def test_long_documents_are_cut_where_it_makes_no_difference(documents, trained, monkeypatch):
    tokenizer = LibraryTokenizer(trained, "ours")
    assert tokenizer.can_cut
    long = b"\n".join(documents[:12])
    whole = Tokenizer.from_str(trained.decode()).encode(long.decode()).ids
    calls = []
    inner = tokenizer._tokenizer

    class Counting:
        def encode_batch_fast(self, texts, **options):
            calls.append(len(texts))
            return inner.encode_batch_fast(texts, **options)

    monkeypatch.setattr(tokenizing, "_PIECE_BYTES", 1000)
    tokenizer._tokenizer = Counting()
    assert tokenizer.encode([long])[0].tolist() == whole
    assert calls[0] > 20


def test_a_tokenizer_that_marks_the_beginning_of_a_text_is_never_cut(documents, monkeypatch):
    """As the ones of Llama 2 and Gemma: the marker would stand at every cut."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Prepend("\u2581")
    tokenizer.decoder = decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    texts = [document.decode() for document in documents[:3]]
    tokenizer.train_from_iterator(texts, trainer)
    ours = LibraryTokenizer(tokenizer.to_str().encode(), "marking")
    assert not ours.can_cut
    assert ours.end_of_document == 1
    monkeypatch.setattr(tokenizing, "_PIECE_BYTES", 100)
    assert ours.encode(documents[:1])[0].tolist() == tokenizer.encode(texts[0]).ids


def write_gpt2(folder, trained, names=("encoder.json", "vocab.bpe")):
    """GPT-2's two files, with its end of a text in the vocabulary."""
    model = json.loads(trained)["model"]
    (folder / names[0]).write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / names[1]).write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_the_files_of_gpt2(tmp_path, trained, documents, names):
    ours = open_tokenizer(str(write_gpt2(tmp_path, trained, names)))
    reference = LibraryTokenizer(trained, "trained")
    assert (ours.vocab_size, ours.end_of_document) == (500, 0)
    for a, b in zip(ours.encode(documents), reference.encode(documents), strict=True):
        np.testing.assert_array_equal(a, b)
    # What is saved is the same tokenizer, without the two files.
    again = LibraryTokenizer(ours.save(), "saved")
    assert again.hash == ours.hash
    np.testing.assert_array_equal(again.encode([b"a cat"])[0], ours.encode([b"a cat"])[0])


def test_the_end_of_documents_is_found_named_or_missed(tmp_path, trained):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained)
    assert open_tokenizer(str(path)).end_of_document == 0
    assert open_tokenizer(str(tmp_path)).end_of_document == 0
    assert open_tokenizer(str(path), "!").end_of_document == 1
    with pytest.raises(ConfigError, match=r"no token 'x' to|has no token <eod> to end documents"):
        open_tokenizer(str(path), "<eod>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "#"}}))
    assert open_tokenizer(str(path)).end_of_document == 3
    plain = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.json").write_text(plain.to_str())
    with pytest.raises(ConfigError, match=r"has no token <\|endoftext\|> or .* --end_of_document"):
        open_tokenizer(str(tmp_path / "plain"))
    # Numbers have gaps: the vocabulary reaches to the largest.
    assert open_tokenizer(str(tmp_path / "plain"), "b").vocab_size == 8


def test_what_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer=/no/such does not exist; give bytes, bpe:SIZE"):
        open_tokenizer("/no/such")
    with pytest.raises(DataError, match="holds no tokenizer"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is no tokenizer.json"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "encoder.json").write_text("[]")
    (tmp_path / "gpt2" / "vocab.bpe").write_text("")
    with pytest.raises(DataError, match=r"encoder.json and .* are no vocabulary and merges"):
        open_tokenizer(str(tmp_path / "gpt2"))


def test_sizes_of_a_trained_tokenizer():
    assert [bpe_size(spec) for spec in ("bytes", "bpe:257", "a/bpe:9")] == [0, 257, 0]
    for spec in ("bpe:", "bpe:256", "bpe:8k"):
        with pytest.raises(ConfigError, match=f"tokenizer={spec} must be bpe:SIZE with SIZE at"):
            bpe_size(spec)


def test_the_library_is_imported_on_first_use():
    script = (
        "import sys, jaxtrain.data.text, jaxtrain.data.prepare; print('tokenizers' in sys.modules)"
    )
    words = [sys.executable, "-c", script]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"
    assert isinstance(open_tokenizer("bytes"), ByteTokenizer)
