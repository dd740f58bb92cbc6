"""Datasets for the tests of the loader."""

import jax
import numpy as np

from jaxtrain.data.sources import ArrayDataset
from jaxtrain.mesh import make_mesh


def mesh_of(text, num_devices=8):
    return make_mesh(text, devices=jax.devices()[:num_devices])


def numbers(n, **more):
    """A dataset whose rows say which they are."""
    arrays = {"id": np.arange(n, dtype=np.int32)} | more
    return ArrayDataset(arrays, name="numbers")


class Rows:
    """A dataset that runs `act` in each read, and records what it was asked for."""

    fingerprint = "rows"
    name = "rows"

    def __init__(self, n, act=lambda indices: None):
        self.n, self.act, self.asked = n, act, []

    def __len__(self):
        return self.n

    def read(self, indices):
        self.asked.append(indices)
        return self.act(indices) or {"id": indices.astype(np.int32)}


def take(loader, count):
    return [next(loader) for _ in range(count)]
