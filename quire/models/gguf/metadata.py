"""Typed reading of the metadata of a GGUF file: a value is of the right type, or named in an error.

Called by the families of `models.gguf`, which make a config.json of it; ranges are checked where that is read.
"""

from __future__ import annotations

import numpy as np

from quire.errors import ModelError
from quire.formats.gguf_file import GGUFFile
from quire.formats.gguf_header import GGUFStrings, GGUFTensor, Value


class Metadata:
    """Reads keys of `{architecture}.` and of others, which are named in full with `general` and `token`.

    Args:
        file: the model; its general.architecture is a string.

    Raises:
        ModelError: from every method, for a value of a wrong type.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def key(self, name: str) -> str:
        """The full key of `name`."""
        return f"{self.architecture}.{name}"

    def error(self, key: str, problem: str, hint: str) -> ModelError:
        """An error about a full key."""
        return ModelError(f"{self.file.path}: {key} {problem}", hint=hint, field=key)

    def has(self, name: str) -> bool:
        """Whether the key is there."""
        return self.key(name) in self.file.metadata

    def integer(self, name: str) -> int | None:
        """An integer; None when the key is absent."""
        return self._integer(self.key(name))

    def needed_integer(self, name: str) -> int:
        """An integer that must be there."""
        value = self.integer(name)
        if value is None:
            raise self.missing(name)
        return value

    def number(self, name: str) -> float | None:
        """A number; None when the key is absent."""
        key = self.key(name)
        value = self.file.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(key, value, "a number")
        return float(value)

    def flag(self, name: str) -> bool | None:
        """A truth value; None when the key is absent."""
        key = self.key(name)
        value = self.file.metadata.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong_type(key, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string; None when the key is absent."""
        key = self.key(name)
        value = self.file.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong_type(key, value, "a string")
        return value

    def token(self, name: str) -> int | None:
        """The id of a special token, of `tokenizer.ggml.{name}_token_id`; None when the key is absent."""
        return self._integer(f"tokenizer.ggml.{name}_token_id")

    def per_layer(self, name: str, num_layers: int) -> list[int] | None:
        """An integer or truth value of each layer, of an array, or the same one for all; None when absent."""
        key = self.key(name)
        value = self.file.metadata.get(key)
        if not isinstance(value, np.ndarray):
            number = self._integer(key)
            return None if number is None else [number] * num_layers
        if value.dtype.kind not in "iub":
            raise self._wrong_type(key, value, "an integer of each layer")
        if len(value) < num_layers:
            raise self.error(key, f"has {len(value)} values", f"the model has {num_layers} layers")
        return [int(item) for item in value[:num_layers]]

    def one_for_all(self, name: str, num_layers: int) -> int | None:
        """The integer that all layers have, or all but those with 0, which lack the part; None when absent.

        Raises:
            ModelError: layers differ.
        """
        values = self.per_layer(name, num_layers)
        if values is None:
            return None
        found = {value for value in values if value} or {0}
        if len(found) > 1:
            raise self.error(self.key(name), "differs between layers", "only models whose layers are alike run")
        return found.pop()

    def tensor(self, name: str) -> GGUFTensor | None:
        """Where tensor `name` lies; None when the file has none."""
        return self.file.tensors.get(name)

    def has_tensor(self, name: str) -> bool:
        """Whether the file has tensor `name`."""
        return name in self.file.tensors

    def floats(self, name: str) -> list[float] | None:
        """The numbers of a small float32 tensor of one dimension; None when there is none."""
        tensor = self.tensor(name)
        if tensor is None:
            return None
        if tensor.format.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
            raise self.error(name, f"is {tensor.format.name} of shape {list(tensor.shape)}", "it must be a list of F32")
        return [float(value) for value in np.frombuffer(self.file.data(name), "<f4")]

    def missing(self, name: str) -> ModelError:
        """The error of a key that must be there."""
        return self.error(self.key(name), "is missing", "convert the model anew with a current converter")

    def _integer(self, key: str) -> int | None:
        value = self.file.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, value, "an integer")
        return value

    def _wrong_type(self, key: str, value: Value, expected: str) -> ModelError:
        if isinstance(value, np.ndarray | GGUFStrings):
            shown = f"an array of {len(value)}"
        else:
            shown = repr(value)[:60]
        return self.error(key, f"is {shown}", f"it must be {expected}; convert the model anew")
