"""A worker of `jaxtrain prepare`: makes shards, one for each number that it is told.

    python -m jaxtrain.data.prepare_worker OUT stop|skip PARENT

It reads numbers of units, a line each, and answers with lines of JSON: {"done": bytes} now and
then, and at the end of a unit its record, or {"problems": [...]}. It imports no JAX, and ends with
the process that started it.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtrain.child_process import die_with
from jaxtrain.data.documents import Reader
from jaxtrain.data.manifest import DTYPES, INDEX_DTYPE, TOKENIZER, UNFINISHED, Shard, checksum_of
from jaxtrain.data.prepare_plan import Part, Plan
from jaxtrain.data.tokenizing import ByteTokenizer, LibraryTokenizer, Tokenizer
from jaxtrain.errors import DataError, JaxtrainError
from jaxtrain.output_files import replace_file, replacing

PLAN = "plan.json"
_BATCH_BYTES = 2**20


def record_path(out: str, unit: int) -> Path:
    """The record of a finished unit, written when its shard is on the disk."""
    return Path(out, UNFINISHED, f"{unit:05d}.json")


def load_tokenizer(out: str, plan: Plan) -> Tokenizer:
    """The tokenizer of a preparation."""
    path = Path(out, TOKENIZER)
    if plan.tokenizer == ByteTokenizer.hash:
        return ByteTokenizer()
    return LibraryTokenizer(path.read_bytes(), TOKENIZER, plan.end_of_document)


def dtype_of(vocab_size: int) -> str:
    """The smallest dtype that holds every token."""
    return next(name for name, dtype in DTYPES.items() if vocab_size <= np.iinfo(dtype).max + 1)


def main() -> None:
    """Answers until its input ends."""
    die_with(int(sys.argv[3]))
    # What a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(values: dict[str, Any]) -> None:
        try:
            print(json.dumps(values), file=answers, flush=True)
        except BrokenPipeError:
            os._exit(1)  # the process that started it has ended, and said why

    out, skips = sys.argv[1], sys.argv[2] == "skip"
    plan = Plan.from_json(Path(out, UNFINISHED, PLAN).read_bytes())
    tokenizer = load_tokenizer(out, plan)
    for line in sys.stdin:
        try:
            answer(make_shard(out, plan, int(line), tokenizer, skips, answer))
        except JaxtrainError as error:
            answer({"problems": [str(error)]})
        except OSError as error:
            answer({"problems": [f"{error.filename or out}: {error.strerror}"]})


def make_shard(
    out: str,
    plan: Plan,
    unit: int,
    tokenizer: Tokenizer,
    skip_bad: bool,
    answer: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Writes shard and record of a unit; returns the record.

    Raises:
        DataError: for documents that cannot be used, unless they are skipped.
    """
    reader = plan.reader(skip_bad=skip_bad)
    name, index_name = f"shard-{unit:05d}.bin", f"shard-{unit:05d}.idx"
    parts = plan.units[unit]
    continues = bool(parts) and _goes_on(plan, parts[0])
    with replacing(Path(out, name)) as file:
        writer = _Writer(file, tokenizer, continues)
        done = 0
        for batch in _batches(documents_of(plan, parts, reader)):
            if reader.problems and not skip_bad:
                break
            writer.write(batch)
            done += sum(len(text) for text, _ in batch)
            answer({"done": done})
        if reader.problems and not skip_bad:
            raise DataError("; ".join(reader.problems))
    with replacing(Path(out, index_name)) as file:
        file.write(np.array(writer.index, INDEX_DTYPE).tobytes())
    shard = Shard(
        file=name,
        index=index_name,
        tokens=writer.position,
        documents=len(writer.index) - 1,
        checksum=checksum_of(os.path.join(out, name)),
        index_checksum=checksum_of(os.path.join(out, index_name)),
        continues=continues,
    )
    record = {
        "shard": dataclasses.asdict(shard),
        "counts": dataclasses.asdict(reader.counts),
        "skipped": reader.problems,
        "hashes": {p.file: checksum_of(plan.file(p.file).path) for p in parts if p.start == 0},
    }
    replace_file(record_path(out, unit), json.dumps(record).encode())
    return {"unit": unit, **record}


def documents_of(plan: Plan, parts: list[Part], reader: Reader) -> Iterator[tuple[bytes, bool]]:
    """Yields (text, whether its document ends there) of a unit."""
    for part in parts:
        file = plan.file(part.file)
        texts = reader.documents(file, part.start, part.stop)
        if file.has_records:
            for some in texts:
                yield from ((document, True) for document in some)
            continue
        text, ends = (
            b"".join(document for some in texts for document in some),
            part.stop >= file.size,
        )
        # With nothing left of it, a document that the shard before began still has to end.
        if text or (ends and _goes_on(plan, part)):
            yield text, ends


def _goes_on(plan: Plan, part: Part) -> bool:
    """Whether a part begins inside of a document."""
    return part.start > 0 and not plan.file(part.file).has_records


def _batches(documents: Iterator[tuple[bytes, bool]]) -> Iterator[list[tuple[bytes, bool]]]:
    batch, size = [], 0
    for document, ends in documents:
        batch.append((document, ends))
        size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


class _Writer:
    """Writes the tokens of a shard, and notes where documents begin."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, continues: bool) -> None:
        self._file = file
        self._tokenizer = tokenizer
        self._dtype = DTYPES[dtype_of(tokenizer.vocab_size)]
        self._end = np.array([tokenizer.end_of_document], self._dtype)
        self.position = 0
        if not continues:
            file.write(self._end.tobytes())
            self.position = 1
        self.index = [self.position]

    def write(self, batch: list[tuple[bytes, bool]]) -> None:
        encoded = self._tokenizer.encode([document for document, _ in batch])
        pieces = []
        for tokens, (_, ends) in zip(encoded, batch, strict=True):
            pieces += [tokens.astype(self._dtype), self._end[: int(ends)]]
            self.position += len(tokens) + ends
            self.index.append(self.position)
        if pieces:
            self._file.write(np.concatenate(pieces).tobytes())


if __name__ == "__main__":
    main()
