"""Rows as Parquet: Spark writes them, and each rank reads an equal share of its own with pyarrow."""
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

_NUMBERS = ("boolean", "byte", "short", "integer", "long", "float", "double")
_MARKED = re.compile("<bagua_hvd>(.*?)</bagua_hvd>", re.DOTALL)      # our message within an error of Spark
_MISSING = "the column has missing values: fill them in, or leave these rows out"


class Source:
    """The columns of a DataFrame that the ranks read; Spark's vectors become arrays of float32.

    Args:
        columns: {name: shape or None}, see column(). flag: name of a column that is true for validation rows; or None.
    Raises:
        ValueError: no such column, a non-numeric type, or no rows; for the first row also the errors of column().
    Attributes:
        sample: the first row, {column: array}.
    """

    def __init__(self, df: Any, columns: dict[str, Any], flag: str | None) -> None:
        import pyarrow as pa
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql.functions import col

        missing = [name for name in [*columns, *([flag] if flag else [])] if name not in df.columns]
        if missing:
            raise ValueError(f"the DataFrame has no columns {', '.join(missing)}; it has {', '.join(df.columns)}")
        kinds = {field.name: field.dataType for field in df.schema.fields}
        if flag is not None and kinds[flag].typeName() not in _NUMBERS:
            raise ValueError(f"validation={flag!r}: the column is of type {kinds[flag].simpleString()}; it must be "
                             "boolean, or a number that is not 0 for the rows to validate with")
        self._df, self._flag = df, flag
        self._columns = {}
        for name in columns:
            kind = kinds[name]
            if kind.typeName().startswith("vector"):
                self._columns[name] = vector_to_array(col(name), "float32")
                continue
            if (kind.elementType if kind.typeName() == "array" else kind).typeName() not in _NUMBERS:
                raise _no_number(name, kind.simpleString())
            self._columns[name] = col(name)
        first = df.select([value.alias(name) for name, value in self._columns.items()]).first()
        if first is None:
            raise ValueError("the DataFrame has no rows")
        self.sample = {name: column(name, pa.array([first[name]]), shape) for name, shape in columns.items()}
        self._lengths = {name: len(first[name]) for name in columns if isinstance(first[name], list)}

    def write(self, train: str, val: str | None, fraction: float, seed: int, parts: int) -> None:
        """Writes Parquet; Spark checks each row at the same time.

        Args:
            train, val: folders, as Spark names them; val None: no rows for validation. fraction: share of the rows for
                validation, if no column decides. parts: number of files in each folder.
        Raises:
            ValueError: a row with a missing value, or an array of another length than the first row's.
        """
        if val is None:
            parted = [(self._df, train)]
        elif self._flag is not None:
            flagged = self._flagged()
            parted = [(self._df.where(flagged), val), (self._df.where(~flagged), train)]
        else:
            rest, validation = self._df.randomSplit([1 - fraction, fraction], seed)
            parted = [(validation, val), (rest, train)]
        try:
            for df, path in parted:
                df.select(list(self._checked())).repartition(parts).write.parquet(path)
        except Exception as error:
            words = _MARKED.search(str(error))
            if words is None:
                raise
            raise ValueError(words[1]) from None

    def _flagged(self):
        from pyspark.sql.functions import col, when

        flag = col(self._flag).cast("boolean")
        return when(flag.isNull(), _raised(f"validation={self._flag!r}: {_MISSING}")).otherwise(flag)

    def _checked(self):
        from pyspark.sql.functions import exists, lit, size, when

        for name, value in self._columns.items():
            wrong = value.isNull()
            if name in self._lengths:
                wrong = wrong | exists(value, lambda element: element.isNull())
            checked = when(wrong, _raised(_missing(name)))
            if name in self._lengths:
                checked = checked.when(size(value) != lit(self._lengths[name]), _raised(_ragged(name)))
            yield checked.otherwise(value).alias(name)


def _raised(text):
    from pyspark.sql.functions import lit, raise_error

    return raise_error(lit(f"<bagua_hvd>{text}</bagua_hvd>"))


def _missing(name):
    return f"column {name!r}: {_MISSING}"


def _ragged(name):
    return f"column {name!r}: the rows have different lengths: pad them"


def _no_number(name, kind):
    return ValueError(f"column {name!r} is of type {kind}: cast it to a number, or an array of numbers (double becomes "
                      "float32)")


def column(name: str, values: Any, shape: Any = None) -> np.ndarray:
    """A column as an array with rows first: float64 becomes float32, lists of equal length become rows.

    Args:
        name: for errors. values: pyarrow.ChunkedArray or Array. shape: of the result; its first number is ignored.
            None: unchanged.
    Raises:
        ValueError: missing values, rows of different lengths or of another size than the shape's, or not numeric.
    """
    import pyarrow as pa
    import pyarrow.compute

    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    rows, width = len(values), None
    if values.null_count:
        raise ValueError(_missing(name))
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type):
        widths = pa.compute.unique(pa.compute.list_value_length(values)).to_pylist()
        if len(widths) != 1:
            raise ValueError(_ragged(name))
        width, values = widths[0], values.flatten()
        if values.null_count:
            raise ValueError(_missing(name))
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "biuf":
        raise _no_number(name, values.type)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if width is not None:
        array = array.reshape(rows, width)
    if shape is None:
        return array
    try:
        return array.reshape(rows, *shape[1:])
    except ValueError:
        raise ValueError(f"column {name!r}: the shape {list(shape)} does not fit rows of {width or 1} numbers"
                         ) from None


class Rows:
    """A rank's share of the rows of a Parquet folder: equally many for each rank; the remainder is left out.

    Args:
        columns: {name: shape or None}, see column(). purpose: of the rows, for messages.
    Raises:
        ValueError: fewer rows than ranks.
    Attributes:
        count: rows of this rank, equal on all ranks.
    """

    def __init__(self, dataset: Any, columns: dict[str, Any], rank: int, size: int, purpose: str = "train") -> None:
        self._columns = columns
        groups = [group for fragment in sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
                  for group in fragment.split_by_row_group()]
        lengths = [group.row_groups[0].num_rows for group in groups]
        self.count = sum(lengths) // size
        if self.count == 0:
            raise ValueError(f"{sum(lengths)} rows for {size} ranks to {purpose} with: take fewer ranks, or more rows")
        first, last = rank * self.count, (rank + 1) * self.count
        self._parts = []        # (row group, its first row, its number of rows), for this rank
        begin = 0
        for group, length in zip(groups, lengths, strict=True):
            low, high = max(first, begin), min(last, begin + length)
            if low < high:
                self._parts.append((group, low - begin, high - low))
            begin += length

    def steps(self, batch_size: int) -> int:
        """Number of batches of all rows; the last batch may be smaller."""
        return -(-self.count // batch_size)

    def batches(self, batch_size: int, seed: Any = None) -> Iterator[dict[str, np.ndarray]]:
        """Batches of all rows, {column: array}. seed: for their order; None: the stored order."""
        random = None if seed is None else np.random.default_rng(seed)
        parts = self._parts if random is None else [self._parts[i] for i in random.permutation(len(self._parts))]
        held: dict[str, np.ndarray] | None = None
        for group, low, length in parts:
            table = group.to_table(columns=list(self._columns)).slice(low, length)
            rows = {name: column(name, table.column(name), shape) for name, shape in self._columns.items()}
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
