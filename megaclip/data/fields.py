"""Extra fields of the samples, which an objective declares: arrays or numbers from tar members, columns or JSON.

A field that is missing, or has another form than declared, makes a bad sample, which is counted as one with a bad
caption. Nothing in a file is executed: `.npy` and `.npz` files are read without pickle.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import zipfile
from typing import Any, Literal

import numpy as np
import torch

from megaclip.data.batch import BadSample, RawSample, digest
from megaclip.data.captions import json_record
from megaclip.data.source import check_size
from megaclip.errors import first_line

CROP = "crop"
"""Name of a field that replaces the random crop of an image: left, top, width and height as shares of its size (4,)."""
_INSIDE = re.compile(r"(?:(.*)\.)?(json|npz)\.(.+)")
"""Key of a value in a JSON object or .npz archive: "json.score", "npz.image_emb" or "teacher.npz.image_emb"."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One extra field of every sample."""

    key: str
    """Place of the value. In tables: the column. In tar shards: the extension of a member ("npy", "teacher.npy"), or a
    name in a JSON object ("json.score") or .npz archive ("npz.image_emb", "teacher.npz.image_emb")."""
    shape: tuple[int, ...] = ()
    """Shape of the field of one sample, after drawing."""
    dtype: torch.dtype = torch.float32
    """Dtype of the field in a batch. Values of another dtype are converted."""
    one_of: Literal["", "views", "captions"] = ""
    """The stored value has one more dimension, and training takes one of its rows. "views": the row is drawn by (seed,
    epoch, id), the same for all such fields of a sample. "captions": the row of the caption that training takes, of all
    captions in the order of --caption-key."""

    def __post_init__(self) -> None:
        is_shape = isinstance(self.shape, tuple) and all(isinstance(size, int) and size > 0 for size in self.shape)
        if not is_shape or not isinstance(self.dtype, torch.dtype) or self.one_of not in ("", "views", "captions"):
            raise ValueError(
                f"Field {self.key!r} has shape {self.shape!r}, dtype {self.dtype!r} and one_of {self.one_of!r}; use a "
                'tuple of sizes, a dtype of torch, and "views" or "captions"'
            )

    @property
    def extension(self) -> str:
        """Extension of the member of a tar shard, lower-case and without a dot."""
        inside = _INSIDE.fullmatch(self.key)
        name = self.key if inside is None else ".".join(part for part in inside.groups()[:2] if part)
        return name.removeprefix(".").lower()

    def array(self, content: Any, place: str) -> np.ndarray:
        """Return the stored value of a sample.

        content: the bytes of a member, or the cell of a table. place: origin of the sample. Raises BadSample.
        """
        if content is None or content == "" or (isinstance(content, float) and math.isnan(content)):
            raise BadSample("missing field", f"{place}: no {self.key}")
        try:
            value = self._value(content, place)
            array = np.asarray(value)
            if array.dtype.kind in "US":  # numbers of JSON lines, as they are written
                array = array.astype(np.float64)
        except (ValueError, OSError, EOFError, TypeError, KeyError, zipfile.BadZipFile, RecursionError) as error:
            raise BadSample("undecodable field", f"{place}: {self.key}: {first_line(error)}") from error
        if array.dtype.kind not in "biuf":
            raise BadSample("undecodable field", f"{place}: {self.key} has values of type {array.dtype}, not numbers")
        wanted = (*(["any"] if self.one_of else []), *self.shape)
        found = array.shape[1:] if self.one_of and array.ndim else array.shape
        if found != self.shape or (self.one_of and not (array.ndim and len(array))):
            raise BadSample("field of wrong shape", f"{place}: {self.key} has {array.shape}, expected {wanted}")
        if not np.isfinite(array).all():
            raise BadSample("undecodable field", f"{place}: {self.key} has values that are not finite")
        return array

    def _value(self, content: Any, place: str) -> Any:
        inside = _INSIDE.fullmatch(self.key)
        kind, name = inside.groups()[1:] if inside else ("", "")
        if isinstance(content, str):  # a cell of a table as text
            return json.loads(content)
        if not isinstance(content, bytes):
            return content
        check_size("field", len(content), place)
        if kind == "json":
            return (json_record(content) or {})[name]
        if content.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                member = archive.getinfo(f"{name}.npy")
                check_size("field", member.file_size, place)
                content = archive.read(member)
        if not content.startswith(np.lib.format.MAGIC_PREFIX):
            raise ValueError('no .npy file; the key of a number in a JSON object is "json.NAME"')
        return np.load(io.BytesIO(content), allow_pickle=False)


def draw(fields: dict[str, Field], raw: RawSample, seeds: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Return the fields of a sample as training takes them. seeds: (seed, epoch, id). Raises BadSample."""
    found, views, captions = {}, None, len(raw.captions.texts)
    for name, field in fields.items():
        array, place = field.array(raw.fields.get(name), raw.key), f"{raw.key}: {field.key}"
        if field.one_of == "captions":
            if len(array) != captions:
                raise BadSample("field of wrong shape", f"{place} has {len(array)} rows for {captions} captions")
            array = array[raw.captions.number(*seeds)]
        elif field.one_of == "views":
            views = views or len(array)
            if len(array) != views:
                raise BadSample("field of wrong shape", f"{place} has {len(array)} views of {views}")
            share = digest(f"view {' '.join(map(str, seeds))}".encode()) % 2**53 / 2**53  # in [0, 1)
            array = array[int(share * len(array))]
        found[name] = array
    return found
