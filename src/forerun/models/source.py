"""Opens a model, GGUF file or Hugging Face folder, behind one face.

Whatever the file, tensors have GGUF names and one convention (`ModelConfig` says which), and all
that the architecture needs is known to be there, in the right shape, once `open_model` returns.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from forerun.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from forerun.models.config import ModelConfig, expected_tensors
from forerun.models.gguf import GGUFFile
from forerun.models.gguf_config import config_from_gguf
from forerun.models.hf_config import config_from_hf
from forerun.models.safetensors import SafetensorsFolder, read_json_object
from forerun.ops.types import GGMLType, TensorData

if TYPE_CHECKING:
    from forerun.models.chat import ChatTemplate
    from forerun.models.tokenizer import Tokenizer

_FLOATS: Final = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})
_ROPE_FREQS: Final = "rope_freqs.weight"
_SAMPLES: Final = 4
_SAMPLE_BYTES: Final = 1024

_HF_TOP: Final = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
_HF_LAYER: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_HF_LAYER_GEMMA3: Final = {
    **_HF_LAYER,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_HF_PREFIXES: Final = ("model.", "language_model.model.", "model.language_model.", "")
_HF_HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")
_HF_UNREAD: Final = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*|.*rotary_emb\.inv_freq")


class _Found(NamedTuple):
    """A tensor as its file declares it: the name there, shape, and type if Forerun has it."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType | None


class ModelSource(ABC):
    """An open model: its configuration, tensors, tokenizer and chat template.

    Use it as a context manager or call `close`. Tensor data handed out stays valid after that.
    """

    path: Path
    config: ModelConfig

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path = path
        self.config = config
        self._names = tuple(expected_tensors(config))

    @abstractmethod
    def tensor(self, name: str) -> TensorData:
        """The tensor with this GGUF name; raises ModelFormatError where the model has none."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built anew at each call."""

    @abstractmethod
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, or None where it brings none."""

    @abstractmethod
    def close(self) -> None:
        """Let the file go. May be called twice."""

    def names(self) -> tuple[str, ...]:
        """GGUF names of every tensor that the forward pass reads, in order of use by layer."""
        return self._names

    def has(self, name: str) -> bool:
        """Whether the model has this tensor."""
        return name in self._names

    def fingerprint(self) -> str:
        """32 hexadecimal digits that name these weights, wherever the file lies.

        A hash of configuration, tensor table and a few samples of every tensor; it takes
        milliseconds. It tells different models and quantisations apart but isn't a checksum: a
        changed byte between the samples goes unseen.
        """
        digest = hashlib.sha256(repr(self.config).encode())
        for name in self._names:
            tensor = self.tensor(name)
            digest.update(f"{name} {tensor.type.name} {tensor.shape} {tensor.data.size}".encode())
            last = max(tensor.data.size - _SAMPLE_BYTES, 0)
            for sample in range(_SAMPLES):
                start = last * sample // (_SAMPLES - 1)
                digest.update(tensor.data[start : start + _SAMPLE_BYTES].tobytes())
        return digest.hexdigest()[:32]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_model(path: Path) -> ModelSource:
    """Open a .gguf file or a folder with config.json, safetensors and tokenizer.json.

    Raises ModelNotFoundError where nothing is there, ModelFormatError for a damaged, incomplete or
    contradictory model, UnsupportedModelError for one that Forerun doesn't implement, CacheError
    where a file can't be read.
    """
    if path.is_dir():
        return _FolderSource.open(path)
    if not path.exists():
        raise ModelNotFoundError(
            f"there is no file or folder {path}: give a .gguf file, a model folder or a catalog name."
        )
    if path.suffix == ".safetensors":
        raise ModelFormatError(f"{path.name} holds weights only: give the folder that has config.json beside it.")
    return _GGUFSource.open(path)


class _GGUFSource(ModelSource):
    """A GGUF file. Weights, norms included, are used exactly as stored."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        super().__init__(file.path, config)
        self._file = file

    @classmethod
    def open(cls, path: Path) -> Self:
        file = GGUFFile.open(path)
        try:
            shapes = {name: info.shape for name, info in file.tensors.items()}
            config = config_from_gguf(file.metadata, shapes, _rope_factors(file))
            found = {name: _Found(name, info.shape, info.type) for name, info in file.tensors.items()}
            _check_tensors(config, found)
            _refuse_extra(found, {*expected_tensors(config), _ROPE_FREQS})
            return cls(file, config)
        except BaseException:
            file.close()
            raise

    def tensor(self, name: str) -> TensorData:
        return self._file.tensor(name)

    def tokenizer(self) -> Tokenizer:
        from forerun.models.tokenizer import Tokenizer

        return Tokenizer.from_gguf(self._file.metadata)

    def chat_template(self) -> ChatTemplate | None:
        from forerun.models.chat import ChatTemplate

        template = self._file.metadata.get("tokenizer.chat_template")
        if template is None:
            return None
        if not isinstance(template, str):
            raise ModelFormatError("GGUF metadata 'tokenizer.chat_template' is not a text.")
        return ChatTemplate(template, self._token_text("bos"), self._token_text("eos"))

    def _token_text(self, role: str) -> str:
        """How the token of a role is written; empty where the model has none."""
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        index = self._file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if index is None or not isinstance(tokens, list):
            return ""
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise ModelFormatError(
                f"GGUF metadata 'tokenizer.ggml.{role}_token_id' is {index}, expected an id below {len(tokens)}."
            )
        return str(tokens[index])

    def close(self) -> None:
        self._file.close()


class _FolderSource(ModelSource):
    """A Hugging Face folder, its tensors renamed and Gemma's norms shifted to GGUF's convention."""

    def __init__(self, path: Path, config: ModelConfig, weights: SafetensorsFolder, names: Mapping[str, str]) -> None:
        super().__init__(path, config)
        self._weights = weights
        self._hf_names = names

    @classmethod
    def open(cls, path: Path) -> Self:
        if not (path / "config.json").is_file():
            raise ModelFormatError(
                f"the folder {path} has no config.json: it isn't a complete model folder. For a "
                "GGUF model give the .gguf file itself."
            )
        config = config_from_hf(read_json_object(path / "config.json"))
        weights = SafetensorsFolder.open(path)
        try:
            tensors = weights.tensors
            names = _hf_names(config, tensors)
            found = {
                gguf_name: _Found(name, tensors[name].shape, weights.type_of(name))
                for gguf_name, name in names.items()
                if name in tensors
            }
            _check_tensors(config, found)
            unread = {name for name in tensors if _HF_UNREAD.fullmatch(name)}
            _refuse_extra(tensors, {*names.values(), *unread, *_unused_heads(config)})
            return cls(path, config, weights, names)
        except BaseException:
            weights.close()
            raise

    def tensor(self, name: str) -> TensorData:
        if name not in self._hf_names:
            raise ModelFormatError(f"the model folder {self.path} lacks the tensor {name!r}.")
        stored = self._weights.tensor(self._hf_names[name])
        if self.config.architecture == "gemma3" and name.endswith("norm.weight"):
            shifted = (_float32(stored) + np.float32(1)).astype("<f4")
            return TensorData(name, GGMLType.F32, stored.shape, shifted.view(np.uint8))
        return TensorData(name, stored.type, stored.shape, stored.data)

    def tokenizer(self) -> Tokenizer:
        from forerun.models.tokenizer import Tokenizer

        return Tokenizer.from_folder(self.path)

    def chat_template(self) -> ChatTemplate | None:
        from forerun.models.chat import ChatTemplate

        config_path = self.path / "tokenizer_config.json"
        settings = read_json_object(config_path) if config_path.is_file() else {}
        beside = self.path / "chat_template.jinja"
        template = beside.read_text("utf-8") if beside.is_file() else settings.get("chat_template")
        if isinstance(template, list):
            template = _default_template(template)
        if template is None:
            return None
        if not isinstance(template, str):
            raise ModelFormatError("tokenizer_config.json 'chat_template' is not a text.")
        return ChatTemplate(template, _special(settings.get("bos_token")), _special(settings.get("eos_token")))

    def close(self) -> None:
        self._weights.close()


def _rope_factors(file: GGUFFile) -> list[float] | None:
    if _ROPE_FREQS not in file.tensors:
        return None
    tensor = file.tensor(_ROPE_FREQS)
    if tensor.type not in _FLOATS or len(tensor.shape) != 1:
        raise ModelFormatError(
            f"{_ROPE_FREQS} has type {tensor.type.name} and shape {tensor.shape}, expected a vector of floats."
        )
    return [float(factor) for factor in _float32(tensor)]


def _float32(tensor: TensorData) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A copy of a float tensor's values, flat."""
    if tensor.type is GGMLType.BF16:
        bits = tensor.data.view("<u2").astype(np.uint32) << 16
        return bits.view(np.float32)
    stored = "<f4" if tensor.type is GGMLType.F32 else "<f2"
    return tensor.data.view(stored).astype(np.float32)


def _hf_names(config: ModelConfig, tensors: Iterable[str]) -> dict[str, str]:
    """GGUF name to the name in the folder, for every tensor that the model needs."""
    present = set(tensors)
    top = [prefix for prefix in _HF_PREFIXES if f"{prefix}embed_tokens.weight" in present]
    if not top:
        raise ModelFormatError("the folder's weights lack 'model.embed_tokens.weight': download them again.")
    layer_names = _HF_LAYER_GEMMA3 if config.architecture == "gemma3" else _HF_LAYER
    heads = [head for head in _HF_HEADS if head in present] or [_HF_HEADS[0]]
    names: dict[str, str] = {}
    for name in expected_tensors(config):
        if name == "output.weight":
            names[name] = heads[0]
        elif name in _HF_TOP:
            names[name] = top[0] + _HF_TOP[name]
        else:
            _, layer, rest = name.split(".", 2)
            names[name] = f"{top[0]}layers.{layer}.{layer_names[rest]}"
    return names


def _unused_heads(config: ModelConfig) -> tuple[str, ...]:
    # A tied model's head, where it is stored at all, is a copy of the embedding.
    return _HF_HEADS if config.tied_embeddings else ()


def _check_tensors(config: ModelConfig, found: Mapping[str, _Found]) -> None:
    """Every tensor that the architecture needs is there, shaped and typed as it must be."""
    for name, shape in expected_tensors(config).items():
        if name not in found:
            raise ModelFormatError(
                f"the model lacks the tensor {name!r} of shape {shape}, which {config.architecture}"
                f" with {config.n_layers} layers needs: the file is incomplete."
            )
        tensor = found[name]
        if tensor.shape != shape:
            raise ModelFormatError(
                f"tensor {tensor.name!r} has shape {tensor.shape}, but the model's configuration "
                f"means {shape}: the file contradicts itself."
            )
        if tensor.type is None or (len(shape) == 1 and tensor.type not in _FLOATS):
            raise UnsupportedModelError(
                f"tensor {tensor.name!r} has a type that is not supported there; supported: F32, F16, BF16."
            )


def _refuse_extra(present: Iterable[str], known: set[str]) -> None:
    """A weight that no one reads means that the model computes something else."""
    extra = sorted(set(present) - known)
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UnsupportedModelError(
            f"the model has the tensor {extra[0]!r}{more}, which its architecture does not use "
            "here: this variant of the model is not supported."
        )


def _default_template(templates: list[Any]) -> Any:
    """The one named "default" of a list of named templates."""
    for entry in templates:
        if isinstance(entry, dict) and entry.get("name") == "default":
            return entry.get("template")
    return None


def _special(token: Any) -> str:
    """A special token's text, written plainly or as an object; empty where there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
