"""Rows of fixed length over streams of bytes, by random access and for a whole batch at once.

Legend: R rows asked for, T sequence_length.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence

import numpy as np

from jaxtrain.data.entropy import conditional_entropy
from jaxtrain.errors import DataError

_HASHED_BYTES = 2**30


class TextDataset:
    """Rows {"tokens", "targets": int32 [R, T], "loss_mask": float32 [R, T]} of byte streams."""

    def __init__(
        self,
        streams: Sequence[np.ndarray],
        sequence_length: int,
        *,
        name: str = "text",
        shuffle: bool = True,
        paths: Sequence[str] = (),
    ) -> None:
        """Lays windows over streams.

        Args:
            streams: uint8 arrays; windows do not run from one into the next.
            sequence_length: T.
            name: in messages.
            shuffle: False: training takes the rows in order.
            paths: files that streams are maps of; they must not shrink while they are read.
        """
        self.name = name
        self.shuffle = shuffle
        self._streams = list(streams)
        self._length = sequence_length
        self._sizes = {path: os.stat(path).st_size for path in paths}
        self._windows: list[np.ndarray] = []
        last_rows, last_counts = [], []
        num_rows = 0
        for stream in self._streams:
            for windows, last_count in _windows(stream, sequence_length):
                self._windows.append(windows)
                num_rows += len(windows)
                last_rows.append(num_rows - 1)
                last_counts.append(last_count)
        self._ends = np.array(last_rows, np.int64) + 1
        self._last_counts = np.array(last_counts, np.int64)
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of memory; streams that are maps of files need none."""
        return sum(s.nbytes for s in self._streams if not isinstance(s.base, np.memmap))

    @property
    def num_tokens(self) -> int:
        """Number of targets."""
        return sum(max(0, len(stream) - 1) for stream in self._streams)

    @property
    def fingerprint(self) -> str:
        """Hash of T and the streams; of a stream above 1 GiB, of its length and 64 pieces."""
        digest = hashlib.blake2b(f"{self._length}".encode(), digest_size=16)
        for stream in self._streams:
            digest.update(f";{len(stream)};".encode())
            if len(stream) < _HASHED_BYTES:
                digest.update(stream)
            else:
                for start in np.linspace(0, len(stream) - 2**20, 64).astype(np.int64):
                    digest.update(stream[start : start + 2**20])
        return digest.hexdigest()

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self._check_sizes()
        part_R = np.searchsorted(self._ends, indices, side="right")
        rows = np.empty((len(indices), self._length + 1), np.uint8)
        for part in np.unique(part_R):
            chosen = part_R == part
            start = self._ends[part] - len(self._windows[part])
            rows[chosen] = self._windows[part][indices[chosen] - start]
        loss_mask = np.ones((len(indices), self._length), np.float32)
        for row in np.flatnonzero(indices == self._ends[part_R] - 1):
            loss_mask[row, self._last_counts[part_R[row]] :] = 0
        return {
            "tokens": rows[:, :-1].astype(np.int32),
            "targets": rows[:, 1:].astype(np.int32),
            "loss_mask": loss_mask,
        }

    def conditional_entropy(self, order: int) -> float:
        """Entropy of a byte given the `order` bytes before it, in nats, of these very bytes."""
        return conditional_entropy(self._streams, order)

    def _check_sizes(self) -> None:
        # Reading a map beyond the end of its file kills the process (SIGBUS).
        for path, size in self._sizes.items():
            now = os.stat(path).st_size
            if now < size:
                raise DataError(f"{path} shrank from {size} to {now} bytes while it was in use")


def _windows(stream: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields ([rows, T + 1], number of targets in the last row): full windows, then the rest."""
    num_full, rest = divmod(max(0, len(stream) - 1), length)
    if num_full:
        # A view: row i begins at byte i * T, and its last byte is the first of the next row.
        shape, strides = (num_full, length + 1), (length, 1)
        yield np.lib.stride_tricks.as_strided(stream, shape, strides, writeable=False), length
    if rest:
        window = np.zeros((1, length + 1), np.uint8)
        window[0, : rest + 1] = stream[num_full * length :]
        yield window, rest
