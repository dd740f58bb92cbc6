"""The loader's memory does not grow with the batches that it has delivered."""

import numpy as np
import pytest

from jaxtrain.data.load import Loader
from jaxtrain.data.windows import TextDataset
from jaxtrain.mesh import make_mesh

PAGES = "/proc/self/statm"


def resident_mib():
    with open(PAGES) as file:
        return int(file.read().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_memory_stays_flat(tmp_path, count):
    """Windows of a mapped shard; an epoch is 313 batches, so the order begins anew often."""
    path = tmp_path / "shard.bin"
    np.random.default_rng(0).integers(0, 256, 10_016 * 128, np.uint8).tofile(path)
    tokens = np.asarray(np.memmap(path, np.uint8, "r"))
    dataset = TextDataset([tokens], 128, paths=[str(path)])
    found = []
    with Loader(dataset, make_mesh("data:8"), global_batch_size=32) as loader:
        for number in range(count + 1):
            next(loader)
            if number % (count // 10) == 0:
                found.append(resident_mib())
    print("MiB after each tenth:", *(f"{mib:.1f}" for mib in found))
    # The first tenth warms caches: allocators, the pages of the shard.
    assert found[-1] - found[1] < 4
