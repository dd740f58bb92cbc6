"""Validation data of several sources: one dataset, whose parts are evaluated by their names."""

import hashlib
from collections.abc import Mapping

import numpy as np

from jaxtrain.data.sources import Dataset


class HeldOut:
    """The rows of datasets one behind the other.

    An evaluation gives the means of each part under its name, `loss/NAME`, and `loss` as their sum
    with the parts' shares.
    """

    def __init__(
        self, parts: Mapping[str, Dataset], weights: Mapping[str, float], *, name: str = "held out"
    ) -> None:
        """Joins datasets whose rows have the same arrays.

        Args:
            parts: name -> dataset, at least one.
            weights: of each part in the mean over all, in any unit.
            name: in messages.
        """
        self.name = name
        self.parts = dict(parts)
        total = sum(weights[part] for part in parts)
        self.shares = {part: weights[part] / total for part in parts}
        self._ends = np.cumsum([len(part) for part in parts.values()])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by their numbers: those of the first part come first (int64 [R])."""
        part_R = np.searchsorted(self._ends, indices, side="right")
        found: dict[str, np.ndarray] = {}
        for number, part in enumerate(self.parts.values()):
            chosen = np.flatnonzero(part_R == number)
            if not len(chosen):
                continue
            own = np.asarray(indices)[chosen] - (self._ends[number] - len(part))
            for key, values in part.read(own).items():
                shape = (len(indices), *values.shape[1:])
                found.setdefault(key, np.empty(shape, values.dtype))[chosen] = values
        return found

    @property
    def fingerprint(self) -> str:
        """Hash of the parts' fingerprints, names and shares."""
        digest = hashlib.blake2b(f"held out {self.shares}".encode(), digest_size=16)
        for part in self.parts.values():
            digest.update(f";{len(part)} {part.fingerprint}".encode())
        return digest.hexdigest()
