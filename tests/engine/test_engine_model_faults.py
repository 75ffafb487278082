"""Models that are damaged, unsupported or broken in their numbers, and a cache that can't be relied upon.

Through `Engine(...)`, as a user meets them; the readers' own tests go into every byte.
"""

from __future__ import annotations

import errno
import json
import mmap
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forerun import Engine, SamplingParams
from forerun.errors import CacheError, ForerunError, ModelFormatError, NumericalError, UnsupportedModelError
from forerun.models import packed
from forerun.ops.types import GGMLType
from reference import tiny
from reference.gguf_writer import write_gguf
from reference.quant import make_tensor
from reference.tiny import TinySpec, write_tiny_folder, write_tiny_gguf

FREE = SamplingParams(max_tokens=6, ignore_eos=True)
SMALL = TinySpec("llama", layers=1)
QUANTISED = TinySpec("llama", layers=1, types={"": GGMLType.Q4_K, "attn_v": GGMLType.Q6_K, "ffn_gate": GGMLType.Q5_0})


def start(path: Path, **settings: Any) -> Engine:
    return Engine(path, **{"kv_tokens": 256, "threads": 1, "draft": "none", "cache_weights": False, **settings})


def write_edited(path: Path, spec: TinySpec, edit: Callable[[dict[str, npt.NDArray[np.float32]]], None]) -> Path:
    """A tiny model whose float weights were changed by `edit`."""
    weights = tiny.tiny_weights(spec)
    edit(weights)
    tensors = [make_tensor(name, values, spec.types.get("", GGMLType.F32)) for name, values in weights.items()]
    return write_gguf(path, tiny.tiny_metadata(spec), tensors)


# Damaged and unsupported files


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", SMALL)
    whole = path.read_bytes()
    for size in [*range(0, 64, 7), *range(64, len(whole), len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFormatError):
            start(path)
    path.write_bytes(whole)
    assert len(start(path).generate([[1]], FREE)[0].token_ids) == 6


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(ModelFormatError):
        start(path)


def test_random_damage_is_refused_or_does_not_matter(tmp_path: Path) -> None:
    """Bytes of the header are changed; an engine that starts all the same must answer or name the fault."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", SMALL)
    whole = path.read_bytes()
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(0, 9000, 3):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        try:
            engine = start(path)
            engine.generate([[1, 2], "text"], FREE)
        except ForerunError:
            refused += 1
        else:
            engine.check_integrity()
            assert engine.stats().kv_blocks_used == 0
    assert refused > 10


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (
            {"general.architecture": "mamba"},
            UnsupportedModelError,
            "'mamba' is not supported; supported: gemma3, llama",
        ),
        ({"llama.expert_count": 8}, UnsupportedModelError, "expert_count"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "bert"),
        ({"tokenizer.ggml.tokens": None}, ModelFormatError, "tokenizer.ggml.tokens"),
        ({"llama.block_count": 2}, ModelFormatError, "lacks the tensor 'blk.1.attn_norm.weight'"),
        ({"llama.rope.dimension_count": 33}, ModelFormatError, "rope dimension count 33 must be even"),
        ({"llama.rope.dimension_count": 0}, ModelFormatError, "rope dimension count 0 must be even"),
        ({"tokenizer.ggml.tokens": tiny.tiny_tokens()[:-1]}, ModelFormatError, "299 tokens, but .* has 300 rows"),
        ({"tokenizer.ggml.eos_token_id": 300}, ModelFormatError, "300"),
        ({"tokenizer.ggml.bos_token_id": 4000}, ModelFormatError, "4000"),
    ],
)
def test_what_the_metadata_make_impossible(
    tmp_path: Path, metadata: dict[str, Any], error: type[ForerunError], message: str
) -> None:
    with pytest.raises(error, match=message):
        start(write_tiny_gguf(tmp_path / "tiny.gguf", replace(SMALL, metadata=metadata)))


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 24}, "head dimension 24 is not supported: expected a multiple of 16; choose another model"),
        ({"head_dim": 8}, "head dimension 8 "),
        ({"hidden": 248}, "hidden size 248 "),
        ({"ffn": 500}, "feed-forward size 500 "),
    ],
)
def test_sizes_that_the_kernels_do_not_have(tmp_path: Path, sizes: dict[str, int], message: str, folder: bool) -> None:
    spec = replace(SMALL, **sizes)  # type: ignore[arg-type]
    path = write_tiny_folder(tmp_path / "m", spec) if folder else write_tiny_gguf(tmp_path / "m.gguf", spec)
    with pytest.raises(UnsupportedModelError, match=message):
        start(path)


@pytest.mark.parametrize("kind", [GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K])
def test_rows_that_are_no_multiple_of_the_type_s_block(tmp_path: Path, kind: GGMLType) -> None:
    """288 is a multiple of 32 but not of 256, 272 of neither; no raw error of a kernel may come through."""
    for hidden in (272, 288):
        spec = replace(SMALL, hidden=hidden, heads=2, kv_heads=1)
        path = tmp_path / f"{hidden}.gguf"
        tensors = []
        for name, values in tiny.tiny_weights(spec).items():
            tensor = make_tensor(name, values)
            if name == "blk.0.attn_q.weight" and hidden % kind.block_size:
                size = -(-hidden // kind.block_size) * kind.block_bytes * values.shape[0]
                tensor = replace(tensor, type=kind, data=np.zeros(size, dtype=np.uint8))
            elif name == "blk.0.attn_q.weight":
                tensor = make_tensor(name, values, kind)
            tensors.append(tensor)
        write_gguf(path, tiny.tiny_metadata(spec), tensors)
        if hidden % kind.block_size:
            with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_q\.weight"):
                start(path)
        else:
            assert len(start(path).generate([[1]], FREE)[0].token_ids) == 6


@pytest.mark.parametrize("sizes", [{"hidden": 48, "ffn": 80, "head_dim": 16}, {"hidden": 272, "head_dim": 48}])
def test_sizes_that_are_multiples_of_sixteen_only(tmp_path: Path, sizes: dict[str, int]) -> None:
    spec = replace(SMALL, **sizes)  # type: ignore[arg-type]
    path = write_tiny_gguf(tmp_path / "m.gguf", spec)
    answers = [start(p).generate([[1, 2]], FREE)[0] for p in (path, write_tiny_folder(tmp_path / "m", spec))]
    assert len(answers[0].token_ids) == 6
    assert answers[0].token_ids == answers[1].token_ids


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_tokenizer_with_more_tokens_than_embeddings(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", SMALL)
    assert start(folder).generate(["hi"], FREE)
    more = {"id": 300, "content": "<extra>", "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}  # fmt: skip
    edit_json(folder / "tokenizer.json", lambda d: d["added_tokens"].append(more))
    with pytest.raises(
        ModelFormatError, match=r"tokenizer has 301 tokens, but the model has embeddings for 300.*again"
    ):
        start(folder)


def test_a_begin_token_without_an_embedding(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m", SMALL)
    edit_json(folder / "tokenizer_config.json", lambda d: d.pop("bos_token"))
    edit_json(folder / "config.json", lambda d: d.update(bos_token_id=1000))
    with pytest.raises(ModelFormatError, match="tokenizer has 1001 tokens, but the model has embeddings for 300"):
        start(folder)


# Numbers that are none


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_down.weight"])
@pytest.mark.parametrize("greedy", [True, False])
def test_broken_weights_are_reported(tmp_path: Path, name: str, value: float, greedy: bool) -> None:
    def edit(weights: dict[str, npt.NDArray[np.float32]]) -> None:
        weights[name].reshape(-1)[:300:7] = value

    engine = start(write_edited(tmp_path / "m.gguf", SMALL, edit))
    params = FREE if greedy else replace(FREE, temperature=1.0, logprobs=1, seed=1)
    with pytest.raises(NumericalError, match=r"'request-0'.*not numbers at position 2.*download the model again"):
        engine.generate([[1, 2], [3]], params)
    with pytest.raises(NumericalError, match="not numbers at position"):
        list(engine.stream([1, 2], params))
    with pytest.raises(NumericalError, match=r"scoring.*not numbers at position 1"):
        engine.score([1, 2, 3], top=2)
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    assert not engine.step()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("params", [FREE, replace(FREE, temperature=0.8, seed=2, logprobs=2)])
def test_one_broken_row_spoils_only_who_uses_it(tmp_path: Path, architecture: Any, params: SamplingParams) -> None:
    bad = 5

    def edit(weights: dict[str, npt.NDArray[np.float32]]) -> None:
        weights["token_embd.weight"][bad] = np.nan

    spec = TinySpec(architecture, layers=2, tied=False)
    path = write_edited(tmp_path / "broken.gguf", spec, edit)
    prompts = [[1, 2, 3], [9, bad, 7, 8], [40, 41], [1, 2, 3, 4] * 8]
    whole = start(write_edited(tmp_path / "whole.gguf", spec, lambda _: None))
    expected = [whole.generate([p], params)[0] for p in prompts]
    assert all(bad not in output.token_ids for output in expected)
    engine = start(path)
    handles = [engine.submit(p, params) for p in prompts]
    stream = list_until_error(engine, handles[1])
    assert stream == [("", "error")]
    for i in (0, 2, 3):
        output = handles[i].result()
        assert (output.token_ids, output.logprobs) == (expected[i].token_ids, expected[i].logprobs)
    with pytest.raises(NumericalError, match="'request-1'"):
        handles[1].result()
    # Blocks that held broken rows are used again by others.
    for _ in range(4):
        with pytest.raises(NumericalError):
            engine.generate([[bad] + [7] * 40], params)
        assert engine.generate([prompts[3]], params)[0].token_ids == expected[3].token_ids
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_broken_score_spoils_every_choice(tmp_path: Path, value: float) -> None:
    """A row of the head: greedy, which needs no list of scores, must notice it, too."""

    def edit(weights: dict[str, npt.NDArray[np.float32]]) -> None:
        weights["output.weight"][123] = value

    engine = start(write_edited(tmp_path / "broken.gguf", SMALL, edit), threads=2)
    for params in (FREE, replace(FREE, logprobs=1), replace(FREE, temperature=1.0)):
        with pytest.raises(NumericalError):
            engine.generate([[1, 2]], params)
    with pytest.raises(NumericalError):
        engine.score([1, 2], top=2)


def list_until_error(engine: Engine, handle: Any) -> list[tuple[str, str | None]]:
    pieces: list[tuple[str, str | None]] = []
    with pytest.raises(NumericalError):
        pieces.extend((str(piece), piece.finish_reason) for piece in handle)
    engine.check_integrity()
    return pieces


# The cache of packed weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FORERUN_CACHE", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", QUANTISED)


def answer(path: Path, **settings: Any) -> tuple[int, ...]:
    return start(path, **{"cache_weights": True, **settings}).generate([[1, 2, 3]], FREE)[0].token_ids


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


@pytest.fixture
def count_packing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the matrices packed, as they are packed."""
    names: list[str] = []
    pack = packed.ops.pack

    def counting(tensor: Any, out: Any, threads: int) -> None:
        names.append(tensor.name)
        pack(tensor, out, threads)

    monkeypatch.setattr(packed.ops, "pack", counting)
    return names


def test_a_second_start_maps_what_the_first_has_packed(cache: Path, model: Path, count_packing: list[str]) -> None:
    expected = answer(model, cache_weights=False)
    assert files(cache) == []
    n = len(count_packing)
    assert answer(model) == expected
    assert len(count_packing) == 2 * n
    (file,) = files(cache)
    assert file.parent == cache / "repacked"
    assert file.stat().st_mode & 0o777 == 0o666 & ~current_umask()  # shared, as other files are
    assert answer(model) == expected
    assert answer(model.rename(model.with_name("moved.gguf"))) == expected
    assert len(count_packing) == 2 * n
    other = write_tiny_gguf(cache.parent / "other.gguf", replace(QUANTISED, seed=1))
    assert answer(other) != expected
    assert len(files(cache)) == 2


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def damages() -> dict[str, Callable[[bytes], bytes]]:
    def flipped(at: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return {
        "empty": lambda _: b"",
        "truncated": lambda data: data[:-4096],
        "cut in the header": lambda data: data[:100],
        "longer": lambda data: data + bytes(4096),
        "foreign": lambda data: b"GGUF" + data[4:],
        "another layout": lambda data: data.replace(b'"layout": 2', b'"layout": 0'),
        "header": flipped(60),
        "first weight": flipped(4096),
        "one bit in the middle": lambda data: flipped(len(data) // 2)(data),
        "checksum": lambda data: data[:-8] + bytes(8),
        "zeros": lambda data: data[:4096] + bytes(len(data) - 4104) + data[-8:],
        "pages in another order": lambda data: data[:4096] + data[8192:12288] + data[4096:8192] + data[12288:],
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_cache_file_is_packed_again(cache: Path, model: Path, count_packing: list[str], damage: str) -> None:
    expected = answer(model)
    (file,) = files(cache)
    whole = file.read_bytes()
    file.write_bytes(damages()[damage](whole))
    assert file.read_bytes() != whole
    count_packing.clear()
    assert answer(model) == expected
    assert count_packing
    assert files(cache) == [file]
    assert file.read_bytes() == whole


def test_what_a_dead_process_left_is_used_up(cache: Path, model: Path) -> None:
    expected = answer(model)
    (file,) = files(cache)
    whole = file.read_bytes()
    file.unlink()
    left = file.with_name(file.name + ".partial")
    left.write_bytes(bytes(3 * len(whole)))
    assert answer(model) == expected
    assert files(cache) == [file]
    assert file.read_bytes() == whole


def start_and_answer(model: Path, barrier: Any, out: Connection) -> None:
    barrier.wait()
    try:
        out.send(answer(model))
    except BaseException as error:
        out.send(repr(error))


def test_processes_that_start_together_agree(cache: Path, model: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    pipes = [context.Pipe(duplex=False) for _ in range(4)]
    workers = [context.Process(target=start_and_answer, args=(model, barrier, send)) for _, send in pipes]
    for worker in workers:
        worker.start()
    answers = [receive.recv() for receive, _ in pipes]
    for worker in workers:
        worker.join()
    for receive, send in pipes:
        receive.close()
        send.close()
    assert answers == [answer(model, cache_weights=False)] * 4
    assert len(files(cache)) == 1


def test_what_an_earlier_layout_packed_of_the_model_goes(cache: Path, model: Path) -> None:
    folder = cache / "repacked"
    answer(model)
    (file,) = files(cache)
    fingerprint = file.name.rpartition("-")[0]
    old, other = folder / f"{fingerprint}-0.packed", folder / "another-model-0.packed"
    for path in (old, other):
        path.write_bytes(b"an earlier layout")
    answer(model)
    assert old.exists()  # nothing is packed, nothing goes
    file.unlink()
    answer(model)
    assert sorted(files(cache)) == sorted([file, other])


def test_threads_that_start_together_pack_once(cache: Path, model: Path, count_packing: list[str]) -> None:
    answers: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda: answers.append(answer(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert len(answers) == 4
    assert len(count_packing) == len(set(count_packing)) == 8
    assert len(files(cache)) == 1


REMEDY = r"can't be written to .*repacked: .*set FORERUN_CACHE .*cache_weights=False"


def test_a_cache_that_can_not_be_made_names_the_ways_out(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheError, match=REMEDY):
        answer(model)
    assert answer(model, cache_weights=False)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_read_only_cache_is_read_but_not_written(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(model)
    other = write_tiny_gguf(cache.parent / "other.gguf", replace(QUANTISED, seed=1))
    before = files(cache)
    opened = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(cache)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    assert answer(model) == expected
    with pytest.raises(CacheError, match=REMEDY):
        answer(other)
    assert answer(other, cache_weights=False)
    assert files(cache) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions don't bind the superuser")
def test_a_cache_without_permission(cache: Path, model: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    try:
        with pytest.raises(CacheError, match="Permission denied"):
            answer(model)
    finally:
        cache.chmod(0o700)


@pytest.mark.parametrize("fault", ["posix_fallocate", "fsync", "replace", "pack", "interrupt"])
def test_a_failure_while_packing_leaves_no_partial_file(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    expected = answer(model, cache_weights=False)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if fault in ("pack", "interrupt"):
            patch.setattr(packed.ops, "pack", full if fault == "pack" else interrupted)
        else:
            patch.setattr(os, fault, full)
        with pytest.raises(KeyboardInterrupt if fault == "interrupt" else CacheError) as caught:
            answer(model)
        if fault != "interrupt":
            assert "MB) can't be written" in str(caught.value)
            assert "No space left on device; free some space, set FORERUN_CACHE" in str(caught.value)
        assert files(cache) == []
        assert fault in ("pack", "interrupt") or answer(model, cache_weights=False) == expected
    assert answer(model) == expected
    assert len(files(cache)) == 1


def test_a_cache_file_that_can_not_be_read_is_named(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(model)
    (file,) = files(cache)

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", failing)
        with pytest.raises(CacheError, match=f"{file.name} can't be read.*remove the file.*cache_weights=False"):
            packed._map(file, file.read_bytes()[:4096], file.stat().st_size - 4104)
    file.unlink()
    file.mkdir()
    with pytest.raises(CacheError, match="can't be read: Is a directory; remove"):
        answer(model)
