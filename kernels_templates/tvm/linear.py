"""The `linear` family over q8 rows and affine panels of 4 or 8 bits, as TIR: see `cpu/linear.cpp.j2` and `packing.py`.

N and K are constants. Threads share the panels of 16 outputs. One row goes through four panels at a time, which are as
many streams from memory; more rows go by in blocks whose sums stay in registers. Every output is summed in the order of
the C++ kernel, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime.encodings import Encoding
from ...runtime.plan import IsaName
from ..catalog import KernelSpec
from ..packing import PANEL, PIECE, block_offsets, layout_bytes, panel_encoding, q8_row_bytes
from ..registry import FAMILIES
from ..render import arguments
from . import expression
from .q8 import quantize_group
from .script import Script

STREAMS = 4
"""Panels that one row reads together."""
ROWS: Mapping[int, tuple[int, ...]] = {16: (8, 4, 2, 1), 8: (4, 2, 1)}
"""Blocks of rows by lanes of a vector: as many sums as registers hold beside the codes of a group."""
TILE, TILE_BYTES = 16, 256 << 10
"""Panels, and bytes of them, that all rows go through before the next ones: half of a small L2 cache."""
ONE_ROW_TILE = 64
"""Panels of one row, of each half: the longer its streams from memory, the better."""
X_BYTES = 16 << 10
"""Codes of a block of rows that go through a tile together: half of a small L1 cache."""
PREFETCH = 2048
"""Bytes ahead."""


def takes(kernel: KernelSpec) -> bool:
    """Whether a kernel can be written for its shape."""
    encoding = encoding_of(kernel)
    if encoding is None or not expression.supported(str(kernel.params["epilogue"])):
        return False
    shape = kernel.shape["N"], kernel.shape["K"]
    columns = shape[0] // (2 if kernel.params["gated"] else 1)
    whole = columns % (2 * PANEL if kernel.params["q8_out"] else PANEL) == 0
    return whole and layout_bytes("panel16", encoding, shape) < 1 << 31  # offsets are 32 bits


def write(kernel: KernelSpec, name: str, isa: IsaName) -> str:
    """The script of a kernel for its shape."""
    encoding = encoding_of(kernel)
    assert encoding is not None
    return _Linear(kernel, encoding, name, isa).write()


def encoding_of(kernel: KernelSpec) -> Encoding | None:
    """The encoding of a kernel's weight, if it can be written."""
    encoding = panel_encoding(str(kernel.params["encoding"]))
    plain = encoding.kind == "affine" and not encoding.block and not encoding.levels
    return encoding if plain and encoding.bits in (4, 8) and encoding.unit >= PIECE else None


@dataclass(frozen=True)
class _Block:
    """`rows` rows from `row` on, times `count` units from `first` on.

    The product goes into `results` from `place` on: halves are `half_apart` vectors from each other, rows all halves.
    """

    rows: int
    row: str
    first: str
    count: str
    results: str
    place: str
    half_apart: str


class _Linear:
    """Writes one kernel: `write` is the function, the methods below it are its parts, outermost first.

    A *unit* is what is finished together: a panel of results, or two that are quantized as one group. It takes as many
    panels of the product, and those of the other half too if it is gated.
    """

    def __init__(self, kernel: KernelSpec, encoding: Encoding, name: str, isa: IsaName) -> None:
        self.kernel, self.encoding = kernel, encoding
        self.args = arguments(FAMILIES["linear"], kernel)
        self.halves = 2 if kernel.params["gated"] else 1
        self.unit = 2 if kernel.params["q8_out"] else 1
        self.columns, self.pieces = kernel.shape["N"] // self.halves, kernel.shape["K"] // PIECE
        self.offsets = block_offsets(encoding)
        self.s = Script(name, self.args, isa)
        self.parts = PANEL // self.s.lanes
        self.bytes = 4 * self.s.lanes

    def write(self) -> str:
        s, each = self.s, self.unit * self.parts
        for arg in self.args:
            if arg.ctype.endswith("*"):
                s.pointer(arg.name, {"x": "int8", "weight": "uint8", "q8": "int8"}.get(arg.name, "float32"))
        s.share(str(self.columns // PANEL // self.unit), "unit")
        most, *fewer = ROWS[s.lanes]
        panel_bytes = self.pieces * PIECE // self.encoding.unit * self.offsets["bytes"]
        few = max(1, min(TILE, TILE_BYTES // panel_bytes) // self.halves // self.unit)
        many = ONE_ROW_TILE // self.unit
        tile = s.let(f"T.Select(rows == 1, {many}, {few})")
        half_apart = s.let(f"{tile} * {each}")
        results = s.local(max(many, few * most) * each * self.halves, s.f)
        with s.block(f"for step in T.serial(T.truncdiv(unit_last - unit_first + {tile} - 1, {tile})):"):
            first = s.let(f"unit_first + step * {tile}")
            count = s.let(f"T.min({tile}, unit_last - {first})")
            with s.block(f"for chunk in T.serial(T.truncdiv(rows + {most - 1}, {most})):"):
                row = s.let(f"chunk * {most}")
                size = s.let(f"T.min({most}, rows - {row})")
                with s.block(f"for i in T.serial({size} * {self.halves} * {half_apart}):"):
                    s(f"{results}[i] = {s.splat(0.0)}")
                for rows in (most, *fewer):
                    with s.block(f"if T.bitwise_and({size}, {rows}) != 0:"):
                        done = s.let(f"T.bitwise_and({size}, {-2 * rows})")
                        place = s.let(f"{done} * {self.halves} * {half_apart}")
                        block = _Block(rows, f"({row} + {done})", first, count, results, place, half_apart)
                        self._some_rows(block) if rows > 1 else self._one_row(block)
                with s.block(f"for r in T.serial({size}):"), s.block(f"for u in T.serial({count}):"):
                    start = s.let(f"r * {self.halves} * {half_apart} + u * {each}")
                    self._finish(results, start, half_apart, f"({row} + r)", f"({first} + u)")
        return s.text

    def _one_row(self, block: _Block) -> None:
        """The product of one row: several panels, far from each other, are as many streams from memory."""
        s, each_half = self.s, STREAMS // self.halves
        half, stream = f"T.truncdiv(number, {each_half})", f"T.truncmod(number, {each_half})"
        run = s.let(f"T.truncdiv({block.count} * {self.unit}, {each_half})")
        with s.block(f"for step in T.serial({run}):"):
            self._panels(block, STREAMS, half, f"{stream} * {run} + step")
        left = f"for p in T.serial({each_half} * {run}, {block.count} * {self.unit}):"
        with s.block(left), s.block(f"for h in T.serial({self.halves}):"):
            self._panels(block, 1, "h", "p")

    def _panels(self, block: _Block, panels: int, half: str, panel: str) -> None:
        """The product of one row with some panels. `half` and `panel`, of the tile, say which is `number`."""
        s = self.s
        sums = s.local(panels * self.parts, s.f)
        with s.block(f"for i in T.unroll({panels * self.parts}):"):
            s(f"{sums}[i] = {s.splat(0.0)}")
        with s.block(f"for piece in T.serial({self.pieces}):"), s.block(f"for number in T.unroll({panels}):"):
            index = f"({block.first} * {self.unit} + {panel} + {half} * {self.columns // PANEL})"
            self._add_piece(sums, "number", block.row, 1, index)
        with s.block(f"for number in T.unroll({panels}):"), s.block(f"for part in T.unroll({self.parts}):"):
            place = f"{block.place} + {half} * {block.half_apart} + ({panel}) * {self.parts} + part"
            s(f"{block.results}[{place}] = {sums}[number * {self.parts} + part]")

    def _some_rows(self, block: _Block) -> None:
        """The product of several rows. A stretch of their columns stays in the cache while a tile goes by."""
        s, vectors, stretch = self.s, block.rows * self.parts, X_BYTES // (PIECE * block.rows)
        with s.block(f"for stretch in T.serial({-(-self.pieces // stretch)}):"):
            last = s.let(f"T.min({self.pieces}, stretch * {stretch} + {stretch})")
            panels = f"for p in T.serial({block.count} * {self.unit}):"
            with s.block(f"for h in T.serial({self.halves}):"), s.block(panels):
                panel = s.let(f"{block.first} * {self.unit} + h * {self.columns // PANEL} + p")
                place = s.let(f"{block.place} + h * {block.half_apart} + p * {self.parts}")
                row = f"T.truncdiv(i, {self.parts}) * {self.halves} * {block.half_apart}"
                result = f"{block.results}[{place} + {row} + T.truncmod(i, {self.parts})]"
                sums = s.local(vectors, s.f)
                with s.block(f"for i in T.unroll({vectors}):"):
                    s(f"{sums}[i] = {result}")
                with s.block(f"for piece in T.serial(stretch * {stretch}, {last}):"):
                    self._add_piece(sums, "0", block.row, block.rows, panel)
                with s.block(f"for i in T.unroll({vectors}):"):
                    s(f"{result} = {sums}[i]")

    def _add_piece(self, sums: str, number: str, row: str, rows: int, panel: str) -> None:
        """sums += products of the columns of `piece` with one panel, for `rows` rows from `row` on.

        They are the `number`-th panel's in `sums` if there is one row, and all of it else.
        """
        s, at, each = self.s, self.offsets, self.encoding.unit // PIECE
        index = f"{panel} * {self.pieces // each} + T.truncdiv(piece, {each})"
        block = s.value("int32", f"({index}) * {at['bytes']}")
        words = s.value("int32", f"{block} + {at['pieces'] + at['codes']} + T.truncmod(piece, {each}) * {at['piece']}")
        if rows > 1:  # one stream from memory, so ask for what comes later
            share = at["bytes"] // each
            for line in range(0, share, 64):
                s.prefetch(f"WEIGHT[{block} + T.truncmod(piece, {each}) * {share} + {PREFETCH + line}]")
        with s.block(f"for part in T.unroll({self.parts}):"):
            codes = self._unpack(words) if rows > 1 else None
            with s.block(f"for r in T.unroll({rows}):"):
                x = f"({row} + r) * {q8_row_bytes(self.pieces * PIECE)}"
                total = s.value(s.i, s.whole(0))
                self._dot(total, x, words, codes)
                acc = f"{sums}[({number} + r) * {self.parts} + part]"
                s(f"{acc} = {self._scaled(total, x, block, acc)}")

    # --- codes --------------------------------------------------------------------------------------------------------

    def _words(self) -> tuple[int, list[tuple[str, str]]]:
        """How many loads a piece takes, and what load `j` holds: codes of its bytes, and their word's number."""
        if self.encoding.bits == 8:
            return 8, [("{}", "j")]
        low = f"T.bitwise_and({{}}, T.broadcast(T.uint8(15), {self.bytes}))"
        high = f"T.shift_right({{}}, T.broadcast(T.uint8(4), {self.bytes}))"
        return 4, [(low, "j"), (high, "j + 4")]

    def _load(self, words: str) -> str:
        return f"WEIGHT[{self.s.at(f'{words} + j * 64 + part * {self.bytes}', self.bytes)}]"

    def _unpack(self, words: str) -> str:
        """All codes of a piece, for rows to share."""
        s, (loads, parts) = self.s, self._words()
        codes = s.local(8, f"uint8x{self.bytes}")
        with s.block(f"for j in T.unroll({loads}):"):
            for code, word in parts:
                s(f"{codes}[{word}] = {code.format(self._load(words))}")
        return codes

    def _dot(self, total: str, x: str, words: str, codes: str | None) -> None:
        """total += the integer products of a piece, of unpacked codes or right from memory."""
        s = self.s
        loads, parts = (8, [("{}", "j")]) if codes else self._words()
        narrow = s.lanes == 8 and self.encoding.bits == 4  # products of all words add up in 16 bits
        pairs = s.value(f"int16x{2 * s.lanes}", f"T.broadcast(T.int16(0), {2 * s.lanes})") if narrow else ""
        with s.block(f"for j in T.unroll({loads}):"):
            source = f"{codes}[j]" if codes else self._load(words)
            for code, word in parts:
                values = code.format(source)
                four = f'T.reinterpret("int32", X[{s.at(f"{x} + piece * {PIECE} + ({word}) * 4", 4)}])'
                other = f'T.reinterpret("int8x{self.bytes}", T.broadcast({four}, {s.lanes}))'
                if narrow:
                    s(f"{pairs} = {pairs} + {self._pairs(values, other)}")
                else:
                    s(f"{total} = {self._add_products(total, values, other)}")
        if narrow:
            s(f"{total} = {self._sum_pairs(pairs)}")

    def _add_products(self, total: str, codes: str, x: str) -> str:
        """total + products of 4 neighbors; 8-bit codes give their sign to x."""
        s = self.s
        if s.lanes == 8:
            return f"{total} + {self._sum_pairs(self._pairs(codes, x))}"
        if self.encoding.bits == 8:
            signed = f'T.reinterpret("int8x{self.bytes}", {codes})'
            zero = f"T.broadcast(T.int8(0), {self.bytes})"
            x = f"T.Select({signed} < {zero}, {zero} - {x}, {x})"
            codes = s.intrinsic(f"int8x{self.bytes}", "llvm.abs", signed, "T.bool(False)")
        return s.intrinsic(s.i, "llvm.x86.avx512.vpdpbusd.512", total, codes, x)

    def _pairs(self, codes: str, x: str) -> str:
        """Products of 2 neighbors, as 16 bits."""
        s, kind = self.s, f"int8x{self.bytes}"
        if self.encoding.bits == 8:
            signed = f'T.reinterpret("{kind}", {codes})'
            x = s.intrinsic(kind, "llvm.x86.avx2.psign.b", x, signed)
            codes = s.intrinsic(kind, "llvm.abs", signed, "T.bool(False)")
        return s.intrinsic(f"int16x{2 * s.lanes}", "llvm.x86.avx2.pmadd.ub.sw", codes, x)

    def _sum_pairs(self, pairs: str) -> str:
        ones = f"T.broadcast(T.int16(1), {2 * self.s.lanes})"
        return self.s.intrinsic(self.s.i, "llvm.x86.avx2.pmadd.wd", pairs, ones)

    # --- floats -------------------------------------------------------------------------------------------------------

    def _scaled(self, total: str, x: str, block: str, acc: str) -> str:
        """acc + scale * (x_scale * total - zero * x_sum) + minimum * x_sum, as `add_group` of the C++ kernel."""
        s, columns = self.s, self.pieces * PIECE
        x_scale = self._x_float(f"{x} + {columns} + piece * 4")
        x_sum = self._x_float(f"{x} + {columns + columns // 8} + piece * 4")
        product = f'T.Cast("{s.f}", {total})'
        if self.encoding.zero:
            offset = f"{x_sum} * {s.splat(-float(self.encoding.zero))}"
            product = s.intrinsic(s.f, "llvm.fma", product, x_scale, offset)
        else:
            product = f"{product} * {x_scale}"
        acc = s.intrinsic(s.f, "llvm.fma", self._scale(block, "scale"), product, acc)
        if self.encoding.has_minimum:
            acc = s.intrinsic(s.f, "llvm.fma", self._scale(block, "minimum"), x_sum, acc)
        return acc

    def _x_float(self, at: str) -> str:
        return f'T.broadcast(T.reinterpret("float32", X[{self.s.at(at, 4)}]), {self.s.lanes})'

    def _scale(self, block: str, field: str) -> str:
        s, width = self.s, 4 if self.encoding.scale == "float32" else 2
        at = f"{block} + {self.offsets[field]} + part * {width * s.lanes}"
        stored = f"WEIGHT[{s.at(at, width * s.lanes)}]"
        if width == 4:
            return f'T.reinterpret("{s.f}", {stored})'
        return f'T.Cast("{s.f}", T.reinterpret("float16x{s.lanes}", {stored}))'

    def _finish(self, product: str, start: str, half_apart: str, row: str, unit: str) -> None:
        """Bias, epilogue and stores of one row of a unit, whose product is in an array from `start` on."""
        s, params, each = self.s, self.kernel.params, self.unit * self.parts
        results = s.local(each, s.f)
        with s.block(f"for v in T.unroll({each}):"):
            column = s.value("int32", f"{unit} * {PANEL * self.unit} + v * {s.lanes}")
            at = s.value("int32", f"{row} * {self.columns} + {column}")
            inputs = [s.vector(f"{product}[{start} + {half} * {half_apart} + v]") for half in range(self.halves)]
            if params["has_bias"]:
                inputs = [
                    s.vector(f"{value} + BIAS[{s.at(f'{column} + {half * self.columns}')}]")
                    for half, value in enumerate(inputs)
                ]
            for extra in range(1, 5):
                if kind := params[f"extra{extra}"]:
                    inputs.append(s.vector(f"EXTRA{extra}[{s.at(at if kind == 't' else column)}]"))
            epilogue = str(params["epilogue"])
            s(f"{results}[v] = {expression.write(s, epilogue, inputs) if epilogue else inputs[0]}")
            if params["float_out"]:
                s(f"OUT[{s.at(at)}] = {results}[v]")
        if params["q8_out"]:
            vectors = [f"{results}[{v}]" for v in range(each)]
            quantize_group(s, vectors, row, f"{unit} * {PANEL * self.unit}", self.columns)
