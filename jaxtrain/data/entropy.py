"""How predictable a text is from its last bytes: the number that a byte model has to beat."""

from collections.abc import Sequence

import numpy as np

from jaxtrain.errors import DataError

# Bytes counted at once, so that memory is bounded by the number of different contexts.
_PIECE = 2**22


def conditional_entropy(streams: bytes | np.ndarray | Sequence[np.ndarray], order: int) -> float:
    """Plug-in estimate of H(byte | the `order` bytes before it), in nats per byte.

    With order=1 it is what a perfect bigram table of this very text would reach on it, a lower
    bound for all models that see one byte. The first `order` bytes of a stream are context only.

    Args:
        streams: bytes, or uint8 arrays; contexts do not run from one into the next.
        order: 0 to 6.
    """
    if not 0 <= order <= 6:
        raise ValueError(f"order={order} must lie in 0..6, to fit a context into 64 bits")
    if isinstance(streams, bytes | np.ndarray):
        streams = [np.frombuffer(streams, np.uint8)]
    codes = np.zeros(0, np.uint64)
    counts = np.zeros(0, np.int64)
    for stream in streams:
        for start in range(0, max(0, len(stream) - order), _PIECE):
            window = stream[start : start + _PIECE + order].astype(np.uint64)
            code = np.zeros(len(window) - order, np.uint64)
            for shift in range(order + 1):
                code = code * np.uint64(256) + window[shift : len(window) - order + shift]
            new_codes, new_counts = np.unique(code, return_counts=True)
            codes, counts = _merge([codes, new_codes], [counts, new_counts])
    total = int(counts.sum())
    if total == 0:
        raise DataError(f"no byte has {order} bytes before it: no entropy of order {order}")
    _, context_counts = _merge([codes >> np.uint64(8)], [counts])
    joint, context = counts.astype(np.float64), context_counts.astype(np.float64)
    return float((context @ np.log(context) - joint @ np.log(joint)) / total)


def _merge(codes: list[np.ndarray], counts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the counts of equal codes."""
    values, where = np.unique(np.concatenate(codes), return_inverse=True)
    added = np.zeros(len(values), np.int64)
    np.add.at(added, where, np.concatenate(counts))
    return values, added
