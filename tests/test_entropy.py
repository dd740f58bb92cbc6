"""The entropy of bytes given those before them."""

import collections
import math

import numpy as np
import pytest

from jaxtrain.data.entropy import conditional_entropy
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.errors import DataError


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_entropy_equals_a_count_by_hand(order):
    data = ("the cat sat on the mat and the rat sat on the cat, " * 3 + "end").encode()
    grams = collections.Counter(data[i : i + order + 1] for i in range(len(data) - order))
    contexts = collections.Counter(data[i : i + order] for i in range(len(data) - order))
    total = len(data) - order
    expected = -sum(
        count / total * math.log(count / contexts[gram[:order]]) for gram, count in grams.items()
    )
    assert conditional_entropy(data, order) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_entropy_of_known_sources():
    assert conditional_entropy(b"ab" * 100, 1) == 0
    assert conditional_entropy(bytes(range(256)) * 4, 0) == pytest.approx(math.log(256))
    rng = np.random.default_rng(0)
    fair = rng.integers(0, 2, 200_000).astype(np.uint8)
    assert conditional_entropy(fair, 2) == pytest.approx(math.log(2), abs=1e-3)


def test_entropy_does_not_depend_on_pieces(monkeypatch):
    rng = np.random.default_rng(0)
    data = (rng.integers(0, 6, 5000) ** 2).astype(np.uint8)
    whole = conditional_entropy(data, 2)
    monkeypatch.setattr("jaxtrain.data.entropy._PIECE", 64)
    assert conditional_entropy(data, 2) == pytest.approx(whole, rel=1e-12)
    # Streams: no context runs from one into the next.
    pairs = [b"ab" * 10, b"ba" * 10]
    assert conditional_entropy([np.frombuffer(p, np.uint8) for p in pairs], 1) == 0
    with pytest.raises(DataError, match="no byte has 2 bytes before it"):
        conditional_entropy(b"ab", 2)
    with pytest.raises(ValueError, match="order=7"):
        conditional_entropy(data, 7)


def test_a_bigram_table_reaches_the_entropy_of_the_validation_targets():
    # The number that is printed beside the loss is over exactly the targets that the loss counts.
    _, held_out, info = text_datasets(TextDataConfig())
    rows = held_out.read(np.arange(len(held_out)))
    real = rows["loss_mask"] > 0
    tokens, targets = rows["tokens"][real], rows["targets"][real]
    table = np.zeros((256, 256))
    np.add.at(table, (tokens, targets), 1)
    loss = -np.log(table[tokens, targets] / table.sum(1)[tokens]).mean()
    assert held_out.conditional_entropy(1) == pytest.approx(loss, rel=1e-6)
    assert held_out.conditional_entropy(2) < held_out.conditional_entropy(1) < 3
    facts = info.facts(held_out)
    assert facts["validation_entropy_order_1"] == held_out.conditional_entropy(1)
    assert facts["validation_entropy_order_2"] == held_out.conditional_entropy(2)
    assert facts["eval_tokens"] == len(targets)
    assert "files held out" in facts["data"]
    assert "validation_entropy_order_1" not in info.facts(None)
