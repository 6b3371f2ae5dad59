"""Everything of ours that reads files: small valid samples, and how each is loaded."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
import sentencepiece
from fuzz.loader import Files, Loader
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig
from unit.runtime.sample_plan import write_sample_plan

from toolkit.models.checkpoint import INDEX, Checkpoint
from toolkit.models.packed import PackedTensor
from toolkit.models.random_weights import RandomSource
from toolkit.models.source import OpenedModel, TextFiles, open_model
from toolkit.models.tokenizer import write_text
from toolkit.runtime.chat import ChatTemplate
from toolkit.runtime.encodings import FLOAT32
from toolkit.runtime.load import read_plan
from toolkit.runtime.plan import Plan, Text
from toolkit.runtime.prompt import Prompts


def _files(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- safetensors ------------------------------------------------------------------------------------------------------


def _checkpoints(folder: Path) -> list[Files]:
    folder.mkdir()
    values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    tensors = {"model.a.weight": values, "model.b.bias": values[0].astype(np.float16), "c": np.arange(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    single = _files(folder)
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name, part in zip(names, (list(tensors)[:2], list(tensors)[2:]), strict=True):
        save_file({key: tensors[key] for key in part}, folder / name)
    index = {"metadata": {}, "weight_map": {key: names[key == "c"] for key in tensors}}
    (folder / INDEX).write_text(json.dumps(index))
    sharded = {name: content for name, content in _files(folder).items() if name not in single}
    save_file(_packed(), folder / "model.safetensors")
    return [single, sharded, {"model.safetensors": (folder / "model.safetensors").read_bytes()}]


def _packed() -> dict[str, npt.NDArray[Any]]:
    """A weight as GPTQ stores it and one as compressed-tensors does, with all that they may consist of."""
    words, scales, order = np.full((4, 8), 0x1234567, np.int32), np.ones((1, 8), np.float16), np.zeros(32, np.int32)
    ours = {"qweight": words, "qzeros": words[:1, :1], "scales": scales, "g_idx": order}
    theirs = {"_packed": words.T, "_scale": scales.T, "_zero_point": words[:1, :1], "_g_idx": order, "_shape": [8, 32]}
    parts = {f"model.a.{name}": part for name, part in ours.items()}
    parts |= {f"model.b.weight{name}": np.asarray(part) for name, part in theirs.items()}
    return {name: np.ascontiguousarray(part) for name, part in parts.items()}


def _load_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoint(folder, "model.")
    for name in checkpoint:
        if checkpoint[name].format in ("F32", "F16", "BF16", "F64") or isinstance(checkpoint[name], PackedTensor):
            checkpoint[name].read().decode()


# --- GGUF -------------------------------------------------------------------------------------------------------------

_WORDS = ("a", "b", "ab", "<s>", "</s>", "Ġ", "Ġa", "<think>")
_PIECES = ("<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "▁a", "[X]")


def _gguf_samples(folder: Path) -> list[Files]:
    folder.mkdir()
    return [
        _gguf(folder / "m.gguf", "llama", "gpt2", _WORDS, [1, 1, 1, 3, 3, 1, 1, 4]),
        _gguf(folder / "m.gguf", "gemma3", "llama", _PIECES, [2, 3, 3, 6, 1, 1, 1, 4]),
        _gguf(folder / "m.gguf", "qwen3", "t5", _PIECES, [2, 3, 3, 6, 1, 1, 1, 4]),
    ]


def _charsmap() -> bytes:
    """SentencePiece's compiled rules for a few characters."""
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"
        rules.write_text("41\t61\nFB01\t66 69\n")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b ab"]),
            model_writer=model,
            model_type="char",
            normalization_rule_tsv=str(rules),
            vocab_size=8,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    proto: Any = import_module("sentencepiece.sentencepiece_model_pb2")
    return bytes(proto.ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap)


def _gguf(path: Path, arch: str, kind: str, tokens: tuple[str, ...], types: list[int]) -> Files:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(list(tokens))
    writer.add_token_types(types)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    if kind == "t5":
        writer.add_precompiled_charsmap(_charsmap())
        writer.add_remove_extra_whitespaces(True)
        writer.add_unk_token_id(tokens.index("<unk>"))
    else:
        writer.add_token_merges(["a b", "Ġ a"] if kind == "gpt2" else ["▁ a"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    writer.add_tensor("token_embd.weight", values)
    for name, number in (("attn_q", 8), ("attn_k", 2), ("ffn_up", 3)):
        quantization = gguf.GGMLQuantizationType(number)
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    writer.add_tensor("output_norm.weight", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"m.gguf": path.read_bytes()}


def _load_gguf(folder: Path) -> None:
    opened = open_model(str(folder / "m.gguf"))
    for name in opened.weights:
        opened.weights[name].read().decode()
    _load_text(opened, folder)


# --- configurations ---------------------------------------------------------------------------------------------------

_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 8},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "stablelm": {"layer_norm_eps": 1e-5, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
}
_KINDS["llama"]["rope_parameters"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def _configs(folder: Path) -> list[Files]:
    generation = {"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.6, "top_p": 0.9}
    samples = []
    for kind, values in _KINDS.items():
        config = {"model_type": kind, "architectures": ["X"], "dtype": "bfloat16", **_SMALL, **values}
        files = {"config.json": config, "generation_config.json": generation}
        samples.append({name: json.dumps(content).encode() for name, content in files.items()})
    return samples


def _load_config(folder: Path) -> None:
    open_model(str(folder), random=True)


# --- tokenizers and chat templates ------------------------------------------------------------------------------------

TEMPLATE = """{{ bos_token }}{%- for m in messages %}{% if m.role == 'user' %}
{{- '<|' ~ m.role ~ '|>' + m.content | trim }}{% elif loop.index0 > 0 and m['content'][:2] != 'no' %}
{%- set ns = namespace(n=range(3) | list | length * 2) %}{{ m | tojson(indent=2) }}{{ ns.n ** 2 }}{{ 'x' * ns.n }}
{%- endif %}{{ eos_token.center(9) }}{% endfor %}{% if add_generation_prompt %}{{ strftime_now('%Y') }}{% endif %}"""
CHAT = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "yes"}, {"role": "tool", "content": "no"}]
_PROMPTS = ("Hello wörld, it's 12!", "<s> a\n\n  b</s>", "中文 🙂", "")


def _tokenizers(folder: Path) -> list[Files]:
    words = "hello world it's the world, hello 12 <think> grüße"
    special = ["<s>", "</s>", "<unk>"]
    byte_level = Backend(models.BPE())
    byte_level.normalizer = normalizers.NFC()
    byte_level.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    byte_level.decoder = decoders.ByteLevel()
    byte_level.train_from_iterator([words], trainers.BpeTrainer(vocab_size=60, special_tokens=special))
    byte_level.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    unigram = Backend(models.Unigram())
    unigram.normalizer = normalizers.Sequence([normalizers.Precompiled(_charsmap()), normalizers.Replace(" ", "▁")])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unigram.train_from_iterator(
        [words], trainers.UnigramTrainer(vocab_size=40, special_tokens=special, unk_token="<unk>")
    )
    pieces = {token: number for number, token in enumerate([*special, *map("<0x{:02X}>".format, range(256)), *"▁abc"])}
    fallback = Backend(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fallback.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return [*map(_tokenizer_files, (byte_level, unigram, fallback)), _sentencepiece_files()]


def _sentencepiece_files() -> Files:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world it is the world"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    return {"tokenizer.model": model.getvalue(), "tokenizer_config.json": json.dumps(config).encode()}


def _tokenizer_files(backend: Backend) -> Files:
    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = special | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "add_bos_token": True}
    added = {"content": "</s>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
    return {
        "tokenizer.json": json.dumps(json.loads(backend.to_str())).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "special_tokens_map.json": json.dumps(special | {"eos_token": added}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [1], "temperature": 0.5}).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }


def _load_tokenizer(folder: Path) -> None:
    config = AutoConfig.for_model("llama", vocab_size=600)
    text = TextFiles(directory=folder)
    _load_text(OpenedModel("m", config, RandomSource({}, FLOAT32), "float32", {}, text), folder)


def _load_text(opened: OpenedModel, folder: Path) -> None:
    """Write the text files of a plan and use them as the runtime does."""
    target = folder / "plan"
    target.mkdir()
    text = write_text(opened, target)
    if text is not None:
        plan = write_sample_plan(folder / "sample")
        model = msgspec.structs.replace(plan.model, vocab_size=600)
        _use_text(target, msgspec.structs.replace(plan, text=text, model=model))


def _use_text(folder: Path, plan: Plan) -> None:
    prompts = Prompts.open(folder, plan)
    tokenizer = prompts.tokenizer
    assert tokenizer is not None
    for prompt in _PROMPTS:
        ids = tokenizer.encode(prompt)
        tokenizer.decode(ids)
        decoder = tokenizer.incremental()
        for id_ in ids:
            decoder.push([id_])
        decoder.flush()
    if prompts.template is not None:
        prompts.template.render(CHAT)


def _templates(folder: Path) -> list[Files]:
    special = json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode()
    return [{"chat_template.jinja": TEMPLATE.encode(), "special_tokens_map.json": special}]


def _load_template(folder: Path) -> None:
    ChatTemplate.open(folder).render(CHAT, tools=[{"type": "function", "function": {"name": "f"}}])


# --- plans ------------------------------------------------------------------------------------------------------------


def _plans(folder: Path) -> list[Files]:
    plan = write_sample_plan(folder)
    files = _files(folder) | _tokenizers(folder)[0]
    files["special_tokens_map.json"] = json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode()
    texts = ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
    text = Text({name: hashlib.sha256(files[name]).hexdigest() for name in texts}, "<s>", "</s>")
    plan = msgspec.structs.replace(plan, text=text)
    signed = msgspec.structs.replace(plan, digest=plan.content_digest)
    return [files | {"plan.json": msgspec.json.encode(each)} for each in (plan, signed)]


def _load_plan(folder: Path) -> None:
    plan = read_plan(folder)
    if plan.text is not None:
        _use_text(folder, plan)


_ALL = (
    Loader("safetensors", _checkpoints, _load_checkpoint, ("model.safetensors", "model-1.safetensors", INDEX)),
    Loader("gguf", _gguf_samples, _load_gguf, ("m.gguf",)),
    Loader("config", _configs, _load_config, ("config.json", "generation_config.json")),
    Loader(
        "tokenizer",
        _tokenizers,
        _load_tokenizer,
        (
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "generation_config.json",
        ),
    ),
    Loader("template", _templates, _load_template, ("chat_template.jinja", "special_tokens_map.json")),
    Loader("plan", _plans, _load_plan, ("plan.json", "tokenizer.json", "special_tokens_map.json")),
)
LOADERS: Mapping[str, Loader] = {loader.name: loader for loader in _ALL}
