"""The text of a TIR function, written line by line, and the vector operations that kernels are made of.

What `cpu/simd.h.j2` is for the C++ templates this is for TVM: a vector has `lanes` floats, operations are methods that
write a line and return the name of its result, and each rounds as its C++ twin does, so that both generators give the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...runtime.plan import IsaName
from ..catalog import ArgSpec

SIGN = -(1 << 31)

_TYPES = {"int32_t": "T.int32", "float": "T.float32"}


class Script:
    """Writes one TIR function. Arguments have their names in small letters, and results are `v0`, `v1`, ..."""

    def __init__(self, name: str, args: Sequence[ArgSpec], isa: IsaName) -> None:
        self.isa = isa
        self.lanes = 16 if isa == "x86-64-v4" else 8
        self._lines: list[str] = []
        self._depth = 0
        self._count = 0
        params = ", ".join([*(f"{arg.name.lower()}: {_type(arg)}" for arg in args), "tid: T.int32", "threads: T.int32"])
        self("@I.ir_module")
        self("class Module:")
        self._depth += 1
        self("@T.prim_func(s_tir=True)")
        self(f"def {name}({params}):")
        self._depth += 1
        self(f'T.func_attr({{"global_symbol": "{name}", "tirx.noalias": True}})')

    @property
    def text(self) -> str:
        """The whole function."""
        return "\n".join(self._lines) + "\n"

    def __call__(self, line: str) -> None:
        """Write a line."""
        self._lines.append("    " * self._depth + line)

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        """What is written inside is the body of a loop or condition."""
        self(header)
        self._depth += 1
        yield
        self._depth -= 1

    # --- names and types ----------------------------------------------------------------------------------------------

    @property
    def f(self) -> str:
        """Type of a vector of floats."""
        return f"float32x{self.lanes}"

    @property
    def i(self) -> str:
        """Type of a vector of as many integers."""
        return f"int32x{self.lanes}"

    def let(self, value: str) -> str:
        """The name of an integer."""
        name = self._name()
        self(f"{name}: T.let[T.int32] = {value}")
        return name

    def value(self, kind: str, value: str) -> str:
        """A name for a value of any type, a register in the end.

        No `T.let`: TVM puts what it binds in place of the name, again and again, in time that doubles with each.
        """
        name = self.local(1, kind)
        self(f"{name}[0] = {value}")
        return f"{name}[0]"

    def vector(self, value: str) -> str:
        """A name for a vector of floats."""
        return self.value(self.f, value)

    def local(self, count: int, kind: str) -> str:
        """The name of a local array, which becomes registers where every index is a constant."""
        name = self._name()
        self(f'{name} = T.alloc_buffer(({count},), "{kind}", scope="local")')
        return name

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count - 1}"

    def pointer(self, name: str, kind: str) -> None:
        """Make an argument a buffer that can be indexed, under its name in capitals."""
        self(f'{name.upper()} = T.decl_buffer((1,), "{kind}", data={name})')

    def share(self, total: str, name: str) -> None:
        """`NAME_first` and `NAME_last`: this thread's part of `total` items, as in `cpu/loops.h.j2`."""
        for end, index in (("first", "tid"), ("last", "tid + 1")):
            items = f'T.Cast("int64", {total}) * T.Cast("int64", {index})'
            self(f'{name}_{end}: T.let[T.int32] = T.Cast("int32", T.truncdiv({items}, T.Cast("int64", threads)))')

    def prefetch(self, element: str) -> None:
        """Ask for the cache line of an element, which need not exist."""
        self(f'T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of({element}), 0, 3, 1))')

    # --- vectors ------------------------------------------------------------------------------------------------------

    def at(self, index: str | int, lanes: int = 0) -> str:
        """An index of consecutive elements."""
        return f"T.ramp({index}, 1, {lanes or self.lanes})"

    def splat(self, value: str | float) -> str:
        """A vector of equal floats."""
        return f"T.broadcast({_number(value) if isinstance(value, int | float) else value}, {self.lanes})"

    def whole(self, value: int) -> str:
        """A vector of equal integers."""
        return f"T.broadcast(T.int32({value}), {self.lanes})"

    def intrinsic(self, kind: str, name: str, *args: str) -> str:
        """A call of an LLVM intrinsic; `kind` is its result's type."""
        return f'T.call_llvm_pure_intrin("{kind}", "{name}", {", ".join(args)})'

    def fma(self, a: str, b: str, c: str) -> str:
        """a * b + c, rounded once."""
        return self.vector(self.intrinsic(self.f, "llvm.fma", a, b, c))

    def fnma(self, a: str, b: str, c: str) -> str:
        """c - a * b, rounded once."""
        return self.fma(f"{a} * {self.splat(-1.0)}", b, c)

    def bits(self, x: str) -> str:
        """The bits of floats as integers."""
        return f'T.reinterpret("{self.i}", {x})'

    def floats(self, x: str) -> str:
        """The floats of integer bits."""
        return f'T.reinterpret("{self.f}", {x})'

    def maximum(self, a: str, b: str) -> str:
        """The larger one, `b` if either is NaN."""
        return self.vector(f"T.Select({a} > {b}, {a}, {b})")

    def minimum(self, a: str, b: str) -> str:
        """The smaller one, `b` if either is NaN."""
        return self.vector(f"T.Select({a} < {b}, {a}, {b})")

    def is_nan(self, x: str) -> str:
        """A condition."""
        return f"T.bitwise_and({self.bits(x)}, {self.whole(0x7FFFFFFF)}) > {self.whole(0x7F800000)}"

    def round(self, x: str) -> str:
        """The nearest whole number, ties to even."""
        return self.vector(self.intrinsic(self.f, "llvm.roundeven", x))

    def to_int(self, x: str) -> str:
        """Whole floats as integers; NaN gives the least integer."""
        if self.lanes == 8:
            return self.value(self.i, self.intrinsic(self.i, "llvm.x86.avx.cvt.ps2dq.256", x))
        mask, rounding = 'T.Cast("uint16", 65535)', "T.int32(4)"
        convert = self.intrinsic(self.i, "llvm.x86.avx512.mask.cvtps2dq.512", x, self.whole(0), mask, rounding)
        return self.value(self.i, convert)

    def absolute(self, x: str) -> str:
        """Without the sign."""
        return self.vector(self.floats(f"T.bitwise_and({self.bits(x)}, {self.whole(0x7FFFFFFF)})"))

    def with_sign(self, magnitude: str, sign: str) -> str:
        """A magnitude with the sign of another number."""
        bit = f"T.bitwise_and({self.bits(sign)}, {self.whole(SIGN)})"
        return self.vector(self.floats(f"T.bitwise_or({self.bits(magnitude)}, {bit})"))

    def scale2(self, x: str, n: str) -> str:
        """x * 2^n for whole n in [-252, 252]."""
        if self.lanes == 16:
            mask = 'T.Cast("uint16", 65535)'
            name = "llvm.x86.avx512.mask.scalef.ps.512"
            return self.vector(self.intrinsic(self.f, name, x, n, self.splat(0.0), mask, "T.int32(4)"))
        power, one = self.to_int(n), self.whole(1)
        half = self.value(self.i, f"T.shift_right({power}, {one})")
        for part in (half, f"({power} - {half})"):
            x = self.vector(f"{x} * {self.floats(f'T.shift_left({part} + {self.whole(127)}, {self.whole(23)})')}")
        return x

    def polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        """Horner's scheme, highest power first."""
        result = self.splat(coefficients[0])
        for value in coefficients[1:]:
            result = self.fma(result, x, self.splat(value))
        return result


def _type(arg: ArgSpec) -> str:
    if not arg.ctype.endswith("*"):
        return _TYPES[arg.ctype]
    return 'T.handle("float32")' if "float" in arg.ctype else 'T.handle("uint8")'


def _number(value: float) -> str:
    return f"T.float32({value!r})" if math.isfinite(value) else f'T.float32("{value!r}")'
