"""Which passes run, in which order: the only registry of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..compiler.pass_ import Pass
from ..compiler.targets import Target
from ..runtime.encodings import Encoding
from ..runtime.errors import UserError
from .add_norm import FuseAddNorm
from .canonicalize import Canonicalize
from .common_subexpressions import CommonSubexpressions
from .drop_unused import DropUnused
from .early_rows import EarlyRows
from .fold_constants import FoldConstants
from .fuse_pointwise import FusePointwise
from .fuse_reductions import FuseReductions
from .insert_caches import InsertCaches
from .linear_epilogue import FuseLinearEpilogue
from .merge_linear import MergeLinear
from .quantization import Quantization
from .quantize_weights import QuantizeWeights
from .reassociate import Reassociate
from .rope_kv_write import FuseRopeKvWrite
from .split_linear import SplitLinear

LEVELS: Mapping[int, str] = {
    0: "only what lowering needs",
    1: "also simplify",
    2: "also fuse: the same arithmetic in fewer launches",
    3: "also reorder: arithmetic moves to where there is less of it, and numbers change by rounding",
}
"""What each level of optimization does."""
EncodingOf = Callable[[str], Encoding]
"""How the checkpoint stores a tensor, by name."""


def pipeline(target: Target, *, quant: Quantization, encoding_of: EncodingOf, level: int = 3) -> tuple[Pass, ...]:
    """The passes from a captured graph to one that `target` can lower, at a level of `LEVELS`.

    Raises UserError for any other level.
    """
    if level not in LEVELS:
        raise UserError(f"-O expects a level from {min(LEVELS)} to {max(LEVELS)}, found {level}")
    return (
        *((Canonicalize(), FoldConstants(), CommonSubexpressions()) if level >= 1 else ()),
        *((Reassociate(), EarlyRows()) if level >= 3 else ()),
        QuantizeWeights(quant),
        InsertCaches(),
        *(FUSIONS[target.kind](encoding_of) if level >= 2 else ()),
        DropUnused(),
    )


def _fuse(encoding_of: EncodingOf) -> tuple[Pass, ...]:
    """An addition goes to the norm behind it rather than to the linear layer before it, since the norm's kernel can
    also quantize its result on CPU, and reads the sum anyway on a GPU.
    """
    return (
        SplitLinear(),
        MergeLinear(encoding_of),
        Canonicalize(),
        FuseRopeKvWrite(),
        FuseAddNorm(),
        FusePointwise(),
        FuseLinearEpilogue(),
        FuseReductions(),
    )


FUSIONS: Mapping[str, Callable[[EncodingOf], tuple[Pass, ...]]] = {"cpu": _fuse, "cuda": _fuse}
"""Kind of target to its fusions."""
