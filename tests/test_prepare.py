"""`jaxtrain prepare`: the text comes back, the same bytes whatever happens on the way."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import preparing
import pytest
from processes import wait_until
from tokenizers import Tokenizer as LibraryReference

from jaxtrain.data import prepare_pool
from jaxtrain.data.counts import parse_on_error
from jaxtrain.data.files import TextFile
from jaxtrain.data.manifest import Manifest
from jaxtrain.data.prepare_plan import Part, Plan, cut
from jaxtrain.errors import ConfigError
from jaxtrain.file_lock import lock_file

FLAGS = ("--shard_bytes=8000",)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return folder, preparing.corpus(folder)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory, source):
    """A tokenizer that was trained elsewhere."""
    from jaxtrain.data.tokenizing import train_bpe

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_bpe((t.encode() for _, texts in source[1] for t in texts), 400))
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, source, tokenizer_path):
    """Shards that one worker made without being disturbed."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    command = (source[0], out, f"--tokenizer={tokenizer_path}", "--workers=1", *FLAGS)
    code, _, err = preparing.prepare(*command)
    assert code == 0, err
    return out


def documents_in(out):
    """The tokens of the documents, put together again over the shards."""
    manifest = Manifest.read(str(out))
    documents = []
    for shard in manifest.shards:
        tokens, index = manifest.tokens_of(shard), manifest.index_of(shard)
        assert index[-1] == len(tokens)
        assert index[0] == (0 if shard.continues else 1)
        assert shard.continues or tokens[0] == manifest.end_of_document
        for number, (start, stop) in enumerate(itertools.pairwise(index)):
            piece = tokens[start:stop].tolist()
            if number == 0 and shard.continues:
                documents[-1] += piece
            else:
                assert not documents or documents[-1][-1] == manifest.end_of_document
                documents.append(piece)
    assert all(document[-1] == manifest.end_of_document for document in documents)
    assert len(documents) == manifest.documents
    return [document[:-1] for document in documents], manifest


def test_bytes_come_back(source, tmp_path):
    folder, files = source
    code, out, err = preparing.prepare(folder, tmp_path / "out", *FLAGS)
    assert (code, err) == (0, "")
    found, manifest = documents_in(tmp_path / "out")
    assert [bytes(document).decode() for document in found] == [t for _, ts in files for t in ts]
    sources = json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"]
    assert [source["name"] for source in sources] == [name for name, _ in files]
    assert (manifest.dtype, manifest.vocab_size, manifest.end_of_document) == ("uint8", 256, 255)
    assert any(shard.continues for shard in manifest.shards)
    assert f"{manifest.documents} documents, {manifest.tokens:,} tokens of 256 (bytes)" in out
    manifest.verify()


def test_tokens_are_those_of_the_library_on_whole_documents(source, prepared, tokenizer_path):
    """Also of documents that were cut over shards."""
    found, manifest = documents_in(prepared)
    texts = [text for _, texts in source[1] for text in texts]
    reference = LibraryReference.from_file(str(tokenizer_path))
    reference.encode_special_tokens = True
    assert found == [encoding.ids for encoding in reference.encode_batch(texts)]
    assert [reference.decode(d, skip_special_tokens=False) for d in found] == texts
    assert manifest.end_of_document not in {token for document in found for token in document}
    assert len(manifest.shards) > 20


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_makes_the_same_bytes(
    source, prepared, tokenizer_path, tmp_path, workers
):
    command = (source[0], tmp_path / "out", f"--tokenizer={tokenizer_path}", *FLAGS)
    code, _, err = preparing.prepare(*command, f"--workers={workers}")
    assert code == 0, err
    assert preparing.contents(tmp_path / "out") == preparing.contents(prepared)


def workers_of(process):
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as file:
        return [int(pid) for pid in file.read().split()]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_kill_9_at_several_points_and_the_same_command_goes_on(
    source, prepared, tokenizer_path, tmp_path
):
    out = tmp_path / "out"
    command = (source[0], out, f"--tokenizer={tokenizer_path}", "--workers=2", *FLAGS)

    def has(num_shards):
        return len(list(out.glob("shard-*.bin"))) >= num_shards

    # Before anything is there, with the plan only, and after some shards each.
    for num_shards in (-1, 0, 3, 8, 14):
        process = preparing.start(*command)
        if num_shards < 0:
            time.sleep(0.05)
        elif num_shards == 0:
            wait_until(lambda: (out / ".prepare" / "plan.json").exists(), every=0.001)
        else:
            wait_until(lambda wanted=num_shards: has(wanted), every=0.001)
        assert process.poll() is None
        workers = workers_of(process)
        process.kill()
        process.communicate()
        # Workers end with the command.
        wait_until(lambda pids=workers: not any(map(is_running, pids)))
        assert not (out / "manifest.json").exists()
    code, _, err = preparing.prepare(*command)
    assert code == 0
    assert "going on: " in err
    assert preparing.contents(out) == preparing.contents(prepared)
    code, _, err = preparing.prepare(*command)
    assert code == 0
    assert "prepared already" in err


def test_shards_of_a_file_that_has_changed_since_are_not_taken_for_its_own(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one text\n")
    command = (text, tmp_path / "out")
    assert preparing.prepare(*command)[0] == 0
    later = time.time() + 10
    os.utime(text, (later, later))
    code, _, err = preparing.prepare(*command)
    assert (code, "prepared already" in err) == (0, True)
    text.write_text("two text\n")
    os.utime(text, (later, later))
    code, _, err = preparing.prepare(*command)
    assert code == 2
    assert "holds shards of a.txt as it was" in err


def test_two_preparations_of_one_directory_do_not_meet(tmp_path):
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "out" / ".prepare").mkdir(parents=True)
    with lock_file(tmp_path / "out" / ".prepare" / "lock", ValueError):
        code, _, err = preparing.prepare(tmp_path / "a.txt", tmp_path / "out")
    assert code == 2
    assert f"is being prepared by process {os.getpid()} on " in err


def test_a_worker_that_is_killed_is_named(source, tokenizer_path, tmp_path):
    command = (source[0], tmp_path / "out", f"--tokenizer={tokenizer_path}", "--workers=2", *FLAGS)
    process = preparing.start(*command)
    wait_until(lambda: len(workers_of(process)) == 2)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 76
    assert "was killed by SIGKILL (out of memory?) at shard" in err
    assert "the same command goes on" in err
    assert preparing.prepare(*command)[0] == 0


def test_ctrl_c_says_that_it_can_go_on(source, tokenizer_path, tmp_path):
    process = preparing.start(source[0], tmp_path / "out", f"--tokenizer={tokenizer_path}", *FLAGS)
    wait_until(lambda: len(workers_of(process)) == 2)
    workers = workers_of(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip().splitlines()[-1]) == (
        75,
        "interrupted; the same command goes on where this stopped",
    )
    wait_until(lambda: not any(map(is_running, workers)))


def test_ctrl_c_while_workers_are_started_leaves_none(tmp_path, monkeypatch):
    started = []

    def feed(pool, worker):
        started.append(worker)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare_pool.Pool, "_feed", feed)
    with pytest.raises(KeyboardInterrupt):
        prepare_pool.Pool(str(tmp_path), "stop", 3, [0, 1, 2])
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started)


def test_a_trained_tokenizer_is_the_same_each_time(source, tmp_path):
    for name, workers in (("one", 1), ("two", 2)):
        code, _, err = preparing.prepare(
            source[0], tmp_path / name, "--tokenizer=bpe:300", f"--workers={workers}", *FLAGS
        )
        assert code == 0, err
    ours = preparing.contents(tmp_path / "one")
    assert ours == preparing.contents(tmp_path / "two")
    found, manifest = documents_in(tmp_path / "one")
    assert (manifest.tokenizer, manifest.vocab_size) == ("bpe:300", 300)
    tokenizer = manifest.open_tokenizer()
    assert [tokenizer.decode(d) for d in found] == [t for _, ts in source[1] for t in ts]


def test_workers_import_no_jax():
    script = """
import sys
import jaxtrain.data.prepare_worker, jaxtrain.data.prepare
print([name for name in ("jax", "flax", "grain", "orbax") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


BAD = '{"text":"good one"}\n{oops\n{"text":"good two"}\n{"body":1}\n'


def test_bad_records_stop_it_or_are_counted(tmp_path):
    (tmp_path / "in.jsonl").write_text(BAD)
    (tmp_path / "more.txt").write_text("plain")
    command = (tmp_path / "in.jsonl", tmp_path / "more.txt", tmp_path / "out")
    code, _, err = preparing.prepare(*command)
    assert code == 4
    assert "error: in.jsonl:2 is not JSON" in err
    code, _, err = preparing.prepare(*command, "--on_error=skip:1")
    assert code == 4
    assert "2 bad documents, and on_error=skip:1; the first ones: in.jsonl:2 is not" in err
    assert "in.jsonl:4 has no field 'text' (it has: body); name the field with --json_field" in err
    code, _, err = preparing.prepare(*command, "--on_error=skip:2")
    assert code == 0
    assert "2 bad documents skipped" in err
    found, _ = documents_in(tmp_path / "out")
    assert [bytes(document) for document in found] == [b"good one", b"good two", b"plain"]


@pytest.mark.parametrize("text", ["skip", "skip:0", "skip:-1", "go on"])
def test_on_error_is_checked(text):
    with pytest.raises(ConfigError, match=f"on_error={text} must be stop, or skip:N"):
        parse_on_error(text)


def test_what_it_cannot_do_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    out = tmp_path / "out"
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    cases = [
        ((a,), 2, "takes SOURCE ... OUT, at least two paths"),
        ((a, b), 2, "b.txt must be a directory; it is a file"),
        ((a, tmp_path / "full"), 2, "full is not empty, and holds no preparation"),
        ((tmp_path / "none", out), 4, "SOURCE .*none does not exist; give stdlib"),
        ((b, out), 4, "there is no text in the sources: 1 empty file skipped"),
        ((a, out, "--tokenizer=bpe:12"), 2, "bpe:SIZE with SIZE at least 257"),
        ((a, out, "--tokenizer=byte"), 4, "tokenizer=byte does not exist; did you mean bytes"),
        ((a, out, "--worker=2"), 2, "did you mean --workers"),
    ]  # fmt: skip
    for words, expected, message in cases:
        code, _, err = preparing.prepare(*words)
        assert code == expected, err
        assert re.search(message, err), err
    # Without text it had begun, with a plan of other sources.
    code, _, err = preparing.prepare(a, out)
    assert (code, "holds the beginning of another preparation (a.txt has changed)" in err) == (
        2,
        True,
    )
    assert (tmp_path / "full" / "x").read_text() == "mine"


def test_sources_that_change_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    out = tmp_path / "out"
    assert preparing.prepare(tmp_path / "a.txt", out)[0] == 0
    (tmp_path / "a.txt").write_text("some other text")
    code, _, err = preparing.prepare(tmp_path / "a.txt", out)
    assert code == 2
    assert "holds shards of other sources, flags or another tokenizer" in err


def plan_of(sizes, **options):
    files = [TextFile(f"/x/{name}", name, size) for name, size in sizes.items()]
    return files, cut(files, **options)


@pytest.mark.parametrize("shard_bytes", [1, 7, 100, 10_000])
@pytest.mark.parametrize("cut_plain", [True, False])
def test_units_hold_every_byte_once(shard_bytes, cut_plain):
    sizes = {"a.txt": 5, "b.jsonl": 1000, "c.txt": 333, "d.jsonl.gz": 90, "e.txt": 0, "f.md": 1}
    files, units = plan_of(sizes, shard_bytes=shard_bytes, cut_plain=cut_plain)
    parts = [part for unit in units for part in unit]
    for number, file in enumerate(files):
        mine = [part for part in parts if part.file == number]
        edges = [0, *(part.stop for part in mine)]
        assert [part.start for part in mine] == edges[:-1]
        assert edges[-1] == file.size
        if not cut_plain and file.relative == "c.txt":
            assert len(mine) == 1
    assert parts == sorted(parts)
    if shard_bytes == 100:
        assert all(sum(p.stop - p.start for p in unit) < 300 for unit in units if cut_plain)


def test_the_identity_of_a_plan_leaves_out_places_and_times():
    base = Plan(
        files=[["/a/x.txt", "x.txt", 5, 17]],
        units=[[Part(0, 0, 5)]],
        tokenizer="bytes",
        end_of_document="",
        json_field="text",
        replace=False,
        skip_binary=True,
    )
    moved = dataclasses.replace(base, files=[["/b/x.txt", "x.txt", 5, 18]])
    assert moved.identity == base.identity
    assert base.difference(moved) == "x.txt has changed"
    assert Plan.from_json(base.to_json()) == base
    for change in ({"tokenizer": "bpe:300"}, {"replace": True}, {"units": []}, {"json_field": "b"}):
        other = dataclasses.replace(base, **change)
        assert other.identity != base.identity
        assert base.difference(other)
