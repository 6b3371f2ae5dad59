"""Measure llama.cpp through llama-cpp-python's low-level API: `peer_llama_cpp.py GGUF [--batch N] [--runs N]`.

Runs in the peer's own environment (see `run.py`), so that it imports nothing of toolkit. Calls `llama_decode` directly:
there is no sampling beyond an argmax over the logits, no text and no HTTP. Prints one JSON object; lists are repeats.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time

import llama_cpp as llama
import numpy as np

PROMPT, NEW, PREFILL = 128, 128, 512
BATCH_PROMPT, BATCH_NEW = 64, 32


class Model:
    """A loaded model with one context of `sequences` sequences."""

    def __init__(self, path: str, sequences: int, context: int, threads: int) -> None:
        params = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        options = llama.llama_context_default_params()
        options.n_ctx = context * sequences
        options.n_batch = 2048
        options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = threads
        options.n_seq_max = sequences
        options.flash_attn_type = 1
        options.kv_unified = False
        self.context = llama.llama_init_from_model(self.model, options)
        self.memory = llama.llama_get_memory(self.context)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(2048, 0, sequences)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run rows of (token, position, sequence, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, logits) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = logits
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        llama.llama_synchronize(self.context)

    def argmax(self, index: int) -> int:
        """The most likely token of a row."""
        pointer = llama.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(pointer, (self.vocabulary,)).argmax())

    def prefill(self, length: int, sequence: int = 0) -> int:
        """Run a random prompt; returns the next token."""
        ids = np.random.default_rng(sequence).integers(100, 40000, length)
        self.decode([(int(token), position, sequence, position == length - 1) for position, token in enumerate(ids)])
        return self.argmax(-1)

    def clear(self) -> None:
        """Forget every sequence."""
        llama.llama_memory_clear(self.memory, True)


def decode_speed(model: Model) -> float:
    """Tokens a second of one sequence after its prompt."""
    model.clear()
    token = model.prefill(PROMPT)
    begin = time.perf_counter()
    for step in range(NEW):
        model.decode([(token, PROMPT + step, 0, True)])
        token = model.argmax(0)
    return NEW / (time.perf_counter() - begin)


def prefill_speed(model: Model) -> float:
    """Prompt tokens a second."""
    model.clear()
    begin = time.perf_counter()
    model.prefill(PREFILL)
    return PREFILL / (time.perf_counter() - begin)


def batch_speed(model: Model, batch: int) -> dict[str, float]:
    """Tokens a second of all sequences together: decode alone, and over the whole time with their prompts."""
    model.clear()
    start = time.perf_counter()
    tokens = [model.prefill(BATCH_PROMPT, sequence) for sequence in range(batch)]
    begin = time.perf_counter()
    for step in range(BATCH_NEW - 1):
        model.decode([(tokens[s], BATCH_PROMPT + step, s, True) for s in range(batch)])
        tokens = [model.argmax(s) for s in range(batch)]
    end = time.perf_counter()
    return {
        "decode": batch * (BATCH_NEW - 1) / (end - begin),
        "whole": batch * BATCH_NEW / (end - start),
    }


def main() -> None:
    """Print the figures of one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--batch", type=int, default=0, help="measure this many concurrent sequences instead of one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    if args.batch:
        model = Model(args.gguf, args.batch, BATCH_PROMPT + BATCH_NEW + 32, args.threads)
        batch_speed(model, args.batch)
        runs = [batch_speed(model, args.batch) for _ in range(args.runs)]
        figures = {f"batch_{key}": [run[key] for run in runs] for key in ("decode", "whole")}
    else:
        model = Model(args.gguf, 1, 1024, args.threads)
        decode_speed(model)
        figures = {
            "decode": [decode_speed(model) for _ in range(args.runs)],
            "prefill": [prefill_speed(model) for _ in range(args.runs)],
        }
    print(json.dumps({"peer": f"llama-cpp-python {llama.__version__}", **figures}))


if __name__ == "__main__":
    main()
