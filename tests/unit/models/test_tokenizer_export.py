"""The text files of a plan: what transformers makes of the source is what the runtime makes of the plan."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from unit.runtime.sample_plan import sample_plan

from toolkit.models.random_weights import RandomSource
from toolkit.models.source import OpenedModel, TextFiles, open_model
from toolkit.models.tokenizer import write_text
from toolkit.runtime.chat import ChatTemplate
from toolkit.runtime.encodings import FLOAT32
from toolkit.runtime.errors import UserError
from toolkit.runtime.formats import Formats
from toolkit.runtime.options import TextOptions
from toolkit.runtime.plan import Plan, Text
from toolkit.runtime.prompt import Prompts
from toolkit.runtime.tokenizer import Tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
CHAT = [{"role": "user", "content": "Hi there"}]


def opened(text: TextFiles | None, **values: Any) -> OpenedModel:
    config = AutoConfig.for_model("llama", vocab_size=600)
    return OpenedModel("m", config, RandomSource({}, FLOAT32), "float32", {}, text, **values)


def plan(text: Text | None) -> Plan:
    sample = sample_plan(b"", b"", b"")
    return msgspec.structs.replace(sample, text=text, model=msgspec.structs.replace(sample.model, vocab_size=300_000))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a trained byte-level tokenizer that adds bos, and a chat template."""
    source = random.Random(0)
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    lines = (" ".join(source.choices(["hello", "world", "there", "Hi", "grüße", "12", "it's"], k=9)) for _ in range(99))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(lines, trainer)
    factory: Any = PreTrainedTokenizerFast
    wrapper = factory(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    wrapper.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    wrapper.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exported(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer, Path, Text]:
    target = tmp_path_factory.mktemp("plan")
    text = write_text(opened(TextFiles(directory=directory)), target)
    assert text is not None
    reference: Any = AutoTokenizer.from_pretrained(str(directory))
    return reference, Tokenizer.open(target, plan(text)), target, text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=20) | st.sampled_from(["hello world", " Hi</s>there", "<s>grüße it's 12"]))
def test_ids_are_those_of_transformers(text: str, exported: tuple[Any, Tokenizer, Path, Text]) -> None:
    reference, tokenizer, *_ = exported
    ids = reference.encode(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_files_and_their_description(exported: tuple[Any, Tokenizer, Path, Text]) -> None:
    reference, _, target, text = exported
    assert set(text.files) == {path.name for path in target.iterdir()}
    for name, digest in text.files.items():
        assert hashlib.sha256((target / name).read_bytes()).hexdigest() == digest
    assert (text.bos_token, text.eos_token) == ("<s>", "</s>")
    assert text.add_bos == (reference.encode("a")[0] == reference.bos_token_id)
    expected = reference.apply_chat_template(CHAT, tokenize=False)
    assert ChatTemplate.open(target).render(CHAT, add_generation_prompt=False) == expected


def test_a_template_for_tools_is_kept_apart(directory: Path, tmp_path: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(str(directory))
    reference.chat_template = {"default": TEMPLATE, "tool_use": "tools: {{ tools | tojson }}", "rag": "x"}
    reference.save_pretrained(tmp_path / "source")
    (tmp_path / "plan").mkdir()
    text = write_text(opened(TextFiles(directory=tmp_path / "source")), tmp_path / "plan")
    assert text is not None
    assert {"chat_template.jinja", "chat_template_tool_use.jinja"} <= set(text.files)
    for tools in (None, [{"type": "function"}]):
        expected = reference.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert ChatTemplate.open(tmp_path / "plan").render(CHAT, tools, False) == expected


def test_the_forms_of_answers_are_told_by_the_templates_and_special_tokens(directory: Path, tmp_path: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(str(directory))
    templates = {"default": TEMPLATE + "</think>", "tool_use": "{{ tools | tojson }}", "rag": "[TOOL_CALLS]"}
    reference.chat_template = templates
    reference.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    reference.save_pretrained(tmp_path / "source")
    (tmp_path / "plan").mkdir()
    text = write_text(opened(TextFiles(directory=tmp_path / "source")), tmp_path / "plan")
    assert text is not None
    assert text.formats == Formats("llama3_json", "qwen3")
    recorded = plan(text)
    assert Prompts.open(tmp_path / "plan", recorded).formats == text.formats
    older = plan(msgspec.structs.replace(text, formats=None))
    assert Prompts.open(tmp_path / "plan", older).formats == text.formats
    changed = plan(msgspec.structs.replace(text, formats=Formats("hermes")))
    assert Prompts.open(tmp_path / "plan", changed).formats == Formats("hermes")
    chosen = TextOptions(reasoning_parser="glm", chat_template="{{ messages[0].content }}<arg_key>{{ eos_token }}")
    prompts = Prompts.open(tmp_path / "plan", changed, chosen)
    assert prompts.formats == Formats("glm", "glm")
    assert prompts.render(CHAT) == "Hi there<arg_key></s>"


def test_the_generation_config_is_copied_or_made(directory: Path, tmp_path: Path) -> None:
    made = opened(TextFiles(directory=directory), eos_token_ids=(1, 7), bos_token_id=0)
    write_text(made, tmp_path)
    path = tmp_path / "generation_config.json"
    assert json.loads(path.read_text()) == {"bos_token_id": 0, "eos_token_id": [1, 7]}
    values = {"temperature": 0.6, "eos_token_id": [3]}
    (directory / "generation_config.json").write_text(json.dumps(values))
    try:
        write_text(made, tmp_path)
        assert json.loads(path.read_text()) == values
    finally:
        (directory / "generation_config.json").unlink()


def test_no_tokenizer_no_files(tmp_path: Path) -> None:
    assert write_text(opened(None), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for content, reason in (("{", "not valid JSON"), ("{}", "cannot be loaded .* fix its files, or remove them")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=reason) as error:
            write_text(opened(TextFiles(directory=tmp_path)), tmp_path)
        assert "\n" not in str(error.value)


def write_tokenizer(directory: Path, backend: Backend) -> Path:
    directory.mkdir()
    (directory / "tokenizer.json").write_text(backend.to_str())
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


def test_a_tokenizer_that_knows_few_characters(tmp_path: Path) -> None:
    """That it fails on some texts keeps it out of no plan."""
    source = write_tokenizer(tmp_path / "source", Backend(Unigram([("b", 0.0)], None, False)))
    text = write_text(opened(TextFiles(directory=source)), tmp_path)
    assert text is not None
    tokenizer = Tokenizer.open(tmp_path, plan(text))
    assert tokenizer.encode("bb") == [0, 0]
    with pytest.raises(UserError, match="can't encode this prompt"):
        tokenizer.encode("a")


def test_a_tokenizer_that_fails_on_every_text_is_refused(tmp_path: Path) -> None:
    backend = Backend(BPE({"a": 0, "<s>": 1}, []))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    source = write_tokenizer(tmp_path / "source", backend)
    damaged = backend.to_str().replace('"special_tokens":{"<s>":{', '"special_tokens":{"x":{')
    assert damaged != backend.to_str()
    (source / "tokenizer.json").write_text(damaged)
    with pytest.raises(UserError, match="The model's tokenizer cannot encode a text"):
        write_text(opened(TextFiles(directory=source)), tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"added_tokens": [{"id": 2**31, "content": "x"}]}, "has a token id above"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}}, "has a token id above"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "charsmap is damaged: it has 4"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"precompiled_charsmap": "?"}]}}, "is no base64 text"),
    ],
)
def test_sizes_that_would_take_all_memory(directory: Path, tmp_path: Path, change: Any, reason: str) -> None:
    values = json.loads((directory / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | change))
    with pytest.raises(UserError, match=reason):
        write_text(opened(TextFiles(directory=tmp_path)), tmp_path)


def test_a_gguf_file(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": np.array([3, 3, 1, 1, 1]),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    text = write_text(opened(TextFiles(metadata=metadata), eos_token_ids=(1,), bos_token_id=0), tmp_path)
    assert text is not None
    assert (text.bos_token, text.eos_token, text.add_bos) == ("<s>", "</s>", True)
    assert Tokenizer.open(tmp_path, plan(text)).encode("ab") == [0, 4]
    assert ChatTemplate.open(tmp_path).render(CHAT) == "<s>user: Hi there</s>"
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": [1]}


def test_smollm2(smollm2: Path, tmp_path: Path) -> None:
    model = open_model(str(smollm2))
    text = write_text(model, tmp_path)
    assert text is not None
    assert (text.bos_token, text.eos_token, text.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert (model.eos_token_ids, model.bos_token_id) == ((2,), 1)
    tokenizer = Tokenizer.open(tmp_path, plan(text))
    prompt = ChatTemplate.open(tmp_path).render([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face")
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[:3] == [1, 9690, 198]
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_gemma3(gemma3: Path, tmp_path: Path) -> None:
    model = open_model(str(gemma3))
    text = write_text(model, tmp_path)
    assert text is not None
    assert (text.bos_token, text.eos_token, text.add_bos) == ("<bos>", "<eos>", True)
    assert "chat_template.jinja" not in text.files
    assert Tokenizer.open(tmp_path, plan(text)).encode("Hello")[0] == model.bos_token_id == 2
