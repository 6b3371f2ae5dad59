"""Linear kernels: time, share of read bandwidth and operations a second, for each encoding and shape.

    python benchmarks/kernels_linear.py [--threads 2] [--encoding a4g32] [--rows 1 8 64] [--seconds 0.3]

Weights are read from memory, not from a cache: calls go round copies of the weight, which together are larger than the
last-level cache. Prints one JSON object a line; `bandwidth` is the best plain read of the same memory in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from toolkit.compiler.cache import cached, content_key
from toolkit.compiler.codegen.cpu import ISA_LEVELS, compile_object, find_compiler
from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.kernels_templates.packing import layout_bytes, q8_pack
from toolkit.kernels_templates.render import render, signature
from toolkit.runtime import encodings
from toolkit.runtime.encodings import Encoding

ENCODINGS = {
    e.name: e
    for e in (
        encodings.FLOAT32,
        encodings.FLOAT16,
        encodings.BFLOAT16,
        encodings.Q4_0,
        encodings.Q4_1,
        encodings.Q5_0,
        encodings.Q5_1,
        encodings.Q8_0,
        encodings.Q4_K,
        encodings.Q5_K,
        encodings.Q6_K,
        encodings.Q2_K,
        encodings.Q3_K,
        encodings.IQ4_NL,
        encodings.IQ4_XS,
        Encoding("affine", bits=4, group=64, zero=8),
        Encoding("affine", bits=4, group=128, zero=8),
        Encoding("affine", bits=4, group=128, has_minimum=True),
        Encoding("affine", bits=4, group=128, scale="float32", has_minimum=True),
        Encoding("affine", bits=8, group=128),
    )
}
SHAPES = ((2048, 8192), (8192, 2048), (576, 1536), (1536, 576))
"""N, K."""

TOKENS: dict[str, tuple[tuple[str, int, int, int], ...]] = {
    "smollm2-135m": (
        ("a4g32m", 960, 576, 30),
        ("a4g32m", 576, 576, 30),
        ("a4g32m", 3072, 576, 30),
        ("a4g32m", 576, 1536, 30),
        ("a8g32", 49152, 576, 1),
    ),
    "rand1b-q4_0": (
        ("a4g32", 3072, 2048, 16),
        ("a4g32", 2048, 2048, 16),
        ("a4g32", 16384, 2048, 16),
        ("a4g32", 2048, 8192, 16),
        ("a4g32", 49152, 2048, 1),
    ),
}
"""All linear layers of a token: encoding, N, K, how many."""

_DRIVER = """
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>
{% for signature in signatures %}
{{ signature }};
{% endfor %}
struct call { int32_t kernel, rows, N, K; const void *x; const uint8_t *weight; float *out; };
static const call *calls;
static int count, threads, repeats;
static double *seconds;
static int arrived, phase;

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static void barrier() {
  int seen = __atomic_load_n(&phase, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == threads) {
    __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&phase, seen + 1, __ATOMIC_RELEASE);
  } else {
    for (int spins = 0; __atomic_load_n(&phase, __ATOMIC_ACQUIRE) == seen; spins++)
      spins < 10000 ? _mm_pause() : (void)sched_yield();
  }
}
// kernel -1 reads N bytes
static void read_bytes(const uint8_t *p, int64_t bytes, int tid) {
  __m256i sum[4] = {};
  const uint8_t *end = p + bytes * (tid + 1) / threads / 128 * 128;
  for (p += bytes * tid / threads / 128 * 128; p < end; p += 128)
    for (int i = 0; i < 4; i++) sum[i] = _mm256_xor_si256(sum[i], _mm256_loadu_si256((const __m256i *)p + i));
  asm volatile("" ::"x"(sum[0]), "x"(sum[1]), "x"(sum[2]), "x"(sum[3]));
}
static void *work(void *arg) {
  int tid = (int)(intptr_t)arg;
  for (int i = 0; i < repeats; i++) {
    barrier();
    double start = now();
    for (int c = 0; c < count; c++) {
      const call *k = calls + c;
      switch (k->kernel) {
        case -1: read_bytes(k->weight, k->N, tid); break;
{% for symbol in symbols %}
        case {{ loop.index0 }}: {{ symbol }}(k->x, k->weight, k->out, k->rows, k->N, k->K, tid, threads); break;
{% endfor %}
      }
      barrier();
    }
    if (tid == 0) seconds[i] = now() - start;
  }
  return 0;
}
extern "C" __attribute__((visibility("default"))) void run(const call *c, int n, int t, int r, double *s) {
  calls = c, count = n, threads = t, repeats = r, seconds = s;
  pthread_t handles[64];
  for (intptr_t i = 1; i < threads; i++) pthread_create(handles + i, 0, work, (void *)i);
  work(0);
  for (int i = 1; i < threads; i++) pthread_join(handles[i], 0);
}
"""


class Call(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("N", ctypes.c_int32),
        ("K", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]


def _spec(encoding: str) -> KernelSpec:
    extras = {f"extra{i}": "" for i in range(1, 5)}
    outputs = {"gated": False, "float_out": True, "q8_out": False}
    return KernelSpec("linear", {"encoding": encoding, "has_bias": False, "epilogue": "", **extras, **outputs})


def _library(isa: str, names: Sequence[str]) -> ctypes.CDLL:
    """The driver with the kernels of some encodings: kernel i is that of name i."""
    level = next(level for level in ISA_LEVELS if level.name == isa)
    specs = [_spec(name) for name in names]
    signatures, symbols = [signature(spec) for spec in specs], [spec.symbol for spec in specs]
    driver = jinja2.Template(_DRIVER, trim_blocks=True).render(signatures=signatures, symbols=symbols)
    sources = [driver, *(render(spec, level.name) for spec in specs)]

    def make(path: Path) -> None:
        objects = [str(compile_object(source, level, "linear")) for source in sources]
        subprocess.run([*find_compiler().command, "-shared", *objects, "-lpthread", "-lm", "-o", str(path)], check=True)

    return ctypes.CDLL(str(cached(content_key("bench", *sources), ".so", make)))


class Runner:
    """Kernels, and memory that stands for weights, activations and outputs."""

    def __init__(self, isa: str, names: Sequence[str], threads: int, megabytes: int) -> None:
        self.names, self.threads = list(names), threads
        self._library = _library(isa, self.names)
        self.weights: npt.NDArray[np.uint8] = np.full(megabytes * 1_000_000, 0x11, np.uint8)
        self._x: npt.NDArray[np.float32] = np.random.default_rng(0).standard_normal((512, 8192), np.float32)
        self._q8: dict[int, npt.NDArray[np.uint8]] = {}
        self._out: npt.NDArray[np.float32] = np.zeros(512 * 49152, np.float32)

    def calls(self, layers: Sequence[tuple[str, int, int]], rows: int) -> list[Call]:
        """A call for each (encoding, N, K), with weights one behind the other."""
        made, at = [], 0
        for name, outputs, columns in layers:
            size = layout_bytes("panel16", ENCODINGS[name], (outputs, columns))
            assert at + size <= self.weights.nbytes, "more weights than memory: raise --megabytes"
            weight, x = self.weights.ctypes.data + at, self._activations(ENCODINGS[name], columns)
            made.append(Call(self.names.index(name), rows, outputs, columns, x, weight, self._out.ctypes.data))
            at += size
        return made

    def _activations(self, encoding: Encoding, columns: int) -> int:
        if encoding.kind != "affine":
            return int(self._x.ctypes.data)
        if columns not in self._q8:
            self._q8[columns] = q8_pack(np.ascontiguousarray(self._x[:, :columns]))
        return int(self._q8[columns].ctypes.data)

    def measure(self, calls: Sequence[Call], seconds: float) -> float:
        """Seconds of the fastest pass over the calls, among as many as fit in `seconds`, at least 3."""
        array, times = (Call * len(calls))(*calls), (ctypes.c_double * 1000)()
        self._library.run(array, len(calls), self.threads, 1, times)
        repeats = min(max(int(seconds / times[0]), 3), 1000)
        self._library.run(array, len(calls), self.threads, repeats, times)
        return min(times[:repeats])

    def bandwidth(self) -> float:
        """Bytes a second of plain reads."""
        read = Call(-1, 0, self.weights.nbytes, 0, None, self.weights.ctypes.data, None)
        return self.weights.nbytes / self.measure([read], 1.0)


def one_layer(runner: Runner, name: str, rows: int, shape: tuple[int, int], seconds: float) -> dict[str, Any]:
    size = layout_bytes("panel16", ENCODINGS[name], shape)
    copies = runner.weights.nbytes // size if rows < 32 else 1
    best = runner.measure(runner.calls([(name, *shape)] * copies, rows), seconds) / copies
    return {
        "encoding": name,
        "N": shape[0],
        "K": shape[1],
        "rows": rows,
        "us": round(best * 1e6, 1),
        "GB/s": round(size / best / 1e9, 2),
        "GMAC/s": round(rows * shape[0] * shape[1] / best / 1e9, 1),
    }


def whole_token(runner: Runner, model: str, rows: int, seconds: float) -> dict[str, Any]:
    """All linear layers of a step; the head for 8 rows of it at most, as a prefill needs few."""
    layers = [(name, outputs, columns) for name, outputs, columns, count in TOKENS[model] for _ in range(count)]
    calls = runner.calls(layers, rows)
    calls[-1].rows = min(rows, 8)
    best = runner.measure(calls, seconds)
    return {"model": model, "rows": rows, "ms": round(best * 1e3, 3), "tokens/s": round(rows / best, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="x86-64-v3")
    parser.add_argument("--encoding", nargs="*", default=list(ENCODINGS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each measurement")
    parser.add_argument("--megabytes", type=int, default=700, help="size of the weights that calls go round")
    options = parser.parse_args()
    names = sorted({*options.encoding, *(layer[0] for layers in TOKENS.values() for layer in layers)})
    runner = Runner(options.isa, names, options.threads, options.megabytes)
    print(json.dumps({"read GB/s": round(runner.bandwidth() / 1e9, 2)}))
    for rows in options.rows:
        for model in TOKENS:
            print(json.dumps(whole_token(runner, model, rows, options.seconds)), flush=True)
        for name in options.encoding:
            for shape in SHAPES:
                if ENCODINGS[name].kind == "affine" and shape[1] % ENCODINGS[name].unit:
                    continue
                print(json.dumps(one_layer(runner, name, rows, shape, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
