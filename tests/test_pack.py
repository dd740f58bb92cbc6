"""Packing: no token lost or repeated, no target across documents, rows as full as best-fit's."""

import itertools
import logging
import math
import os
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import kept_arrays
from jaxtrain.data import pack_plan as plan_lib
from jaxtrain.data.load import Loader, eval_batches
from jaxtrain.data.pack import Documents, PackedDataset
from jaxtrain.data.pack_plan import POLICIES, pack_plan
from jaxtrain.data.sources import Dataset
from jaxtrain.errors import DataError
from jaxtrain.mesh import make_mesh

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def documents_of(lengths, *, first=0, masked=False):
    """Documents whose tokens are all different, after `first` tokens that belong to none."""
    total = sum(lengths)
    tokens = np.arange(1, first + total + 4, dtype=np.int32)
    mask = (tokens % 5).astype(np.float32) / 4 if masked else None
    return Documents(tokens, first + np.cumsum([0, *lengths]), mask)


# References: one document, one piece and one token at a time


def naive_split(lengths, length):
    """Rows as lists of (document, start in it, stop in it)."""
    rows, room = [], 0
    for number, size in enumerate(lengths):
        start = 0
        while start < size:
            if room == 0:
                rows.append([])
                room = length
            stop = min(size, start + room)
            rows[-1].append((number, start, stop))
            room -= stop - start
            start = stop
    return rows


def naive_best_fit(lengths, length):
    """How many rows have how many free tokens, by best-fit decreasing, one piece at a time."""
    pieces = []
    for size in lengths:
        pieces += [length] * (size // length) + [size % length] * (size % length > 0)
    free = []
    for piece in sorted(pieces, reverse=True):
        fitting = [(room, at) for at, room in enumerate(free) if room >= piece]
        if fitting:
            free[min(fitting)[1]] -= piece
        else:
            free.append(length - piece)
    return sorted(free)


def pieces_of(plan, lengths):
    """The plan's rows as lists of (document, start in it, stop in it)."""
    ends = list(itertools.accumulate(lengths))
    rows = []
    for first, stop in itertools.pairwise(plan.rows_R1.tolist()):
        rows.append([])
        for piece in range(first, stop):
            start, size = int(plan.starts_P[piece]), int(plan.lengths_P[piece])
            number = next(d for d, end in enumerate(ends) if end > start)
            before = ends[number] - lengths[number]
            rows[-1].append((number, start - before, start - before + size))
            assert start + size <= ends[number], "a piece is of one document"
            assert bool(plan.ends_document_P[piece]) == (start + size == ends[number])
    return rows


def naive_rows(documents, rows, length, end):
    """What `read` must return, token by token."""
    names = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    fields = {name: np.zeros((len(rows), length)) for name in names}
    flat, starts = documents.tokens, documents.starts
    mask = np.ones(len(flat)) if documents.loss_mask is None else documents.loss_mask
    for r, row in enumerate(rows):
        slot = 0
        for segment, (number, start, stop) in enumerate(row, 1):
            for position, token in enumerate(range(starts[number] + start, starts[number] + stop)):
                is_last = token + 1 == starts[number + 1]
                if is_last:
                    target, weight = (0, 0) if end is None else (end, mask[token])
                else:
                    target, weight = flat[token + 1], mask[token + 1]
                values = (flat[token], target, weight, segment, position)
                for name, value in zip(names, values, strict=True):
                    fields[name][r, slot] = value
                slot += 1
    return fields


# The plan


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 17))
def test_split_is_concatenation_cut_every_row(lengths, length):
    plan = pack_plan(np.array(lengths, np.int64), length, "split")
    assert pieces_of(plan, lengths) == naive_split(lengths, length)
    assert plan.num_rows == math.ceil(sum(lengths) / length)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 17))
def test_best_fit_fills_rows_as_best_fit_decreasing_does(lengths, length):
    plan = pack_plan(np.array(lengths, np.int64), length, "best_fit")
    rows = pieces_of(plan, lengths)
    free = sorted(length - sum(stop - start for _, start, stop in row) for row in rows)
    assert free == naive_best_fit(lengths, length)
    # Only what is longer than a row is cut, at multiples of a row.
    for _, start, stop in itertools.chain(*rows):
        assert start % length == 0
        assert stop - start == length or (stop - start) % length
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 17), st.sampled_from(POLICIES))
def test_every_token_has_one_place_and_is_one_target(lengths, length, policy):
    documents = documents_of(lengths, first=3)
    data = PackedDataset(documents, length, policy=policy, end_of_document=10**6)
    rows = data.read(np.arange(len(data)))
    real = rows["segment_ids"] > 0
    own = documents.tokens[3 : 3 + sum(lengths)]
    np.testing.assert_array_equal(np.sort(rows["tokens"][real]), own)
    assert data.plan.num_tokens == sum(lengths) == real.sum()
    # Every token but a document's first is a target once, and every document ends once.
    firsts = documents.starts[:-1][documents.lengths > 0]
    followers = np.delete(np.arange(3, 3 + sum(lengths)), firsts - 3)
    targets = np.sort(rows["targets"][real])
    assert (targets[len(followers) :] == 10**6).all()
    np.testing.assert_array_equal(targets[: len(followers)], documents.tokens[followers])
    np.testing.assert_array_equal(rows["loss_mask"], real)
    assert data.num_tokens == real.sum()
    if data.plan.num_rows:
        assert data.utilisation == real.mean()


def test_ten_million_tokens_of_documents_pack_in_a_moment():
    lengths = np.random.default_rng(0).geometric(1 / 500, 100_000)
    started = time.perf_counter()
    plan = pack_plan(lengths, 2048, "best_fit")
    # 0.1 s here; a Python step per token or a scan of all rows per document take minutes.
    assert time.perf_counter() - started < 10
    assert plan.num_tokens == lengths.sum()
    assert plan.utilisation > 0.999


# The rows


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("end", [None, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_equal_those_made_token_by_token(policy, end, masked):
    lengths = [5, 0, 1, 23, 8, 3, 16, 1, 2, 7, 40, 8]
    documents = documents_of(lengths, first=2, masked=masked)
    data = PackedDataset(documents, 8, policy=policy, end_of_document=end)
    expected = naive_rows(documents, pieces_of(data.plan, lengths), 8, end)
    assert any((row == 0).any() for row in expected["segment_ids"]) or policy == "split"
    # Any rows, in any order, more than once; also full ones only.
    full = np.flatnonzero((expected["segment_ids"] > 0).all(1))
    for indices in (np.arange(len(data)), np.array([3, 0, len(data) - 1, 3]), full, full[:0]):
        rows = data.read(indices)
        assert {name: value.dtype for name, value in rows.items()} == {
            "tokens": np.int32,
            "targets": np.int32,
            "loss_mask": np.float32,
            "segment_ids": np.int32,
            "positions": np.int32,
        }
        for name, value in rows.items():
            np.testing.assert_array_equal(value, expected[name][indices], err_msg=name)
    # Without an end, no target is of another document.
    assert data.num_tokens == sum(lengths) - (0 if end else sum(n > 0 for n in lengths))


def test_prompt_and_completion_documents():
    documents = Documents.from_list(
        [([1, 2, 3, 4, 5], [0, 0, 0, 1, 1]), ([6, 7, 8], [0, 1, 1]), ([], [])]
    )
    rows = PackedDataset(documents, 8, end_of_document=9).read(np.array([0]))
    assert rows["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert rows["targets"].tolist() == [[2, 3, 4, 5, 9, 7, 8, 9]]
    assert rows["loss_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 1]]
    rows = PackedDataset(documents, 8).read(np.array([0]))
    assert rows["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 1, 1, 0]]
    assert rows["segment_ids"].tolist() == [[1, 1, 1, 1, 1, 2, 2, 2]]
    assert rows["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    mixed = Documents.from_list([([1, 2], [0, 1]), np.array([3, 4])])
    assert mixed.loss_mask.tolist() == [0, 1, 1, 1]


def test_attention_across_documents_keeps_targets_inside_them():
    documents = documents_of([5, 3, 8, 2])
    apart = PackedDataset(documents, 8)
    across = PackedDataset(documents, 8, cross_document_attention=True)
    rows, plain = (data.read(np.arange(len(data))) for data in (apart, across))
    assert set(plain) == {"tokens", "targets", "loss_mask"}
    for name in plain:
        np.testing.assert_array_equal(plain[name], rows[name])
    assert "a token attends to its own document" in apart.summary()
    assert "a token attends to the whole row" in across.summary()
    assert apart.fingerprint != across.fingerprint


def test_maps_of_files_are_read_where_they_lie(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, np.uint16, "r")
    data = PackedDataset(Documents(tokens, np.arange(0, 1001, 10)), 16)
    assert data.num_bytes < 6000
    assert set(data.read(np.arange(len(data)))["tokens"].reshape(-1)) == set(range(1000))
    os.truncate(path, 100)
    with pytest.raises(DataError, match=r"tokens.bin shrank from 2000 to 100 bytes"):
        data.read(np.array([0]))


def test_packed_rows_load_shuffled_and_evaluate_in_order():
    data = PackedDataset(documents_of([3, 9, 4, 1, 6, 8, 8, 2, 30]), 8)
    assert isinstance(data, Dataset)
    rows = data.read(np.arange(len(data)))
    mesh = make_mesh("data:2", devices=jax.devices()[:2])
    with Loader(data, mesh, global_batch_size=len(data) + 1) as loader:
        first = jax.device_get(next(loader).arrays)
    assert set(first) == set(rows)
    found = {tuple(row) for row in first["tokens"].tolist()}
    assert found == {tuple(row) for row in rows["tokens"].tolist()}
    for batch, count in eval_batches(data, mesh, batch_size=2):
        assert count in (1, 2)
        assert batch["segment_ids"].shape == (2, 8)


def test_the_fingerprint_depends_on_all_that_rows_depend_on():
    documents = documents_of([5, 3, 8, 2])
    others = [
        PackedDataset(documents, 8),
        PackedDataset(documents, 9),
        PackedDataset(documents, 8, policy="split"),
        PackedDataset(documents, 8, end_of_document=0),
        PackedDataset(documents_of([3, 5, 8, 2]), 8),
        PackedDataset(documents_of([5, 3, 8, 2], masked=True), 8),
        PackedDataset(Documents(documents.tokens + 1, documents.starts), 8),
    ]
    assert len({data.fingerprint for data in others}) == len(others)
    assert PackedDataset(documents_of([5, 3, 8, 2]), 8).fingerprint == others[0].fingerprint


# The cache


def test_a_plan_is_made_once(tmp_path, monkeypatch):
    lengths = np.array([5, 3, 8, 2, 11])
    first = pack_plan(lengths, 8, "best_fit", cache_dir=tmp_path / "cache")
    names = os.listdir(tmp_path / "cache")
    assert len(names) == 1
    monkeypatch.setattr(plan_lib, "_make", lambda *args: pytest.fail("it is there already"))
    again = pack_plan(lengths, 8, "best_fit", cache_dir=tmp_path / "cache")
    for name, value in vars(first).items():
        np.testing.assert_array_equal(vars(again)[name], value)
    monkeypatch.undo()
    for other in ((lengths[::-1], 8, "best_fit"), (lengths, 9, "best_fit"), (lengths, 8, "split")):
        pack_plan(*other, cache_dir=tmp_path / "cache")
    assert len(os.listdir(tmp_path / "cache")) == 4


@pytest.mark.parametrize("damage", ["cut", "short", "flip", "empty", "other"])
def test_a_damaged_plan_is_made_again(tmp_path, caplog, damage):
    lengths = np.arange(200) % 13
    first = pack_plan(lengths, 8, "best_fit")
    pack_plan(lengths, 8, "best_fit", cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(
        {"cut": data[:900], "short": data[:-64], "flip": data, "empty": b"", "other": b"text"}[
            damage
        ]
    )
    with caplog.at_level(logging.WARNING):
        again = pack_plan(lengths, 8, "best_fit", cache_dir=tmp_path)
    assert f"{path} is damaged" in caplog.text
    np.testing.assert_array_equal(again.starts_P, first.starts_P)
    caplog.clear()
    pack_plan(lengths, 8, "best_fit", cache_dir=tmp_path)
    assert caplog.text == ""
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_that_cannot_be_kept_is_used_all_the_same(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_arrays, "sync", full)
    assert pack_plan(np.array([3, 4]), 8, "split", cache_dir=tmp_path).num_rows == 1
    assert "is not kept: [Errno 28] No space left on device; the next start makes" in caplog.text
    assert list(tmp_path.iterdir()) == []


# What cannot be packed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Documents(np.zeros((2, 2), np.int32), [0, 2]), r"integers \[N\]; got int32\[2, 2"),
        (lambda: Documents(np.zeros(4), [0, 4]), r"integers \[N\]; got float64\[4\]"),
        (lambda: Documents([1, 2, 3], []), r"integers \[D \+ 1\]; got float64\[0\]"),
        (lambda: Documents([1, 2, 3], [0, 2, 1]), r"ascend within 0..3, .* from 0 to 1"),
        (lambda: Documents([1, 2, 3], [0, 4]), r"ascend within 0..3, .* from 0 to 4"),
        (lambda: Documents([1, 2, 3], [0, 3], [1, 1]), r"each of 3 tokens; got int64\[2\]"),
        (lambda: Documents.from_list([[1], ([1, 2], [1])]), r"document 1 has tokens \[2\] and"),
        (lambda: PackedDataset(documents_of([3]), 0), "sequence_length=0 must lie in 1"),
        (
            lambda: PackedDataset(documents_of([3]), 4, policy="greedy"),
            "policy 'greedy' does not exist; use split or best_fit",
        ),
        (
            lambda: PackedDataset(documents_of([3]), 4, end_of_document=-1),
            "end_of_document=-1 must be a token id",
        ),
        (lambda: pack_plan(np.array([2, -1]), 4, "split"), "document 1 has -1 tokens"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_nothing_to_pack_is_no_row():
    for policy in POLICIES:
        assert len(PackedDataset(Documents.from_list([]), 8, policy=policy)) == 0
        assert len(PackedDataset(documents_of([0, 0]), 8, policy=policy)) == 0
