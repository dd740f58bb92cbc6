"""Documents in a column of Parquet files."""

import contextlib
from collections.abc import Iterator

from jaxtrain.errors import DataError

_READ_ROWS = 4096


def read_column(
    path: str, field: str, start: int, stop: int
) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yields (number of the first row, texts, None where there is none), some rows at a time.

    Args:
        path: of the file.
        field: the column.
        start, stop: row groups; a `stop` over their number means all.

    Raises:
        DataError: if the file is damaged or no Parquet, or the column holds no text.
        KeyError: if there is no such column, with the names of those that are there.
    """
    import pyarrow as pa
    from pyarrow import parquet

    with _saying_why(), parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if field not in names:
            raise KeyError(", ".join(names))
        groups = range(start, min(stop, table.num_row_groups))
        row = sum(table.metadata.row_group(group).num_rows for group in range(start))
        for batch in table.iter_batches(_READ_ROWS, groups, [field]):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            texts = column.cast(pa.large_binary()).to_pylist()
            yield row, texts
            row += len(texts)


def row_group_bytes(path: str) -> list[int]:
    """Uncompressed size of each row group.

    Raises:
        DataError: if the file is damaged or no Parquet.
    """
    from pyarrow import parquet

    with _saying_why():
        metadata = parquet.read_metadata(path)
        return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


@contextlib.contextmanager
def _saying_why() -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(str(error).splitlines()[0]) from error
