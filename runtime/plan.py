"""The plan: everything a runtime needs to run one model on one kind of target, as versioned JSON beside hashed blobs.

    plan/  plan.json  weights.safetensors  kernels/*.so  tokenizer.json  chat_template.jinja  generation_config.json

All sizes are bytes and all offsets are relative to the file or arena they point into. Nothing here is an absolute path
or is looked up in the environment, so a plan can be moved, mounted read-only and shared.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .encodings import Encoding
from .formats import Formats

MAJOR, MINOR = 1, 4
"""Schema version. A reader takes its own and the previous major version; a higher minor only adds fields."""


Generator = Literal["cpp", "tvm"]
"""What wrote a kernel's machine code: a C++ template, or TVM."""
KvDType = Literal["float32", "float16", "bfloat16", "int8", "fp8"]
"""Numbers of a K/V cache; int8 and fp8 (E4M3) are codes with a float16 scale for each token and head."""
LARGEST_CODE: dict[KvDType, int] = {"int8": 127, "fp8": 448}
"""What a vector's largest magnitude becomes in a cache of codes."""
IsaName = Literal["x86-64-v3", "x86-64-v4"]
"""Instruction set levels of x86-64, as its psABI names them."""

ArchName = Literal["sm80", "sm86", "sm89", "sm90"]
"""GPU architectures, by compute capability."""
CodeForm = Literal["cubin", "ptx"]
"""Code of a GPU kernel: machine code for one architecture, or what drivers compile for any newer one too."""
TargetKind = Literal["cpu", "cuda"]
"""Kinds of machine, each with kernels and a device of its own."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every record in the plan: immutable, and strict about what it reads."""


# --- launch arguments -------------------------------------------------------------------------------------------------


class ArenaArg(_Record, frozen=True, tag="arena"):
    """An activation buffer: `offset` bytes into the arena, `bytes` long at the bucket's largest step."""

    offset: int
    bytes: int
    value: str
    """Name of the IR value it holds."""


class WeightArg(_Record, frozen=True, tag="weight"):
    """A resident weight, by its name in `Plan.weights`."""

    name: str


class CacheArg(_Record, frozen=True, tag="cache"):
    """The K/V storage of one layer: base of `Plan.caches[group]` plus `slot` layer strides."""

    group: int
    slot: int
    """Position of the layer in the group."""


class InputArg(_Record, frozen=True, tag="input"):
    """A step input or result by name: tokens positions lengths seq_start context rows results top_tokens top_logprobs,
    or slots pages page_stride of cache `group`. `page_stride` is a number on CPU, and a pointer to one on CUDA."""

    name: str
    group: int = 0


class DimArg(_Record, frozen=True, tag="dim"):
    """The run-time value of a symbolic dimension times `factor`: T, S or R."""

    name: str
    factor: int = 1


class ConstArg(_Record, frozen=True, tag="const"):
    """A literal."""

    value: int | float


Arg = ArenaArg | WeightArg | CacheArg | InputArg | DimArg | ConstArg


class Launch(_Record, frozen=True):
    """One kernel call. Launches run in order; `barrier` says that the next one needs this one's results whole."""

    kernel: str
    """Name in `Plan.kernels`."""
    args: tuple[Arg, ...]
    barrier: bool = True
    op: str = ""
    """The IR op it implements, with its layer, for reports: `linear:model.layers.3.mlp.down_proj`."""
    bytes: int = 0
    """Weight and cache-independent bytes it reads at T = 1, for the roofline estimate."""
    flops: int = 0
    """Floating-point or integer operations at T = 1."""


class Buffer(_Record, frozen=True):
    """One planned activation, for the memory map: alive from launch `first` to launch `last`, both included."""

    value: str
    offset: int
    bytes: int
    first: int
    last: int


class Bucket(_Record, frozen=True):
    """A launch program that serves every step within its limits."""

    name: str
    max_tokens: int
    max_sequences: int
    max_rows: int
    forward: tuple[Launch, ...]
    sample: tuple[Launch, ...]
    decode: bool = False
    """It serves only steps of one token a sequence, each sampled (T = S = R), which are padded to its limits."""
    buffers: tuple[Buffer, ...] = ()
    """Its own, if there are several buckets: they share the arena, one at a time."""
    alternatives: dict[str, tuple[str, ...]] = {}
    """By kernel, others that compute the same from the same arguments: `toolkit tune` finds out which is fastest."""

    def fits(self, tokens: int, sequences: int, rows: int) -> bool:
        """Whether it serves a step of that size."""
        within = tokens <= self.max_tokens and sequences <= self.max_sequences and rows <= self.max_rows
        return within and (not self.decode or tokens == sequences == rows)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Both segments in order."""
        return self.forward + self.sample


# --- resources --------------------------------------------------------------------------------------------------------


class Choice(_Record, frozen=True):
    """Whose code a library of one ISA level runs for calls of up to `rows` rows; the last one takes all others."""

    isa: IsaName
    rows: int
    generator: Generator


class Kernel(_Record, frozen=True):
    """A compiled kernel. On CPU the entry is linked into every library of the plan."""

    family: str
    """Family in `kernels_templates.catalog`."""
    params: dict[str, int | str | float | bool]
    source_hash: str
    shape: dict[str, int] = {}
    """Arguments that TVM's code was made for, e.g. N and K; a kernel that is all C++ takes any."""
    choices: tuple[Choice, ...] = ()
    """By ISA level, then by rows; C++ where there is none. `tuning.json` has the times behind them."""


class GridAxis(_Record, frozen=True):
    """Thread blocks along one axis: the product of arguments at these positions over `divisor`, rounded up."""

    factors: tuple[int, ...] = ()
    divisor: int = 1
    persistent: bool = False
    """No more than the GPU has multiprocessors."""
    times: int = 1
    """And that many for each."""


class TensorMap(_Record, frozen=True):
    """An argument that a kernel takes not as a pointer but as a tensor map of it: a `CUtensorMap`, 128 bytes by value.

    It is a matrix of 16-bit numbers row by row, read in tiles of 64 columns and `box` rows that are swizzled by 128
    bytes, `depth` of them side by side at a time; what lies outside of the matrix reads as zero, but columns of a last
    incomplete tile, which are any. Or it is an affine weight in its layout: see `block`. The number of rows may be a
    bucket's bound.
    """

    argument: int
    rows: int
    """Position of the argument that counts its rows."""
    columns: int
    box: int
    """Rows, or panels, of a tile."""
    depth: int = 1
    """Boxes of 64 columns, or blocks of a panel, of a tile."""
    block: tuple[int, int, int, int] | None = None
    """Of a weight in `operand16`: rows and columns of a block, its parts, bytes of a part. Tiles have whole blocks."""
    bytes: int = 2
    """Of a number; of those with 1 a box has 128 columns."""
    width: int = 0
    """Columns of a matrix that no argument counts: its rows are as many as memory has."""


class CudaKernel(_Record, frozen=True):
    """A kernel as machine code for one GPU architecture, and how it is launched."""

    offset: int
    """Of its code in the module's file."""
    bytes: int
    entry: str
    threads: int
    grid: tuple[GridAxis, GridAxis, GridAxis]
    shared: int = 0
    """Bytes of dynamic shared memory."""
    registers: int = 0
    """A thread; from the compiler, for reports, as are the next two."""
    static_shared: int = 0
    """Bytes of shared memory besides the dynamic."""
    spilled: int = 0
    """Bytes of registers kept in memory, a thread."""
    pdl: bool = False
    """It waits for the kernel before it by itself, so it may be launched before that has finished."""
    maps: tuple[TensorMap, ...] = ()


class CudaModule(_Record, frozen=True):
    """The kernels of a plan for one GPU architecture. The loader takes the one that suits the GPU best."""

    arch: ArchName
    file: str
    bytes: int
    sha256: str
    kernels: dict[str, CudaKernel]
    """By name in `Plan.kernels`."""
    form: CodeForm = "cubin"


class Library(_Record, frozen=True):
    """A shared library for one ISA level. The loader takes the last one whose `requires` the CPU has."""

    isa: IsaName
    file: str
    bytes: int
    sha256: str
    requires: tuple[str, ...]
    """CPU flags as /proc/cpuinfo names them."""


class WeightEntry(_Record, frozen=True):
    """One resident weight: a byte range of a safetensors file, in the layout its kernels read."""

    file: str
    offset: int
    """From the start of the file; a multiple of 64."""
    bytes: int
    shape: tuple[int, ...]
    encoding: Encoding
    layout: str
    """Name of a packing in `kernels_templates.packing`."""
    sources: tuple[str, ...] = ()
    fill: str = ""
    """How a random weight is made: a name in `Plan.fills`."""


class WeightFile(_Record, frozen=True):
    """A weight file with its size and hash."""

    file: str
    bytes: int
    sha256: str
    random: bool = False
    """There is no such file: its weights are made when the plan is loaded, from `Model.random_weights`, the seed."""


class RandomFill(_Record, frozen=True):
    """How random bytes become a weight: byte by byte (random & keep) | value, where both repeat; in hexadecimal."""

    keep: str
    value: str


class TuningFile(_Record, frozen=True):
    """The file of `runtime.tuning` with its size and hash."""

    file: str
    bytes: int
    sha256: str


class CacheResource(_Record, frozen=True):
    """A group of layers whose caches are allocated, shared and freed together.

    Storage of a group is [layer][page][bytes of a page of one layer]; the layout inside a page is the kernels' own.
    """

    kind: Literal["kv"]
    layers: tuple[int, ...]
    page_tokens: int
    page_bytes: int
    """Bytes of one page of one layer (keys and values)."""
    heads: int
    key_dim: int
    value_dim: int
    dtype: KvDType
    layout: str
    window: int = 0
    """0: every token is kept; else only the last `window` are read, and pages behind them may be freed."""

    @property
    def bytes_per_token(self) -> float:
        """Over all layers of the group."""
        return len(self.layers) * self.page_bytes / self.page_tokens


class MemoryPlan(_Record, frozen=True):
    """Bytes the plan needs besides the KV cache."""

    arena: int
    weights: int
    host: int
    """Step inputs, results and the runtime's own tables."""
    buffers: tuple[Buffer, ...] = ()
    """Of a plan with one bucket; several have their own."""


# --- the whole --------------------------------------------------------------------------------------------------------


class RopeChanges(_Record, frozen=True):
    """RoPE frequencies depend on a sequence's length: up to `first` tokens they are the same, and from `last` on."""

    first: int
    last: int

    def clip(self, length: int) -> int:
        """A length at which the frequencies are those of `length`."""
        return min(max(length, self.first), self.last)

    @property
    def switch(self) -> int | None:
        """The length from which on the second of just two sets of frequencies holds."""
        return self.last if self.last == self.first + 1 else None


class Model(_Record, frozen=True):
    """Which model this is."""

    name: str
    architecture: str
    """Hugging Face model type, e.g. `llama`."""
    vocab_size: int
    hidden_size: int
    layers: int
    max_context: int
    """Most tokens of a sequence, prompt and output together."""
    dtype: Literal["float32", "float16", "bfloat16"]
    quantization: str
    source_hashes: dict[str, str] = {}
    random_weights: int | None = None
    """Seed, if the weights are random."""
    rope_changes: RopeChanges | None = None


class Text(_Record, frozen=True):
    """Text handling; absent from token-in, token-out plans. `files` maps a file in the plan to its SHA-256."""

    files: dict[str, str]
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    """Whether encoding a plain prompt puts the bos token first."""
    formats: Formats | None = None
    """Of tool calls and reasoning in answers; None in plans before 1.4: they are detected when it is opened."""


class PassReport(_Record, frozen=True):
    """What one pass did."""

    name: str
    matches: int
    ops_before: int
    ops_after: int
    seconds: float = 0.0
    """Not part of the plan's identity: written as 0 unless asked for."""
    notes: tuple[str, ...] = ()
    """What it could not fuse, match or quantize, one sentence each."""


class Report(_Record, frozen=True):
    """What the compiler did, for `inspect`."""

    captured_ops: int
    fused_ops: int
    passes: tuple[PassReport, ...]
    notes: tuple[str, ...] = ()
    """What could not be fused, matched or quantized, one sentence each."""
    versions: dict[str, str] = {}


class Plan(_Record, frozen=True):
    """A compiled model. `load.read_plan` reads and checks it."""

    format: Literal["toolkit-plan"]
    major: int
    minor: int
    abi: str
    """Hash of the structs shared with the device code; the runtime and every library must agree."""
    model: Model
    target: str
    max_batch: int
    """Most sequences in a step."""
    buckets: tuple[Bucket, ...]
    kernels: dict[str, Kernel]
    libraries: tuple[Library, ...]
    weights: dict[str, WeightEntry]
    weight_files: tuple[WeightFile, ...]
    caches: tuple[CacheResource, ...]
    memory: MemoryPlan
    text: Text | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    report: Report
    tuning: TuningFile | None = None
    """Races behind the kernels' choices, if there were any."""
    fills: dict[str, RandomFill] = {}
    modules: tuple[CudaModule, ...] = ()
    deterministic: bool = False
    """Whether all kernels are batch-invariant, and each is one generator's code for any number of rows: then a
    request's tokens and log-probabilities depend on nothing else that runs, on one machine."""
    digest: str = ""
    """`content_digest` of the plan, so that a change of any number in it is noticed; "" in plans before 1.1."""

    @property
    def content_digest(self) -> str:
        """SHA-256 of everything here but `digest`, as JSON with sorted keys."""
        import hashlib

        bare = msgspec.structs.replace(self, digest="")
        return hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()

    @property
    def code(self) -> tuple[Library | CudaModule, ...]:
        """The files of machine code."""
        return (*self.libraries, *self.modules)

    def buffers(self, bucket: Bucket) -> tuple[Buffer, ...]:
        """The activations of a launch program."""
        return bucket.buffers or self.memory.buffers

    @property
    def kind(self) -> TargetKind:
        """What runs it."""
        return "cuda" if self.modules else "cpu"

    @property
    def kv_bytes_per_token(self) -> float:
        """Cache bytes a token of context costs, over all groups."""
        return sum(cache.bytes_per_token for cache in self.caches)
