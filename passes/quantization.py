"""How weights are to be stored: names and YAML recipes, both lists of rules of which the first that applies decides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import yaml

from ..runtime.encodings import BFLOAT16, FLOAT16, FLOAT32, Encoding, FloatName
from ..runtime.errors import UserError

Role = Literal["embedding", "head", "linear"]
"""What a matrix is for. A tied one is both `embedding` and `head`; `linear` is every linear layer but the head."""
ROLES: tuple[Role, ...] = get_args(Role)

KEEP, NONE = "keep", "none"
FLOATS: Mapping[str, Encoding] = {
    "fp32": FLOAT32,
    "fp16": FLOAT16,
    "bf16": BFLOAT16,
    "float32": FLOAT32,
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
}
FLOAT8 = Encoding("affine", bits=8, group=128, scale="float32", levels="e4m3")
GROUPS = (32, 64, 128)
ENCODINGS_HELP = (
    "keep (as in the checkpoint), none (the --dtype), fp32, fp16, bf16, fp8 (on GPUs), or int8, int6, int5, int4, with "
    "groups of 64 or 128 columns as -g64 or -g128 and a minimum for each group as -asym: int4-g64-asym, say"
)
_INTEGER = re.compile(r"int([4568])(?:-g(\d+))?(-asym)?")


def parse_encoding(name: str) -> Encoding:
    """The encoding that a name such as `bf16`, `int8` or `int4-g64-asym` stands for. Raises ValueError if none."""
    if name in FLOATS:
        return FLOATS[name]
    if name == "fp8":
        return FLOAT8
    match = _INTEGER.fullmatch(name)
    group = int(match[2] or GROUPS[0]) if match else 0
    if match is None or group not in GROUPS:
        raise ValueError(f"expected {ENCODINGS_HELP}; found {name!r}")
    bits, minimum = int(match[1]), match[3] is not None
    zero = 0 if bits == 8 or minimum else 1 << (bits - 1)
    return Encoding("affine", bits=bits, group=group, zero=zero, has_minimum=minimum)


@dataclass(frozen=True)
class Rule:
    """Weights of one of the roles whose checkpoint name contains a match of the expression get the encoding."""

    encoding: str
    match: str = ""
    roles: frozenset[Role] = frozenset(ROLES)
    where: str = ""
    """Where the user wrote it; "" for a preset's."""

    def applies(self, tensor: str, roles: Set[Role]) -> bool:
        """Whether it decides about a tensor that has these roles."""
        return bool(self.roles & roles) and re.search(self.match, tensor) is not None


@dataclass(frozen=True)
class Quantization:
    """The first rule that applies decides; a weight without one is kept as the checkpoint has it."""

    rules: tuple[Rule, ...] = ()
    dtype: FloatName = "float32"
    """What `none` means."""

    @staticmethod
    def parse(text: str, dtype: FloatName = "float32") -> Quantization:
        """From an encoding's name, or the path of a YAML recipe: a list of rules with `encoding`, `match` and `role`.

        A name is for all matrices, except that embedding tables and the output head lose more by rounding than linear
        layers and have at least 8 bits. Raises UserError for anything else.
        """
        path = Path(text)
        if path.suffix in (".yaml", ".yml"):
            return Quantization(tuple(_read_rules(path)), dtype)
        _check_name(text, "--quant", "; or the path of a .yaml recipe")
        tables = () if text in (KEEP, NONE) or parse_encoding(text).bits in (0, 8) else (_TABLES,)
        return Quantization((*tables, Rule(text)), dtype)

    def rule(self, tensor: str, roles: Set[Role]) -> Rule | None:
        """The rule that decides about a checkpoint tensor."""
        return next((rule for rule in self.rules if rule.applies(tensor, roles)), None)


_TABLES = Rule("int8", roles=frozenset(("embedding", "head")))


def _check_name(name: object, where: str, more: str = "") -> str:
    if name in (KEEP, NONE):
        return str(name)
    try:
        parse_encoding(str(name))
    except ValueError:
        raise UserError(f"{where} expects {ENCODINGS_HELP}{more}; found {name!r}") from None
    return str(name)


# --- recipes ----------------------------------------------------------------------------------------------------------


def _read_rules(path: Path) -> Iterator[Rule]:
    try:
        entries = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"can't read the recipe {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list):
        raise UserError(
            f"{path} must be a list of rules such as `- {{match: down_proj, encoding: int8}}`, found "
            f"{type(entries).__name__}"
        )
    for number, entry in enumerate(entries, 1):
        yield _rule(entry, f"rule {number} of {path.name}")


def _rule(entry: object, where: str) -> Rule:
    known = {"encoding", "match", "role"}
    if not isinstance(entry, dict) or "encoding" not in entry or not entry.keys() <= known:
        raise UserError(f"{where} must have `encoding`, and may have `match` and `role`, found {entry!r}")
    match = entry.get("match", "")
    try:
        re.compile(match)
    except (re.error, TypeError) as error:
        raise UserError(f"{where} has match {match!r}, which is no regular expression: {error}") from None
    roles = entry.get("role", list(ROLES))
    listed = roles if isinstance(roles, list) else [roles]
    if not listed or not all(role in ROLES for role in listed):
        raise UserError(f"{where} has role {roles!r}, expected {', '.join(ROLES)} or a list of these")
    return Rule(_check_name(entry["encoding"], f"encoding of {where}"), match, frozenset(listed), where)
