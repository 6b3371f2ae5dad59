"""Opening a model: a Hugging Face directory, a GGUF file or a hub id becomes a config, lazy weights and text files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, get_args

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..compiler.digests import file_digest
from ..compiler.weights import TensorSource
from ..runtime.encodings import Encoding, FloatName
from ..runtime.errors import UserError, brief, foreign_errors, shown
from .checkpoint import INDEX, Checkpoint, Quantized, float8_notes, weight_files
from .float8 import BLOCK
from .gguf_file import GGUFFile, read_gguf
from .gguf_models import architecture, config_values
from .gguf_source import GGUFSource, growth_notes
from .random_weights import RandomSource
from .sizes import check_sizes

DType = Literal["auto", "float32", "float16", "bfloat16"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Any of these says that a directory has a tokenizer."""
_TEXT_FILES = (*_TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class TextFiles:
    """Where tokenizer and chat template come from: a Hugging Face directory, or the metadata of a GGUF file."""

    directory: Path | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to be captured. Weights are read only when asked for."""

    name: str
    config: PretrainedConfig
    weights: TensorSource
    """Under the names of the model's Hugging Face implementation."""
    dtype: FloatName
    hashes: dict[str, str]
    """SHA-256 of every source file, by file name."""
    text: TextFiles | None
    """None if there is no tokenizer: the plan is then token-in, token-out."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    notes: tuple[str, ...] = ()
    """What a user should know of how it is stored, one sentence each."""


def open_model(
    model: str,
    *,
    dtype: str = "auto",
    quantized_dtype: FloatName = "float32",
    keeps_float8: bool = False,
    random: bool = False,
    reuse: bool = True,
) -> OpenedModel:
    """Open a directory, a `.gguf` file or a hub id (`owner/name`).

    `dtype` "auto" is the checkpoint's own, `quantized_dtype` for a GGUF file of integer weights. With
    `keeps_float8` weights in 8-bit floats stay so, as kernels read them. With `random` only config.json is needed, and
    the weights are shapes alone. With `reuse`, hashes of files that did not change are taken from the cache. Raises
    UserError for whatever cannot be used.
    """
    if dtype not in ("auto", *get_args(FloatName)):
        raise UserError(f"--dtype must be auto, float32, bfloat16 or float16, not {dtype!r}.")
    path = Path(model).expanduser()
    if os.path.isfile(path):
        return _open_gguf(path, dtype, quantized_dtype, random, reuse)
    if os.path.isdir(path):
        return _open_directory(path, dtype, random, reuse, keeps_float8=keeps_float8)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        folder = _download(model, not random)
        return _open_directory(folder, dtype, random, reuse, name=model, keeps_float8=keeps_float8)
    raise UserError(f"There is no model at {model}: give a directory, a .gguf file or a hub id such as owner/name.")


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _open_directory(
    directory: Path, dtype: str, random: bool, reuse: bool, *, name: str = "", keeps_float8: bool = False
) -> OpenedModel:
    config = _read_config(directory)
    used = [directory / file for file in ("config.json", "generation_config.json", INDEX, *_TEXT_FILES)]
    weights: TensorSource
    notes: tuple[str, ...] = ()
    if not random:
        quantized = replace(_quantized(directory, config), keeps_float8=keeps_float8)
        weights = Checkpoint(directory, _decoder_prefix(config), _renaming(config), quantized)
        notes = tuple(float8_notes(weights))
        stored: FloatName = _float_name(config.dtype) or _float_name(weights.main_encoding.kind) or "float32"
        used += weight_files(directory)
    else:
        stored = _float_name(config.dtype) or "float32"
        weights = random_source(config, _chosen(dtype, stored))
    eos, bos = _end_and_begin(directory, config)
    return OpenedModel(
        name=name or directory.resolve().name,
        config=config,
        weights=weights,
        dtype=_chosen(dtype, stored),
        hashes=_hashes((file for file in used if file.is_file()), reuse),
        text=TextFiles(directory=directory) if any((directory / file).is_file() for file in _TOKENIZER_FILES) else None,
        eos_token_ids=eos,
        bos_token_id=bos,
        notes=notes,
    )


def _quantized(directory: Path, config: PretrainedConfig) -> Quantized:
    """What a configuration says of quantized weights.

    It is dropped there: captured are the model's own layers. Raises UserError if they are quantized in another way
    than checkpoints can be read in.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return Quantized()
    method, format_ = str(_field(found, "quant_method") or "unknown"), _stored_format(found)
    if not format_.startswith(_FORMATS.get(method, ())):
        named = shown(method) + (f" as {shown(format_)}" if method in _FORMATS else "")
        raise UserError(
            f"{directory.name} is quantized by {named}, which is not supported; use the original or a GGUF."
        )
    del config.quantization_config
    block = _field(found, "weight_block_size") or BLOCK
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise UserError(f"{directory.name}/config.json has weight_block_size {shown(block)}, expected two sizes")
    return Quantized((block[0], block[1]), zero_offset=0 if _stored_format(found) == "gptq_v2" else 1)


def quantization_problem(config: PretrainedConfig) -> str | None:
    """Why the weights of a quantized checkpoint can't be read; None if they can, or are not quantized."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method, format_ = str(_field(found, "quant_method") or "unknown"), _stored_format(found)
    if format_.startswith(_FORMATS.get(method, ())):
        return None
    named = shown(method) + (f" as {shown(format_)}" if method in _FORMATS else "")
    return f"is quantized by {named}, which is not supported; use the original or a GGUF"


_FORMATS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("",),
    "awq": ("gemm",),
    "gptq": ("gptq",),
    "compressed-tensors": ("float", "naive", "pack-quantized"),
}
"""How the formats begin in which each method's weights can be read."""


def _stored_format(quantization: Any) -> str:
    """What a quantization's method calls its format."""
    names = {"awq": ("version", "gemm"), "gptq": ("checkpoint_format", "gptq"), "compressed-tensors": ("format", "")}
    name, default = names.get(str(_field(quantization, "quant_method")), ("", ""))
    return str(_field(quantization, name) or default).lower()


def _read_config(directory: Path) -> PretrainedConfig:
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} has no config.json; give a Hugging Face model directory or a .gguf file.")
    values = read_json(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or not _is_causal_lm(kind):
        reason = (
            "which is no language model of a decoder alone: others can't be compiled"
            if isinstance(kind, str) and kind in CONFIG_MAPPING
            else f"which is no language model that transformers {transformers.__version__} knows"
        )
        raise UserError(f"{directory.name}/config.json has model_type {shown(kind)}, {reason}; see `toolkit models`.")
    origin = f"{directory.name}/config.json"
    check_sizes(values, origin)
    with foreign_errors(f"{origin} is no valid {kind} config: {{}}"):
        config: PretrainedConfig = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    check_sizes(vars(config), origin)
    return config


def _is_causal_lm(model_type: str) -> bool:
    """Whether transformers has such a model, or it was registered there."""
    known = CONFIG_MAPPING.keys()
    return model_type in known and CONFIG_MAPPING[model_type] in AutoModelForCausalLM._model_mapping


def read_json(path: Path) -> dict[str, Any]:
    """An object as Hugging Face writes it, infinities included. Raises UserError if it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is not valid JSON ({brief(error)}); download it again.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path.name} should be a JSON object, found {type(values).__name__}; download it again.")
    return values


def _field(values: Any, name: str) -> Any:
    return values.get(name) if isinstance(values, dict) else getattr(values, name, None)


def _float_name(dtype: object) -> FloatName | None:
    """`torch.bfloat16` or "bfloat16" as "bfloat16"; None for what is no float dtype of ours."""
    name = str(dtype).removeprefix("torch.")
    return next((known for known in get_args(FloatName) if known == name), None)


def _chosen(dtype: str, stored: FloatName) -> FloatName:
    return _float_name(dtype) or stored


def _decoder_prefix(config: PretrainedConfig) -> str:
    """`model.` or `transformer.`, what parameters of the decoder begin with in the causal model, or ""."""
    prefix = _model_class(config).base_model_prefix
    return f"{prefix}." if prefix else ""


def _renaming(config: PretrainedConfig) -> Callable[[str], str]:
    """From a tensor's name in checkpoints to its name in the model, where transformers has renamed it."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    mapping: Any = get_checkpoint_conversion_mapping
    steps = mapping(_model_class(config).__name__) or mapping(config.model_type) or []
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    return lambda name: reduce(lambda old, step: str(step.rename_source_key(old)[0]), renamings, name)


def _model_class(config: PretrainedConfig) -> Any:
    """The causal language model of a configuration."""
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM._model_mapping
    return models[type(config)]


def _end_and_begin(directory: Path, config: PretrainedConfig) -> tuple[tuple[int, ...], int | None]:
    """End-of-sequence ids and the begin id: as generation_config.json says, else config.json."""
    path = directory / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    eos = values.get("eos_token_id", getattr(config, "eos_token_id", None))
    bos = values.get("bos_token_id", getattr(config, "bos_token_id", None))
    ids = eos if isinstance(eos, list) else [eos]
    return tuple(id_ for id_ in ids if isinstance(id_, int)), bos if isinstance(bos, int) else None


def random_source(config: PretrainedConfig, dtype: FloatName = "float32") -> RandomSource:
    """A weight without numbers for every parameter of the model that a config describes."""
    return RandomSource(parameter_shapes(config), Encoding(dtype))


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, tied ones once, from a model without storage."""
    from .capture import build_model

    return {name: tuple(parameter.shape) for name, parameter in build_model(config, "float32").named_parameters()}


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _open_gguf(path: Path, dtype: str, quantized_dtype: FloatName, random: bool, reuse: bool) -> OpenedModel:
    file = read_gguf(path)
    values = config_values(file)
    check_sizes(values, path.name)
    with foreign_errors(f"{path.name} has metadata that no config accepts: {{}}"):
        config = AutoConfig.for_model(architecture(file).model_type, **values)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    own = _main_float(file)
    stored = _chosen(dtype, own or quantized_dtype)
    weights = random_source(config, stored) if random else GGUFSource(file, config)
    notes = [] if random else list(growth_notes(file))
    if dtype == "auto" and own is None and stored != "float32":
        notes.append(f"{path.name} has integer weights, so activations are {stored}: --dtype chooses others")
    return OpenedModel(
        name=path.stem,
        config=config,
        weights=weights,
        dtype=stored,
        hashes=_hashes([path], reuse),
        text=TextFiles(metadata=file.metadata) if "tokenizer.ggml.tokens" in file.metadata else None,
        eos_token_ids=end_tokens(file.metadata),
        bos_token_id=config.bos_token_id,
        notes=tuple(notes),
    )


def _main_float(file: GGUFFile) -> FloatName | None:
    """The float format of most values that are not quantized; None if some are, and the others are float32 as norms are
    in every file.
    """
    counts: dict[str, int] = {"float32": 0}
    for tensor in file.tensors.values():
        kind = tensor.type.encoding.kind
        counts[kind] = counts.get(kind, 0) + tensor.nbytes
    quantized = counts.pop("affine", 0)
    found = _float_name(max(counts, key=counts.__getitem__)) or "float32"
    return None if quantized and found == "float32" else found


_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")


def end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: the file's eos and eot, and control tokens by which its chat template ends a turn."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    template, tokens = metadata.get("tokenizer.chat_template", ""), metadata.get("tokenizer.ggml.tokens", [])
    ends = [token for token in _TURN_ENDS if token in template]
    found = [tokens.index(end) for end in ends if end in tokens]
    return tuple(dict.fromkeys(id_ for id_ in (*named, *found) if isinstance(id_, int)))


# --- files ------------------------------------------------------------------------------------------------------------


def _hashes(files: Iterable[Path], reuse: bool) -> dict[str, str]:
    """SHA-256 by file name, files in parallel."""
    paths = list(files)
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = pool.map(partial(file_digest, reuse=reuse), paths)
        return dict(zip((path.name for path in paths), digests, strict=True))


def _download(model: str, weights: bool) -> Path:
    """A hub model's files, from the local cache or the network."""
    import huggingface_hub

    patterns = ["*.json", "*.model", "*.jinja", "*.txt", *(["*.safetensors"] if weights else [])]
    with foreign_errors(
        f"{model} is no local path and cannot be fetched from the hub ({{}}); check the name and the network, or "
        "download it elsewhere and give its directory."
    ):
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
