"""Write a random GGUF of the Llama-3.2-1B shape: `make_random_gguf.py VOCABULARY.gguf OUT.gguf [q4_0|q8_0|bf16]`.

1.07 billion parameters: hidden 2048, 16 layers, 32 query and 8 key heads, feed-forward 8192, and the vocabulary of the
given file. Only speed is measured with it, so that weights are slices of one random block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 2048, 16, 32, 8, 64, 8192
TYPES = {
    "q4_0": (GGMLQuantizationType.Q4_0, 2),
    "q8_0": (GGMLQuantizationType.Q8_0, 7),
    "bf16": (GGMLQuantizationType.BF16, 32),
}


def shapes(vocabulary: int) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of every matrix."""
    yield "token_embd.weight", vocabulary, HIDDEN
    for layer in range(LAYERS):
        yield f"blk.{layer}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN
        yield f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN
        yield f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN
        yield f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM
        yield f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, HIDDEN
        yield f"blk.{layer}.ffn_up.weight", FEED_FORWARD, HIDDEN
        yield f"blk.{layer}.ffn_down.weight", HIDDEN, FEED_FORWARD


def write(vocabulary_file: str, path: str, kind: str) -> None:
    """Write the model with the tokenizer of `vocabulary_file`."""
    fields = GGUFReader(vocabulary_file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    quantization, file_type = TYPES[kind]
    writer = GGUFWriter(path, "llama")
    writer.add_name("random-1b")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list(tokens)
    writer.add_token_types(fields["tokenizer.ggml.token_type"].contents())
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"].contents())
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"].contents())
    block = np.random.default_rng(0).standard_normal(FEED_FORWARD * HIDDEN, dtype=np.float32) * np.float32(0.02)
    for index, (name, rows, columns) in enumerate(shapes(len(tokens))):
        values = np.resize(np.roll(block, 7919 * index), (rows, columns))
        writer.add_tensor(name, quants.quantize(values, quantization), raw_dtype=quantization)
    for name in (
        "output_norm.weight",
        *(f"blk.{i}.{norm}.weight" for i in range(LAYERS) for norm in ("attn_norm", "ffn_norm")),
    ):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "q4_0")
