"""Rows as Parquet: written by Spark, read by the ranks with pyarrow, each its own equal share."""
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def write(df: Any, store: Any, columns: Sequence[str], validation: Any, seed: int, parts: int) -> None:
    """Writes a DataFrame's columns to the store, Spark's vectors as arrays.

    Args:
        validation: see params. parts: files of each part, one for each rank.
    Raises:
        ValueError: no such column, or a fraction that is none.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.functions import col

    flag = validation if isinstance(validation, str) else None
    missing = [name for name in [*columns, *([flag] if flag else [])] if name not in df.columns]
    if missing:
        raise ValueError(f"the DataFrame has no columns {', '.join(missing)}; it has {', '.join(df.columns)}")
    if flag is None and validation is not None and not 0 < validation < 1:
        raise ValueError(f"validation={validation!r}: give a fraction between 0 and 1, or the name of a column")
    kinds = {field.name: field.dataType.typeName() for field in df.schema.fields}
    chosen = [vector_to_array(col(name), "float32").alias(name) if kinds[name].startswith("vector") else col(name)
              for name in columns]
    if flag is not None:
        where = col(flag).cast("boolean")
        train, val = df.where(~where), df.where(where)
    elif validation is not None:
        train, val = df.randomSplit([1 - validation, validation], seed)
    else:
        train, val = df, None
    for part, path in ((train, store.get_train_data_path()), (val, store.get_val_data_path())):
        if part is not None:
            part.select(chosen).repartition(parts).write.mode("overwrite").parquet(store.spark_path(path))


def column(values: Any, shape: Sequence[int] | None = None) -> np.ndarray:
    """A column as an array, rows first: float64 as float32, lists of one length as rows.

    Args:
        values: pyarrow.ChunkedArray or Array. shape: to be given to the result; None: as it is.
    Raises:
        ValueError: rows of different lengths, or missing values.
    """
    import pyarrow as pa

    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if values.null_count:
        raise ValueError("a column has missing values: fill them in, or leave these rows out")
    rows = len(values)
    listed = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    flat = (values.flatten() if listed else values).to_numpy(zero_copy_only=False)
    if listed and (rows == 0 or len(flat) % rows or len(set(np.diff(values.offsets.to_numpy()))) > 1):
        raise ValueError("the rows of a column have different lengths: pad them")
    array = flat.reshape(rows, -1) if listed else flat
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return array if shape is None else array.reshape(-1, *shape[1:])


class Rows:
    """A rank's share of the rows of a folder of Parquet: as many for each rank, the remainder is left out.

    Args:
        columns: {name: shape or None}, see column().
    Raises:
        ValueError: fewer rows than ranks.
    Attributes:
        count: rows of this rank, the same for all.
    """

    def __init__(self, dataset: Any, columns: dict[str, Any], rank: int, size: int) -> None:
        self._columns = columns
        groups = [group for fragment in sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
                  for group in fragment.split_by_row_group()]
        lengths = [group.row_groups[0].num_rows for group in groups]
        self.count = sum(lengths) // size
        if self.count == 0:
            raise ValueError(f"{sum(lengths)} rows for {size} ranks: take fewer ranks, or more rows")
        first, last = rank * self.count, (rank + 1) * self.count
        self._parts = []        # (row group, its first row, its rows), of this rank
        begin = 0
        for group, length in zip(groups, lengths, strict=True):
            low, high = max(first, begin), min(last, begin + length)
            if low < high:
                self._parts.append((group, low - begin, high - low))
            begin += length

    def steps(self, batch_size: int) -> int:
        """Batches of all rows, the last one smaller."""
        return -(-self.count // batch_size)

    def batches(self, batch_size: int, seed: Any = None) -> Iterator[dict[str, np.ndarray]]:
        """Batches of all rows, {column: array}. seed: of their order; None: as they lie."""
        random = None if seed is None else np.random.default_rng(seed)
        parts = self._parts if random is None else [self._parts[i] for i in random.permutation(len(self._parts))]
        held: dict[str, np.ndarray] | None = None
        for group, low, length in parts:
            table = group.to_table(columns=list(self._columns)).slice(low, length)
            rows = {name: column(table.column(name), shape) for name, shape in self._columns.items()}
            if random is not None:
                order = random.permutation(length)
                rows = {name: array[order] for name, array in rows.items()}
            held = rows if held is None else {name: np.concatenate([held[name], rows[name]]) for name in rows}
            whole = len(next(iter(held.values()))) // batch_size * batch_size
            for begin in range(0, whole, batch_size):
                yield {name: array[begin:begin + batch_size] for name, array in held.items()}
            held = {name: array[whole:] for name, array in held.items()}
        if held is not None and len(next(iter(held.values()))):
            yield held
