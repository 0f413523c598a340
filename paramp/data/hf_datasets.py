"""Data sets saved to disk by Hugging Face's ``datasets``.

A column of token ids is stored as a few large integer buffers, with the row offsets apart from them. The concatenated
rows are these buffers, which Arrow maps from the file: nothing is copied.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from .text_corpus import TextChunk
from .token_sources import ArrayTokens, ChainedTokens, Tokens

TOKENS = "input_ids"
TEXT = "text"
HELD_OUT_SPLITS = ("validation", "valid", "val", "test", "eval")


def is_saved_dataset(path: Path) -> bool:
    """Whether the folder holds a saved ``Dataset`` or ``DatasetDict``."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def load_splits(path: Path) -> tuple[Any, Any | None]:
    """The training split and the held-out split (None if there is none).

    In a ``DatasetDict`` they are ``train``, or the only split, and the first of :data:`HELD_OUT_SPLITS`. Raises
    ConfigError if ``datasets`` is not installed or cannot read the folder, or there is no ``train``.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(f'data: {str(path)!r} needs the package datasets: pip install "paramp[hf]"') from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # errors of Arrow, the file system or JSON have the same fix
        raise ConfigError(f"data: datasets cannot load {str(path)!r}: {error}; save it again") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded, None
    if "train" not in loaded and len(loaded) != 1:
        raise ConfigError(f"data: {str(path)!r} has the splits {', '.join(loaded) or 'none'}; expected train")
    training = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    held_out = next((loaded[name] for name in HELD_OUT_SPLITS if name in loaded and loaded[name] is not training), None)
    return training, held_out


def column_of(dataset: Any, path: Path) -> str:
    """The column to read: ``input_ids``, else ``text``. Raises ConfigError if it has neither."""
    found = next((name for name in (TOKENS, TEXT) if name in dataset.column_names), None)
    if found is None:
        raise ConfigError(
            f"data: {str(path)!r} has the columns {', '.join(dataset.column_names) or 'none'}; expected {TOKENS} "
            f"(lists of integers) or {TEXT} (strings): rename one of them with dataset.rename_column"
        )
    return found


def tokens_of(dataset: Any, path: Path) -> ChainedTokens:
    """The concatenated rows of ``input_ids``, in the memory that Arrow has mapped.

    Raises ConfigError if they are not integers, or a value is null.
    """
    if dataset._indices is not None:  # rows are not in the order of the buffers, as after ``shuffle``
        dataset = dataset.flatten_indices()
    name = f"column {TOKENS} of {str(path)!r}"
    return ChainedTokens([ArrayTokens(array, name) for array in _arrays(dataset.data, path)])


def _arrays(table: Any, path: Path) -> Iterator[Tokens]:
    """The integer buffers of ``input_ids``, without the row offsets."""
    import pyarrow as pa  # type: ignore[import-untyped]

    for chunk in table.column(TOKENS).chunks:
        while hasattr(chunk, "flatten") and not (pa.types.is_primitive(chunk.type) or pa.types.is_struct(chunk.type)):
            chunk = chunk.flatten()  # keeps only the array's slice of the buffer
        if not pa.types.is_integer(chunk.type) or chunk.null_count:
            what = f"{chunk.null_count} missing values" if chunk.null_count else f"the type {chunk.type}"
            raise ConfigError(f"data: the column {TOKENS} of {str(path)!r} has {what}; expected lists of integers")
        if len(chunk):
            yield chunk.to_numpy(zero_copy_only=True)


def rows_of_text(dataset: Any, *, held_out: bool) -> Iterator[TextChunk]:
    """Each row of ``text`` as a document."""
    for row in dataset.with_format(None).select_columns([TEXT]):
        if row[TEXT]:
            yield TextChunk(row[TEXT], held_out, begins=True)
