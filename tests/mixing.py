"""A mixture of three packed sources, text and shards, and what its order has to hold."""

import json

import numpy as np
import preparing

from jaxtrain.data.prepare import PrepareConfig, prepare
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.text_mixture import lm_datasets

BATCH, STEPS, LENGTH = 24, 200, 32


def write(folder):
    """Writes the sources; returns the flag of the mixture."""
    for name, files in (("web", 8), ("code", 3)):
        (folder / name).mkdir(parents=True)
        for number in range(files):
            (folder / name / f"{number}.txt").write_text(preparing.text(f"{name}{number}", 300))
    lines = "".join(json.dumps({"text": preparing.text(i, 60)}) + "\n" for i in range(12))
    (folder / "in.jsonl").write_text(lines)
    prepare([str(folder / "in.jsonl")], str(folder / "tok"), PrepareConfig(workers=1))
    return f"web=3:{folder}/web,code=2:{folder}/code,tok=1:{folder}/tok"


def dataset(mixture):
    config = TextDataConfig(
        mixture=mixture, sequence_length=LENGTH, validation_fraction=0, packing="best_fit"
    )
    return lm_datasets(config)[0]


def assert_whole_epochs(data, ids):
    """Each source goes through two epochs at least, each with every one of its rows once."""
    ends = np.cumsum([len(source) for source in data.sources])
    for source, end in zip(data.sources, ends, strict=True):
        own = ids[(ids >= end - len(source)) & (ids < end)]
        epochs = own[: len(own) // len(source) * len(source)].reshape(-1, len(source))
        assert len(epochs) >= 2
        for epoch in epochs:
            np.testing.assert_array_equal(np.sort(epoch), np.arange(end - len(source), end))
        assert (epochs[0] != epochs[1]).any()
        # What is left of the last epoch has no row twice either.
        rest = own[epochs.size :]
        assert len(np.unique(rest)) == len(rest)
