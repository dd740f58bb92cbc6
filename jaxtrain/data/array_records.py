"""Documents in ArrayRecord files, whose records are found by their number.

A record is its text in UTF-8, or a JSON object, or a tf.train.Example (as TensorFlow Datasets
writes them) with the text in one field. Which of them is decided by the first record of a file,
and holds for all of it.
"""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.errors import DataError

_READ_RECORDS = 1024


def num_records(path: str) -> int:
    """Records of a file.

    Raises:
        DataError: if it is damaged, or no ArrayRecord file.
    """
    reader = _open(path)
    try:
        return reader.num_records()
    finally:
        reader.close()


def read_texts(
    path: str, field: str, start: int, stop: int
) -> Iterator[tuple[int, list[bytes | str]]]:
    """Yields (number of the first record, texts, or what is wrong with one), some at a time.

    Args:
        path: of the file.
        field: that holds the text, where records have fields.
        start, stop: numbers of records; a `stop` over their number means all.

    Raises:
        DataError: if the file is damaged, or no ArrayRecord file.
    """
    reader = _open(path)
    try:
        stop = min(stop, reader.num_records())
        if start >= stop:
            return
        text_of = _kind(_read(reader, 0, 1)[0])
        for first in range(start, stop, _READ_RECORDS):
            records = _read(reader, first, min(first + _READ_RECORDS, stop))
            yield first, [text_of(record, field) for record in records]
    finally:
        reader.close()


def _open(path: str) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    if not reader.ok():
        # It says why when it is read, and else that it has no records.
        try:
            reader.read_all()
        except RuntimeError as error:
            raise DataError(str(error)) from error
        raise DataError("the file is damaged")
    return reader


def _read(reader: Any, start: int, stop: int) -> list[bytes]:
    try:
        return reader.read(start, stop)
    except RuntimeError as error:
        raise DataError(str(error)) from error


def _kind(record: bytes) -> Callable[[bytes, str], bytes | str]:
    """The function that finds the text in records like this one."""
    if isinstance(_json(record), dict):
        return _text_of_json
    if (example := _example(record)) is not None and example.features.feature:
        return _text_of_example
    return lambda record, field: record


def _json(record: bytes) -> Any:
    try:
        return json.loads(record) if record.lstrip().startswith(b"{") else None
    except (ValueError, RecursionError):
        return None


def _text_of_json(record: bytes, field: str) -> bytes | str:
    content = _json(record)
    if not isinstance(content, dict):
        return "is no JSON object, as the first record of the file is"
    if field not in content:
        return f"has no field {field!r} (it has: {', '.join(content)})"
    text = content[field]
    if not isinstance(text, str):
        return f"has {type(text).__name__}, not text, in field {field!r}"
    # Half of a surrogate pair, which JSON can escape, becomes bytes that are not UTF-8.
    return text.encode(errors="surrogatepass")


def _text_of_example(record: bytes, field: str) -> bytes | str:
    example = _example(record)
    if example is None:
        return "is no tf.train.Example, as the first record of the file is"
    fields = {entry.key: entry.value for entry in example.features.feature}
    if field not in fields:
        return f"has no field {field!r} (it has: {', '.join(sorted(fields))})"
    values = fields[field].bytes_list.value
    if len(values) != 1:
        return f"has {len(values)} texts, not one, in field {field!r}"
    return values[0]


def _example(record: bytes) -> Any:
    """The parsed record; None if it is none."""
    from google.protobuf.message import DecodeError

    example = _example_class()()
    try:
        example.ParseFromString(record)
    except DecodeError:
        return None
    return example


@functools.cache
def _example_class() -> Any:
    """As tensorflow/core/example/example.proto and feature.proto define it, without the numbers.

    In a pool of its own: TensorFlow, if it is loaded, registers the original.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_of = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="jaxtrain")
    for name, fields in {
        "BytesList": [("value", 1, True, "")],
        "Feature": [("bytes_list", 1, False, "BytesList")],
        # The wire format of a map is that of repeated entries.
        "Entry": [("key", 1, False, "str"), ("value", 2, False, "Feature")],
        "Features": [("feature", 1, True, "Entry")],
        "Example": [("features", 1, False, "Features")],
    }.items():
        message = file.message_type.add(name=name)
        for field, number, is_repeated, kind in fields:
            label = field_of.LABEL_REPEATED if is_repeated else field_of.LABEL_OPTIONAL
            if kind in ("", "str"):
                type_ = field_of.TYPE_STRING if kind else field_of.TYPE_BYTES
                message.field.add(name=field, number=number, label=label, type=type_)
            else:
                message.field.add(
                    name=field,
                    number=number,
                    label=label,
                    type=field_of.TYPE_MESSAGE,
                    type_name=f".jaxtrain.{kind}",
                )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jaxtrain.Example"))
