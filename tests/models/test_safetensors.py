"""The safetensors reader: what it reads, and that nothing malformed gets past it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import CacheError, ForerunError, ModelFormatError, UnsupportedModelError
from forerun.models.safetensors import SafetensorsFile, SafetensorsFolder, read_json_object
from forerun.ops.types import GGMLType, TensorData
from reference.dequant import dequantize
from reference.quant import make_tensor
from reference.tiny import safetensors_bytes

shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def raw_file(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def sample_tensors() -> dict[str, TensorData]:
    rng = np.random.default_rng(5)
    kinds = {"a": GGMLType.F32, "b": GGMLType.F16, "c": GGMLType.BF16}
    return {
        name: make_tensor(name, rng.normal(0, 1, (3, n + 1)).astype(np.float32), kind)
        for n, (name, kind) in enumerate(kinds.items())
    }


@shared_folder
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    kind=st.sampled_from([GGMLType.F32, GGMLType.F16, GGMLType.BF16]),
    padding=st.integers(0, 9),
)
def test_round_trip(tmp_path: Path, shapes: list[list[int]], kind: GGMLType, padding: int) -> None:
    width = 4 if kind is GGMLType.F32 else 2
    rng = np.random.default_rng(len(shapes))
    blobs = [rng.bytes(int(np.prod(shape, dtype=int)) * width) for shape in shapes]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for n, (shape, blob) in enumerate(zip(shapes, blobs, strict=True)):
        header[f"t{n}"] = entry(kind.name, shape, at, at + len(blob))
        at += len(blob)
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file(json.dumps(header).encode() + b" " * padding, b"".join(blobs)))
    file = SafetensorsFile.open(path)
    assert list(file.tensors) == [f"t{n}" for n in range(len(shapes))]
    for n, (shape, blob) in enumerate(zip(shapes, blobs, strict=True)):
        tensor = file.tensor(f"t{n}")
        assert (tensor.type, tensor.shape) == (kind, tuple(shape))
        assert tensor.data.dtype == np.uint8
        assert tensor.data.tobytes() == blob
    file.close()


def test_data_is_a_read_only_view_that_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = sample_tensors()
    path.write_bytes(safetensors_bytes(tensors))
    file = SafetensorsFile.open(path)
    kept = file.tensor("c")
    file.close()
    file.close()
    assert not kept.data.flags.writeable
    assert not kept.data.flags.owndata
    values = dequantize(kept.data, kept.type, kept.shape)
    expected = dequantize(tensors["c"].data, GGMLType.BF16, tensors["c"].shape)
    np.testing.assert_array_equal(values, expected)
    with pytest.raises(ValueError, match="closed"):
        file.tensor("c")


def test_names_and_types_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file({"ids": entry("I64", [2], 0, 16)}, bytes(16)))
    file = SafetensorsFile.open(path)
    with pytest.raises(UnsupportedModelError, match=r"'ids'.*I64.*BF16"):
        file.tensor("ids")
    with pytest.raises(ModelFormatError, match="lacks the tensor 'other'"):
        file.tensor("other")
    file.close()


F = "F32"
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "short": (b"\x08\0\0", "3 bytes"),
    "header past the end": ((100).to_bytes(8, "little") + b"{}", "claims 100 bytes"),
    "header of 2^63": ((1 << 63).to_bytes(8, "little") + b"{}", "header claims"),
    "not JSON": (raw_file(b"{nope"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not valid JSON"),
    "nested too deep": (raw_file(b"[" * 200_000), "not valid JSON"),
    "a huge number": (raw_file(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "a list": (raw_file([1]), "not a JSON object"),
    "a key twice": (raw_file(b'{"a": {}, "a": {}}'), "repeats a key"),
    "no entry": (raw_file({"a": 3}), "'a' is not an object"),
    "no shape": (raw_file({"a": {"dtype": F, "data_offsets": [0, 4]}}, bytes(4)), "'a' lacks"),
    "negative size": (raw_file({"a": entry(F, [-1], 0, 4)}, bytes(4)), "'a' lacks"),
    "a float size": (raw_file({"a": entry(F, [1.0], 0, 4)}, bytes(4)), "'a' lacks"),  # type: ignore[list-item]
    "a boolean size": (raw_file({"a": entry(F, [True], 0, 4)}, bytes(4)), "'a' lacks"),
    "nine dimensions": (raw_file({"a": entry(F, [1] * 9, 0, 4)}, bytes(4)), "'a' lacks"),
    "one offset": (raw_file({"a": {"dtype": F, "shape": [], "data_offsets": [4]}}), "'a' lacks"),
    "bytes too few": (raw_file({"a": entry(F, [2], 0, 4)}, bytes(4)), "4 bytes, expected 8"),
    "a huge shape": (raw_file({"a": entry(F, [2**62, 2**62], 0, 4)}, bytes(4)), "expected"),
    "backwards": (raw_file({"a": entry(F, [0], 4, 0)}, bytes(4)), "-4 bytes"),
    "past the end": (raw_file({"a": entry(F, [2], 0, 8)}, bytes(4)), "tensors end"),
    "bytes left over": (raw_file({"a": entry(F, [1], 0, 4)}, bytes(8)), "tensors end"),
    "a gap": (raw_file({"a": entry(F, [1], 4, 8)}, bytes(8)), "'a' starts at byte"),
    "an overlap": (
        raw_file({"a": entry(F, [1], 0, 4), "b": entry(F, [1], 2, 6)}, bytes(6)),
        "'b' starts at byte",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=message):
        SafetensorsFile.open(path)


def test_unknown_type(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_file({"a": entry("F4", [2], 0, 1)}, bytes(1)))
    with pytest.raises(UnsupportedModelError, match="'a' has the type 'F4'"):
        SafetensorsFile.open(path)


@settings(parent=shared_folder, max_examples=300)
@given(st.data())
def test_no_bytes_crash_the_reader(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(safetensors_bytes(sample_tensors()))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content[:cut] if data.draw(st.booleans()) else content)
    try:
        file = SafetensorsFile.open(path)
    except ForerunError:
        return
    for name, info in file.tensors.items():
        assert info.stop <= len(content)
        if info.dtype in ("F32", "F16", "BF16"):
            assert file.tensor(name).data.size == info.stop - info.start
    file.close()


def write_shards(folder: Path, where: dict[str, Any]) -> None:
    tensors = sample_tensors()
    (folder / "one.safetensors").write_bytes(safetensors_bytes({"a": tensors["a"]}))
    rest = {name: tensors[name] for name in "bc"}
    (folder / "two.safetensors").write_bytes(safetensors_bytes(rest))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_shards(tmp_path: Path) -> None:
    files = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    write_shards(tmp_path, files)
    folder = SafetensorsFolder.open(tmp_path)
    assert list(folder.tensors) == ["a", "b", "c"]
    for name, tensor in sample_tensors().items():
        assert folder.tensor(name).data.tobytes() == tensor.data.tobytes()
        assert folder.type_of(name) is tensor.type
    with pytest.raises(ModelFormatError, match="lacks the tensor 'd'"):
        folder.tensor("d")
    folder.close()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"a": "three.safetensors"}, r"names three\.safetensors"),
        ({"a": "two.safetensors"}, r"places 'a' in two\.safetensors, which lacks it"),
        ({"a": "../one.safetensors"}, "expected a plain file name"),
        ({"a": "/etc/one.safetensors"}, "expected a plain file name"),
        ({"a": "one.bin"}, "expected a plain file name"),
        ({"a": 3}, "expected a plain file name"),
        ({}, "'weight_map' is not an object"),
    ],
)
def test_malformed_index(tmp_path: Path, where: dict[str, Any], message: str) -> None:
    write_shards(tmp_path, where)
    with pytest.raises(ModelFormatError, match=message):
        SafetensorsFolder.open(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"neither model\.safetensors nor"):
        SafetensorsFolder.open(tmp_path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="can't be read"):
        SafetensorsFile.open(tmp_path / "absent.safetensors")
    with pytest.raises(CacheError, match="can't be read"):
        read_json_object(tmp_path / "absent.json")
