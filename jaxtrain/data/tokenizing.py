"""Tokenizers: UTF-8 bytes, and those of the library `tokenizers`, read from files or trained.

A tokenizer is named by `--tokenizer`:

    bytes            the 256 bytes; 255, which no UTF-8 text contains, ends a document
    PATH             a tokenizer.json, or a directory with one, or with the vocabulary and merges of
                     GPT-2 (encoder.json and vocab.bpe, or vocab.json and merges.txt)
    bpe:SIZE         a byte-level BPE of SIZE tokens, trained on the text that is prepared

What text contains is text: `<|endoftext|>` in a document becomes the tokens of its letters, never
the token that ends documents. Nothing is added at the ends, cut or filled up, whatever the file
of the tokenizer asks for.

The library is imported on first use.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.streams import exact_break
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.values import did_you_mean

SEPARATOR = 255
"""Between documents of bytes: no UTF-8 text contains it, so that the vocabulary stays 256."""
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
# In the order in which they are looked for; the first is what training and GPT-2's files use.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
_PIECE_BYTES = 2**20
_MIN_BPE_SIZE = 257
_PROBE = (b"One two\n", b"three (four).\n", b"\tfive\n")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    name: str
    hash: str
    """Differs if any token of any text could."""
    vocab_size: int
    end_of_document: int
    can_cut: bool
    """Whether text cut at an `exact_break` has the tokens of the whole."""
    beginning: tuple[int, ...]
    """Tokens that the tokenizer's file puts before a text."""

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the tokens of each document of UTF-8 text, uint32 or smaller [tokens]."""
        ...

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens of a text with special tokens written out, as chat templates do.

        Returns:
            (tokens, and where in the text each begins and ends, in characters), int32 [tokens].
        """
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens; an end of a document becomes a line end."""
        ...

    def save(self) -> bytes:
        """What `tokenizer.json` holds; nothing for bytes."""
        ...


class ByteTokenizer:
    """A token is a byte."""

    name = "bytes"
    hash = "bytes"
    vocab_size = 256
    end_of_document = SEPARATOR
    can_cut = True
    beginning = ()

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8) for document in documents]

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sizes = [len(character.encode()) for character in text]
        begins = np.repeat(np.arange(len(text), dtype=np.int32), sizes)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32), begins, begins + 1

    def decode(self, tokens: Iterable[int]) -> str:
        data = bytes(10 if token == SEPARATOR else int(token) for token in tokens)
        return data.decode("utf-8", "replace")

    def save(self) -> bytes:
        return b""


class LibraryTokenizer:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, data: bytes, name: str, end_of_document: str | int = "") -> None:
        """Makes a tokenizer of the content of a tokenizer.json.

        Args:
            data: the content.
            name: in messages and in the manifest.
            end_of_document: token that ends documents, by its text or number; "": the first usual
                one that the vocabulary has.

        Raises:
            DataError: if it is no tokenizer.
            ConfigError: if the vocabulary has no such token.
        """
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{name} is no tokenizer.json ({error})") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self._data = data
        self.name = name
        self.hash = hashlib.blake2b(data, digest_size=16).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Numbers may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = _end_of(vocabulary, end_of_document, name)
        # Not so with a tokenizer that marks the beginning of a text.
        self.can_cut = False
        whole, parts = self.encode([b"".join(_PROBE)])[0], self.encode(_PROBE)
        self.can_cut = np.array_equal(whole, np.concatenate(parts))
        self._marked = tokenizers.Tokenizer.from_str(data.decode())
        self._marked.no_padding()
        self._marked.no_truncation()
        bare, full = (self._marked.encode("a", add_special_tokens=s).ids for s in (False, True))
        self.beginning = tuple(full[: full.index(bare[0])]) if bare and bare[0] in full else ()

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        # A document of many megabytes would take a hundred times its size.
        pieces = [list(self._pieces(document)) for document in documents]
        texts = [piece.decode() for some in pieces for piece in some]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        tokens = []
        for some in pieces:
            ids = [np.array(next(encoded).ids, np.uint32) for _ in some]
            tokens.append(ids[0] if len(ids) == 1 else np.concatenate(ids))
        return tokens

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        encoded = self._marked.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, np.int32).reshape(-1, 2)
        return np.array(encoded.ids, np.int32), offsets[:, 0], offsets[:, 1]

    def decode(self, tokens: Iterable[int]) -> str:
        texts, waiting = [], []
        for token in [*(int(token) for token in tokens), self.end_of_document]:
            if token != self.end_of_document:
                waiting.append(token)
                continue
            texts.append(self._tokenizer.decode(waiting, skip_special_tokens=False))
            waiting = []
        return "\n".join(texts)

    def save(self) -> bytes:
        return self._data

    def _pieces(self, document: bytes) -> Iterator[bytes]:
        start = 0
        while self.can_cut and len(document) - start > 2 * _PIECE_BYTES:
            stop = exact_break(document, start + _PIECE_BYTES)
            if stop < 0:
                break
            yield document[start:stop]
            start = stop
        yield document[start:]


def open_tokenizer(spec: str, end_of_document: str | int = "") -> Tokenizer:
    """Returns the tokenizer that `spec` names; see the module's docstring ("bpe:" aside).

    Raises:
        DataError: for files that are missing or no tokenizer.
        ConfigError: for an end of documents that is not in the vocabulary.
    """
    if spec == "bytes":
        if end_of_document not in ("", SEPARATOR):
            raise ConfigError("end_of_document is for tokenizers of files; bytes end with 255")
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    try:
        if path.is_file():
            data, name = path.read_bytes(), path.name
            return LibraryTokenizer(
                data, name, end_of_document or configured_token(path.parent, "eos_token")
            )
        for vocabulary, merges in _GPT2_FILES:
            files = path / vocabulary, path / merges
            if all(file.is_file() for file in files):
                data = _byte_level(*map(str, files))
                return LibraryTokenizer(data, f"{vocabulary} and {merges}", end_of_document)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    what = "holds no tokenizer" if path.is_dir() else "does not exist"
    raise DataError(
        f"tokenizer={spec} {what}{did_you_mean(spec, ('bytes', 'bpe:8192'))}; give bytes, bpe:SIZE,"
        f" a tokenizer.json, or a directory with one or with encoder.json and vocab.bpe"
    )


def bpe_size(spec: str) -> int:
    """The vocabulary size of "bpe:SIZE"; 0 for other tokenizers.

    Raises:
        ConfigError: if it is no size.
    """
    if not spec.startswith("bpe:"):
        return 0
    size = spec.removeprefix("bpe:")
    if not re.fullmatch(r"\d+", size) or int(size) < _MIN_BPE_SIZE:
        raise ConfigError(
            f"tokenizer={spec} must be bpe:SIZE with SIZE at least {_MIN_BPE_SIZE} (256 bytes, and"
            f" the end of a document)"
        )
    return int(size)


def train_bpe(documents: Iterable[bytes], size: int) -> bytes:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer; returns its tokenizer.json.

    The same documents in the same order give the same bytes. Smaller than `size` if the text
    has no more pairs that occur twice.
    """
    from tokenizers import pre_tokenizers, trainers

    tokenizer = _empty_byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[_END_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.decode() for document in documents), trainer)
    return tokenizer.to_str(pretty=False).encode()


def _empty_byte_level(**model: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_level(vocabulary: str, merges: str) -> bytes:
    from tokenizers import models

    try:
        vocab, pairs = models.BPE.read_file(vocabulary, merges)
        tokenizer = _empty_byte_level(vocab=vocab, merges=pairs)
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{vocabulary} and {merges} are no vocabulary and merges of a BPE ({error})"
        ) from error
    tokenizer.add_special_tokens([name for name in _END_NAMES if name in vocab])
    return tokenizer.to_str(pretty=False).encode()


def configured_token(folder: Path, name: str) -> str:
    """The text of a special token that a directory of Hugging Face names; "" if it names none.

    Args:
        folder: with a tokenizer_config.json.
        name: eos_token and the like.
    """
    try:
        token = json.loads((folder / "tokenizer_config.json").read_bytes()).get(name) or ""
    except (OSError, ValueError, AttributeError):
        return ""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _end_of(vocabulary: dict[str, int], wanted: str | int, name: str) -> int:
    if isinstance(wanted, int):
        if wanted not in vocabulary.values():
            raise ConfigError(f"{name} has no token {wanted} to end documents with")
        return wanted
    names = (wanted,) if wanted else _END_NAMES
    for candidate in names:
        if candidate in vocabulary:
            return vocabulary[candidate]
    near = did_you_mean(wanted, vocabulary) if wanted else ""
    raise ConfigError(
        f"{name} has no token {' or '.join(names)} to end documents with{near}; name one of its"
        f" {len(vocabulary)} tokens with --end_of_document"
    )
