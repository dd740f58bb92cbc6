"""Packing of token shards: the rows of the same tokens as text, whole documents, kept plans."""

import json
import logging
import multiprocessing
import os
import signal
import tracemalloc

import numpy as np
import preparing
import pytest

from jaxtrain.data import kept_arrays, pack_plan, shard_documents
from jaxtrain.data.manifest import Manifest
from jaxtrain.data.pack import Documents, PackedDataset
from jaxtrain.data.prepare import PrepareConfig, prepare
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.errors import DataError

T = 32
POLICIES = ["split", "best_fit"]


def make(folder, *, tokenizer="bytes", shard_bytes=3000):
    """Shards of records, and of plain files of which two go on over several shards."""
    source = folder / "text"
    source.mkdir(parents=True)
    lines = [json.dumps({"text": preparing.text(f"b{i}", 60)}) + "\n" for i in range(40)]
    (source / "b.jsonl").write_text("".join(lines))
    for name, words in (("a.txt", 2500), ("c.txt", 40), ("d.txt", 3500), ("e.txt", 9)):
        (source / name).write_text(preparing.text(name, words))
    config = PrepareConfig(shard_bytes=shard_bytes, workers=1, tokenizer=tokenizer)
    prepare([str(source)], str(folder / "out"), config)
    return source, folder / "out"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    source, out = make(tmp_path_factory.mktemp("made"))
    shards = Manifest.read(str(out)).shards
    # A document over several shards, and one that ends in the middle of a shard.
    assert sum(shard.continues for shard in shards) >= 4
    assert any(shard.continues and shard.documents > 1 for shard in shards) or len(shards) > 9
    return source, out


def load(source, **options):
    options = {"sequence_length": T, "validation_fraction": 0, "packing": "best_fit", **options}
    return text_datasets(TextDataConfig(source=str(source), **options))


def all_rows(data):
    return data.read(np.arange(len(data)))


def assert_same_rows(ours, others):
    assert len(ours) == len(others)
    expected = all_rows(others)
    found = all_rows(ours)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == array.dtype


def stream_of(out):
    """All tokens of a directory's shards, in plain Python, each E at a shard's beginning left out
    that no document begins with.
    """
    manifest = Manifest.read(str(out))
    end, stream = manifest.end_of_document, []
    for shard in manifest.shards:
        tokens = np.frombuffer((out / shard.file).read_bytes(), manifest.dtype).tolist()
        if stream and stream[-1] == end and tokens and tokens[0] == end:
            tokens = tokens[1:]
        stream += tokens
    return stream, end


def documents_of(rows):
    """The documents in packed rows of which none is longer than a row."""
    found = []
    for tokens, segments in zip(rows["tokens"], rows["segment_ids"], strict=True):
        found += [tuple(tokens[segments == s]) for s in range(1, segments.max() + 1)]
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_bytes_are_those_of_the_text(made, policy):
    source, out = made
    ours, held_out, info = load(out, packing=policy)
    text, _, text_info = load(source, packing=policy)
    assert_same_rows(ours, text)
    assert held_out is None
    assert info.train_tokens == text_info.train_tokens
    assert len(ours.documents) == len(text.documents) == 44
    assert "44 documents packed by" in info.summary()


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_a_tokenizer_are_those_of_its_tokens(tmp_path, policy):
    source, out = make(tmp_path, tokenizer="bpe:300")
    tokenizer = Manifest.read(str(out)).open_tokenizer()
    texts = []
    for path in sorted(source.iterdir()):
        if path.suffix == ".jsonl":
            texts += [json.loads(line)["text"] for line in path.read_text().splitlines()]
        else:
            texts.append(path.read_text())
    end = tokenizer.end_of_document
    tokens = tokenizer.encode([text.encode() for text in texts])
    documents = Documents.from_list([np.concatenate([[end], t]) for t in tokens])
    expected = PackedDataset(documents, T, policy=policy, end_of_document=end)
    assert_same_rows(load(out, packing=policy)[0], expected)


def test_several_directories_are_packed_as_one(made, tmp_path):
    source, out = made
    _, other = make(tmp_path, shard_bytes=5000)
    both, _, _ = load(f"{out},{other}")
    twice = [load(source)[0].documents for _ in range(2)]
    pieces = [d.tokens[a:b] for d in twice for a, b in zip(d.starts, d.starts[1:], strict=False)]
    expected = PackedDataset(Documents.from_list(pieces), T, end_of_document=255)
    assert_same_rows(both, expected)


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("policy", POLICIES)
def test_each_token_is_a_target_on_one_side(made, policy, fraction):
    _, out = made
    train, held_out, info = load(out, packing=policy, validation_fraction=fraction)
    targets = []
    for data in (train, held_out):
        rows = all_rows(data)
        assert (rows["loss_mask"] == (rows["segment_ids"] > 0)).all()
        targets += rows["targets"][rows["loss_mask"] > 0].tolist()
        assert len(data.documents) == len(data.documents.lengths)
    stream, _ = stream_of(out)
    assert sorted(targets) == sorted(stream[1:])
    assert info.train_tokens + info.eval_tokens == len(stream) - 1
    assert fraction / 4 < info.eval_tokens / len(stream) < fraction * 4


def test_whole_documents_are_held_out_as_without_packing(tmp_path):
    texts = [preparing.text(f"s{i}", 60) for i in range(100)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PrepareConfig(shard_bytes=6000, workers=1)
    prepare([str(path)], str(tmp_path / "out"), config)
    options = {"validation_fraction": 0.1, "sequence_length": 600}
    packed = load(tmp_path / "out", **options)
    windows = load(tmp_path / "out", packing="none", **options)
    whole = [(255, *text.encode()) for text in texts]
    found = [documents_of(all_rows(data)) for data in packed[:2]]
    assert sorted(found[0] + found[1]) == sorted(whole)
    for documents, data in zip(found, windows[:2], strict=True):
        streams = [bytes(stream.astype(np.uint8))[1:-1] for stream in data._streams]
        others = [(255, *text) for stream in streams for text in stream.split(b"\xff")]
        assert sorted(documents) == sorted(others)


def test_a_document_that_is_cut_has_the_next_token_as_target(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(400)))
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"), PrepareConfig(workers=1))
    train, held_out, _ = load(tmp_path / "out", validation_fraction=0.1)
    text = (tmp_path / "a.txt").read_bytes()
    for data in (train, held_out):
        rows = all_rows(data)
        inside = rows["targets"][rows["loss_mask"] > 0]
        assert bytes(inside[:-1].astype(np.uint8)) in text
    last = all_rows(train)["targets"][all_rows(train)["loss_mask"] > 0][-1]
    first = all_rows(held_out)["tokens"][0, 0]
    assert last == first != 255
    assert all_rows(held_out)["targets"][all_rows(held_out)["loss_mask"] > 0][-1] == 255


def test_facts_are_those_of_the_text(made):
    source, out = made
    ours, _, info = load(out)
    text, _, text_info = load(source)
    # A pair of bytes stands in one shard: the E at the end of one is that at the next one's start.
    name = "validation_entropy_order_1"
    assert info.facts(ours)[name] == text_info.facts(text)[name]


def test_the_fingerprint_follows_the_documents(made, tmp_path):
    _, out = made
    first = load(out)[0].fingerprint
    assert load(out)[0].fingerprint == first
    others = [load(out, packing="split"), load(out, validation_fraction=0.1)]
    assert len({first, *(other[0].fingerprint for other in others)}) == 3
    # The same lengths, and other tokens.
    _, copy = make(tmp_path)
    text = (tmp_path / "text" / "e.txt").read_text()
    (tmp_path / "text" / "e.txt").write_text(text.replace("a", "b").replace("t", "u"))
    prepare([str(tmp_path / "text")], str(tmp_path / "b"), PrepareConfig(shard_bytes=3000))
    assert load(copy)[0].fingerprint == first
    assert load(tmp_path / "b")[0].fingerprint != first


# The plan


def test_the_plan_is_kept_beside_the_shards_and_mapped(made, monkeypatch):
    _, out = made
    first = load(out, validation_fraction=0.2)[0]
    assert any(name.endswith(".plan") for name in os.listdir(out / ".plans"))
    monkeypatch.setattr(pack_plan, "_make", lambda *args: pytest.fail("it is there already"))
    monkeypatch.setattr(
        shard_documents.ShardDocuments, "lengths", property(lambda self: pytest.fail("not read"))
    )
    again = load(out, validation_fraction=0.2)[0]
    for name, value in vars(first.plan).items():
        np.testing.assert_array_equal(vars(again.plan)[name], value)
    assert again.num_bytes == 0


def test_shards_that_change_get_another_plan(made, tmp_path):
    _, before = make(tmp_path / "a")
    load(before)
    names = set(os.listdir(before / ".plans"))
    (tmp_path / "a" / "text" / "e.txt").write_text("another text, and a longer one\n" * 9)
    _, after = tmp_path / "a" / "text", tmp_path / "a" / "new"
    prepare([str(tmp_path / "a" / "text")], str(after), PrepareConfig(shard_bytes=3000))
    # As when the directory is prepared anew under the old name, and the plans were kept.
    os.rename(before / ".plans", after / ".plans")
    ours = load(after)[0]
    assert_same_rows(ours, load(tmp_path / "a" / "text")[0])
    assert names < set(os.listdir(after / ".plans"))


def test_shards_that_cannot_be_written_to_are_packed_all_the_same(made, monkeypatch, caplog):
    source, out = made

    def refuse(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(kept_arrays, "lock_file", refuse)
    monkeypatch.setattr(kept_arrays, "_map", lambda path: None)
    with caplog.at_level(logging.WARNING):
        ours = load(out)[0]
    assert "is not kept: [Errno 30] Read-only file system; the next start makes it" in caplog.text
    assert_same_rows(ours, load(source)[0])


def _open(out, queue):
    made = []
    make_plan = pack_plan._make

    def noting(*args):
        plan = make_plan(*args)
        made.extend([1] * (plan.num_rows > 0))  # nothing is held out
        return plan

    pack_plan._make = noting
    data = load(out)[0]
    queue.put((len(made), data.fingerprint, len(data)))


def test_of_processes_that_start_together_one_makes_the_plan(tmp_path):
    _, out = make(tmp_path)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_open, args=(out, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(120)
    assert sum(made for made, _, _ in answers) == 1
    assert len({answer[1:] for answer in answers}) == 1
    # No lock, and nothing half.
    (name,) = os.listdir(out / ".plans")
    assert name.endswith(".plan")


def _hang_while_making(out, has_begun):
    def hang(*args):
        has_begun.set()
        signal.pause()

    pack_plan._make = hang
    load(out)


class _ToQueue(logging.Handler):
    def __init__(self, queue):
        super().__init__(logging.INFO)
        self.queue = queue

    def emit(self, record):
        self.queue.put(record.getMessage())


def _open_and_tell(out, queue):
    logger = logging.getLogger("jaxtrain.data.kept_arrays")
    logger.setLevel(logging.INFO)
    logger.addHandler(_ToQueue(queue))
    data = load(out)[0]
    queue.put(len(data))


def test_a_process_that_is_killed_while_it_makes_the_plan_is_replaced(tmp_path):
    _, out = make(tmp_path)
    context = multiprocessing.get_context("spawn")
    queue, has_begun = context.Queue(), context.Event()
    maker = context.Process(target=_hang_while_making, args=(out, has_begun))
    maker.start()
    assert has_begun.wait(120)
    other = context.Process(target=_open_and_tell, args=(out, queue))
    other.start()
    said = queue.get(timeout=120)
    assert said.startswith("waiting for ")
    assert f", which process {maker.pid} on " in said
    maker.kill()
    assert queue.get(timeout=120).startswith("made in ")
    assert queue.get(timeout=120) == len(load(out)[0])
    other.join(120)
    (name,) = os.listdir(out / ".plans")
    assert name.endswith(".plan")


def test_memory_does_not_grow_with_the_documents(tmp_path):
    """A start with a kept plan takes less than a byte for each document."""
    lines = "".join(json.dumps({"text": f"{n:05d}"}) + "\n" for n in range(20_000))
    (tmp_path / "in.jsonl").write_text(lines)
    config = PrepareConfig(shard_bytes=4000, workers=1)
    prepare([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), config)
    load(tmp_path / "out", validation_fraction=0.1)
    tracemalloc.start()
    train, held_out, _ = load(tmp_path / "out", validation_fraction=0.1)
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(train.documents) + len(held_out.documents) == 20_000
    shards = len(Manifest.read(str(tmp_path / "out")).shards)
    assert now < 20_000 * 4 + shards * 6000


# Damage


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    _, out = make(tmp_path, tokenizer="bpe:300")
    name = Manifest.read(str(out)).shards[3].file
    data = np.fromfile(out / name, "<u2")
    data[7] = 999
    (out / name).write_bytes(data.tobytes())
    train, _, _ = load(out)
    with pytest.raises(DataError, match=f"{name} holds the token 999, outside its vocabulary"):
        all_rows(train)


def test_a_shard_that_shrinks_in_use_is_an_error(tmp_path):
    _, out = make(tmp_path)
    train, _, _ = load(out)
    path = out / Manifest.read(str(out)).shards[2].file
    os.truncate(path, 100)
    with pytest.raises(DataError, match=f"{path.name} shrank from"):
        all_rows(train)
