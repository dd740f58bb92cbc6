"""Rows of fixed length over streams of tokens, by random access and for a whole batch at once.

Legend: R rows asked for, T sequence_length.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence

import numpy as np

from jaxtrain.data.entropy import conditional_entropy
from jaxtrain.data.mapped import hash_contents, require_size
from jaxtrain.errors import DataError

# From so many rows of a part on, one gather of them is faster than a copy for each.
_GATHERED_ROWS = 8


class TextDataset:
    """Rows {"tokens", "targets": int32 [R, T], "loss_mask": float32 [R, T]} of token streams."""

    def __init__(
        self,
        streams: Sequence[np.ndarray],
        sequence_length: int,
        *,
        name: str = "text",
        shuffle: bool = True,
        paths: Sequence[str] = (),
        digests: Sequence[str] = (),
        vocab_size: int = 0,
    ) -> None:
        """Lays windows over streams.

        Args:
            streams: arrays of one unsigned dtype (uint8: bytes); windows do not run from one into
                the next.
            sequence_length: T.
            name: in messages.
            shuffle: False: training takes the rows in order.
            paths: for each stream the file that it is a map of, "" if none; such a file must not
                shrink while it is read.
            digests: for each stream what its fingerprint is made from instead of its content.
            vocab_size: tokens from it on are an error where they are read; 0: any will do.
        """
        self.name = name
        self.shuffle = shuffle
        self._streams = list(streams)
        self._length = sequence_length
        self._paths = list(paths) or [""] * len(self._streams)
        self._sizes = [os.stat(path).st_size if path else 0 for path in self._paths]
        self._digests = list(digests)
        self._vocab_size = vocab_size
        self._dtype = self._streams[0].dtype if self._streams else np.dtype(np.uint8)
        self._loss_mask = np.zeros((0, sequence_length), np.float32)
        # A part is the full windows of a stream, or its last one.
        self._windows: list[np.ndarray] = []
        self._stream_of: list[int] = []
        last_rows, last_counts = [], []
        num_rows = 0
        for number, stream in enumerate(self._streams):
            for windows, last_count in _windows(stream, sequence_length):
                self._windows.append(windows)
                self._stream_of.append(number)
                num_rows += len(windows)
                last_rows.append(num_rows - 1)
                last_counts.append(last_count)
        self._ends = np.array(last_rows, np.int64) + 1
        self._starts = np.concatenate(([0], self._ends))
        self._last_counts = np.array(last_counts, np.int64)
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of memory; streams that are maps of files need none."""
        pairs = zip(self._streams, self._paths, strict=True)
        return sum(stream.nbytes for stream, path in pairs if not path)

    @property
    def num_tokens(self) -> int:
        """Number of targets."""
        return sum(max(0, len(stream) - 1) for stream in self._streams)

    @property
    def fingerprint(self) -> str:
        """Hash of T and the streams; of a stream above 1 GiB, of its length and 64 pieces."""
        digest = hashlib.blake2b(f"{self._length}".encode(), digest_size=16)
        for number, stream in enumerate(self._streams):
            digest.update(f";{len(stream)};".encode())
            if self._digests:
                digest.update(self._digests[number].encode())
            else:
                hash_contents(digest, stream)
        return digest.hexdigest()

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        part_R = np.searchsorted(self._ends, indices, side="right")
        row_R = indices - self._starts[part_R]
        parts = np.unique(part_R)
        self._check_sizes(parts)
        if len(parts) == 1:
            rows = self._windows[parts[0]][row_R]
        else:
            rows = np.empty((len(indices), self._length + 1), self._dtype)
            self._gather(rows, parts, part_R, row_R)
        if self._vocab_size and rows.size and rows.max() >= self._vocab_size:
            self._refuse_token(rows, part_R)
        # One conversion for both: they are views, shifted by one.
        rows = rows.astype(np.int32)
        return {
            "tokens": rows[:, :-1],
            "targets": rows[:, 1:],
            "loss_mask": self._mask(indices, part_R),
        }

    def conditional_entropy(self, order: int) -> float:
        """Entropy of a byte given the `order` bytes before it, in nats, of these very bytes."""
        return conditional_entropy(self._streams, order)

    def _gather(
        self, rows: np.ndarray, parts: np.ndarray, part_R: np.ndarray, row_R: np.ndarray
    ) -> None:
        if len(parts) * _GATHERED_ROWS <= len(rows):
            for part in parts:
                chosen = part_R == part
                rows[chosen] = self._windows[part][row_R[chosen]]
        else:
            for number, (part, row) in enumerate(zip(part_R.tolist(), row_R.tolist(), strict=True)):
                rows[number] = self._windows[part][row]

    def _mask(self, indices: np.ndarray, part_R: np.ndarray) -> np.ndarray:
        """All ones but for last rows; most batches share one array, which nobody may write to."""
        last_R = np.flatnonzero(indices == self._ends[part_R] - 1)
        short_R = last_R[self._last_counts[part_R[last_R]] < self._length]
        if len(self._loss_mask) < len(indices):
            self._loss_mask = np.ones((len(indices), self._length), np.float32)
            self._loss_mask.setflags(write=False)
        loss_mask = self._loss_mask[: len(indices)]
        if short_R.size:
            loss_mask = loss_mask.copy()
            for row in short_R:
                loss_mask[row, self._last_counts[part_R[row]] :] = 0
        return loss_mask

    def _check_sizes(self, parts: np.ndarray) -> None:
        for number in {self._stream_of[part] for part in parts}:
            if path := self._paths[number]:
                require_size(path, self._sizes[number])

    def _refuse_token(self, rows: np.ndarray, part_R: np.ndarray) -> None:
        row, column = np.argwhere(rows >= self._vocab_size)[0]
        path = self._paths[self._stream_of[part_R[row]]] or self.name
        raise DataError(
            f"{path} holds the token {rows[row, column]}, outside its vocabulary of"
            f" {self._vocab_size}; it is damaged, or its manifest is of other shards"
        )


def _windows(stream: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields ([rows, T + 1], number of targets in the last row): full windows, then the rest."""
    num_full, rest = divmod(max(0, len(stream) - 1), length)
    if num_full:
        # A view: row i begins at token i * T, and its last token is the first of the next row.
        shape, strides = (num_full, length + 1), (length * stream.itemsize, stream.itemsize)
        yield np.lib.stride_tricks.as_strided(stream, shape, strides, writeable=False), length
    if rest:
        window = np.zeros((1, length + 1), stream.dtype)
        window[0, : rest + 1] = stream[num_full * length :]
        yield window, rest
