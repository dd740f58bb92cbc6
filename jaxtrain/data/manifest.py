"""The files of token shards: prepared text on the disk, mapped into memory where it is read.

    DIR/manifest.json    what follows, written last: without it the directory is no data
    DIR/shard-00000.bin  tokens, little-endian, as the manifest's dtype (an unsigned integer)
    DIR/shard-00000.idx  uint64 [documents + 1]: document i is tokens[index[i]:index[i + 1]]
    DIR/tokenizer.json   the tokenizer, unless tokens are bytes

A document ends with the token E (`end_of_document`), and a shard begins with one, which belongs to
no document, so that the first token of a document is a target too:

    E document 1 E document 2 E ... E

A plain file larger than a shard goes on in the next one: that shard begins without E, and its
`continues` is true.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from jaxtrain.data.tokenizing import ByteTokenizer, LibraryTokenizer, Tokenizer
from jaxtrain.errors import DataError

FORMAT, FORMAT_VERSION = "jaxtrain token shards", 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
UNFINISHED = ".prepare"
"""Directory beside the shards while `jaxtrain prepare` is at work."""
DTYPES = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INDEX_DTYPE = np.dtype("<u8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One pair of files."""

    file: str
    index: str
    tokens: int
    documents: int
    checksum: str
    """BLAKE2b of 16 bytes, hexadecimal, of `file`."""
    index_checksum: str
    continues: bool = False
    """Whether its first document began in the shard before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `manifest.json` says; `root` is where it was read."""

    root: str
    dtype: str
    tokenizer: str
    """Name: "bytes", or that of the file it came from."""
    tokenizer_hash: str
    vocab_size: int
    end_of_document: int
    documents: int
    tokens: int
    shards: tuple[Shard, ...]

    @classmethod
    def read(cls, root: str) -> "Manifest":
        """Reads a manifest, and compares the sizes of all files with it.

        Raises:
            DataError: for a manifest that is damaged or of another version, and for files that are
                missing, cut off or too long.
        """
        path = os.path.join(root, MANIFEST)
        try:
            values = json.loads(Path(path).read_bytes())
            if values["version"] != FORMAT_VERSION:
                raise DataError(
                    f"{path} has version {values['version']} of the format, and this jaxtrain reads"
                    f" version {FORMAT_VERSION}; prepare the text again"
                )
            names = {field.name for field in dataclasses.fields(cls)} - {"root", "shards"}
            shards = tuple(Shard(**shard) for shard in values["shards"])
            manifest = cls(root=root, shards=shards, **{name: values[name] for name in names})
            DTYPES[manifest.dtype]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{path} cannot be read ({error!r}); it is damaged, prepare the text again"
            ) from error
        manifest._check_sizes()
        return manifest

    def tokens_of(self, shard: Shard) -> np.ndarray:
        """The tokens of a shard [tokens], as a map of its file."""
        if not shard.tokens:
            return np.zeros(0, DTYPES[self.dtype])
        return np.asarray(np.memmap(os.path.join(self.root, shard.file), DTYPES[self.dtype], "r"))

    def index_of(self, shard: Shard, count: int = -1) -> np.ndarray:
        """Where the documents of a shard begin and the last one ends: int64 [documents + 1].

        Args:
            shard: of this manifest.
            count: of numbers that are read, from the first on; -1: all.
        """
        path = os.path.join(self.root, shard.index)
        return np.fromfile(path, INDEX_DTYPE, count).astype(np.int64)

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            DataError: if its file is missing, or not the one of the manifest.
        """
        if self.tokenizer == ByteTokenizer.name:
            return ByteTokenizer()
        path = os.path.join(self.root, TOKENIZER)
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; copy it anew") from error
        tokenizer = LibraryTokenizer(data, path, self.end_of_document)
        if tokenizer.hash != self.tokenizer_hash:
            raise DataError(f"{path} is not the tokenizer that made the shards; copy it anew")
        return tokenizer

    def verify(self) -> None:
        """Reads every file and compares its checksum.

        Raises:
            DataError: naming the files that differ.
        """
        damaged = [
            os.path.join(self.root, name)
            for shard in self.shards
            for name, checksum in (
                (shard.file, shard.checksum),
                (shard.index, shard.index_checksum),
            )
            if checksum_of(os.path.join(self.root, name)) != checksum
        ]
        if damaged:
            raise DataError(
                f"{', '.join(damaged)}: not the checksum of {MANIFEST}; copy the shards anew, or"
                f" prepare the text again into an empty directory"
            )

    def _check_sizes(self) -> None:
        itemsize = DTYPES[self.dtype].itemsize
        for shard in self.shards:
            sizes = {
                shard.file: shard.tokens * itemsize,
                shard.index: (shard.documents + 1) * INDEX_DTYPE.itemsize,
            }
            for name, size in sizes.items():
                path = os.path.join(self.root, name)
                try:
                    now = os.stat(path).st_size
                except OSError as error:
                    raise DataError(
                        f"{path}, named by {MANIFEST}, cannot be read: {error.strerror}; copy the"
                        f" directory as a whole"
                    ) from error
                if now != size:
                    what = "cut off" if now < size else "too long"
                    raise DataError(
                        f"{path} is {what}: it has {now} bytes, and {MANIFEST} says {size}; copy it"
                        f" anew, or prepare the text again into an empty directory"
                    )


def checksum_of(path: str) -> str:
    """BLAKE2b of 16 bytes of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
