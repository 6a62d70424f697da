"""Stores of estimators for data and models: folders on a file system that driver and executors share.

    PREFIX/intermediate_train_data, intermediate_val_data     Parquet for fit_on_parquet()
    PREFIX/intermediate_train_data.ID, ...                    Parquet of one fit(), which removes it
    PREFIX/runs/RUN/checkpoint, logs                          the model of a run
"""
import os
import posixpath
from typing import Any

from pyarrow import ArrowInvalid, fs


class Store:
    """The interface; Store.create() chooses the class."""

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> "FilesystemStore":
        """A store below `prefix_path`: a folder, or a URI (`hdfs://`, `s3://`, `gs://`, `dbfs:/`, or known to fsspec).

        Args:
            args, kwargs: of FilesystemStore.
        """
        if prefix_path.startswith(("dbfs:/", "/dbfs/")):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        kind = HDFSStore if prefix_path.startswith("hdfs://") else FilesystemStore
        return kind(prefix_path, *args, **kwargs)


class FilesystemStore(Store):
    """Folders below a path or a URI, through pyarrow's file systems.

    Args:
        prefix_path: folder of the store. train_path, val_path, test_path, runs_path: other folders for these parts.
    Raises:
        ValueError: a URI that neither pyarrow nor fsspec supports.
    """

    def __init__(self, prefix_path: str, train_path: str | None = None, val_path: str | None = None,
                 test_path: str | None = None, runs_path: str | None = None) -> None:
        self.prefix_path = prefix_path.rstrip("/") if "://" in prefix_path else os.path.abspath(prefix_path)
        self._paths = {
            "train": train_path or self._below("intermediate_train_data"),
            "val": val_path or self._below("intermediate_val_data"),
            "test": test_path or self._below("intermediate_test_data"), "runs": runs_path or self._below("runs")}
        self._open(self.prefix_path)

    def _below(self, *names):
        return posixpath.join(self.prefix_path, *names)

    @staticmethod
    def _open(path):
        """(pyarrow's file system, the path within it)."""
        if "://" not in path:
            return fs.LocalFileSystem(), path
        try:
            return fs.FileSystem.from_uri(path)
        except ArrowInvalid:
            pass
        try:
            import fsspec

            filesystem, below = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise ValueError(f"store {path!r}: pyarrow knows no such file system, nor does fsspec ({error})") from None
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), below

    def get_train_data_path(self, idx: Any = None) -> str:
        """Parquet for training; idx: selects one of several data sets."""
        return self._data("train", idx)

    def get_val_data_path(self, idx: Any = None) -> str:
        """Parquet for validation."""
        return self._data("val", idx)

    def get_test_data_path(self, idx: Any = None) -> str:
        """Parquet for tests; nothing here writes it."""
        return self._data("test", idx)

    def _data(self, part, idx):
        return self._paths[part] if idx is None else f"{self._paths[part]}.{idx}"

    def get_runs_path(self) -> str:
        """The folder of all runs."""
        return self._paths["runs"]

    def get_run_path(self, run_id: str) -> str:
        """The folder of one run."""
        return posixpath.join(self.get_runs_path(), run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """The file of a run's model."""
        return posixpath.join(self.get_run_path(run_id), "checkpoint")

    def get_logs_path(self, run_id: str) -> str:
        """The folder for a run's logs."""
        return posixpath.join(self.get_run_path(run_id), "logs")

    def spark_path(self, path: str) -> str:
        """The path in Spark's form."""
        return path if "://" in path else f"file://{path}"

    def exists(self, path: str) -> bool:
        """Whether the file or folder exists."""
        filesystem, below = self._open(path)
        return filesystem.get_file_info(below).type != fs.FileType.NotFound

    def read(self, path: str) -> bytes:
        """A file's content. FileNotFoundError if it is missing."""
        filesystem, below = self._open(path)
        with filesystem.open_input_stream(below) as file:
            return file.read()

    def write(self, path: str, content: bytes) -> None:
        """Writes a file; creates its folder if needed."""
        filesystem, below = self._open(path)
        filesystem.create_dir(posixpath.dirname(below))
        with filesystem.open_output_stream(below) as file:
            file.write(content)

    def remove(self, path: str) -> None:
        """Removes a folder with its content; does nothing if it is missing."""
        if self.exists(path):
            filesystem, below = self._open(path)
            filesystem.delete_dir(below)

    def write_text(self, path: str, text: str) -> None:
        """Like write(), in UTF-8."""
        self.write(path, text.encode())

    def is_parquet_dataset(self, path: str) -> bool:
        """Whether there is readable Parquet."""
        try:
            return bool(self.dataset(path).schema)
        except (OSError, ArrowInvalid):
            return False

    def dataset(self, path: str) -> Any:
        """The pyarrow.dataset of a folder of Parquet."""
        import pyarrow.dataset

        filesystem, below = self._open(path)
        return pyarrow.dataset.dataset(below, filesystem=filesystem, format="parquet")


LocalStore = FilesystemStore


class HDFSStore(FilesystemStore):
    """A store on `hdfs://`; it needs libhdfs, see pyarrow's documentation."""


class DBFSLocalStore(FilesystemStore):
    """A store on Databricks' file system, through its mount: `dbfs:/x` and `/dbfs/x` are the same."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(posixpath.join("/dbfs", prefix_path.removeprefix("dbfs:").removeprefix("/dbfs").lstrip("/")),
                         *args, **kwargs)

    def spark_path(self, path: str) -> str:
        return "dbfs:" + path.removeprefix("/dbfs")
