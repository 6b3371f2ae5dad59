"""Pattern rewriting: a rule is a pattern and a function from a match to its replacement; one walker applies a table of
them everywhere.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..runtime.errors import InternalError
from .ir import Cache, Graph, Op, Param, Value
from .pass_ import Outcome, Pass
from .pattern import Bound, Pattern, find, parse


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a matched op.

    A new op's output that has the name of an existing value takes that value's place, so results keep their names; the
    op that made it goes, so all of its results that are read must be replaced. `forward` maps other values' names to
    values that take their place. Ops that nothing reads afterwards vanish.
    """

    ops: tuple[Op, ...] = ()
    forward: Mapping[str, Value] | None = None
    params: tuple[Param, ...] = ()
    caches: tuple[Cache, ...] = ()


class Mismatch(Exception):
    """Why ops that match a pattern can't be replaced after all; the pass reports it, if its rule says of what."""


@dataclass(frozen=True)
class Match:
    """Ops and values that match a pattern."""

    op: Op
    """The op at the root."""
    work: Workspace
    bound: Bound

    def __getitem__(self, name: str) -> Value:
        """The value that a name is bound to."""
        value = self.bound[name]
        assert isinstance(value, Value)
        return value

    def rest(self, name: str) -> tuple[Value, ...]:
        """The values that `*name` is bound to."""
        values = self.bound[name]
        assert isinstance(values, tuple)
        return values

    def labeled(self, label: str) -> Op:
        """The op with a label."""
        op = self.bound[label]
        assert isinstance(op, Op)
        return op


@dataclass(frozen=True)
class Rule:
    """A line of a table of rules: ops of the pattern are replaced by what `build` makes of them."""

    pattern: str
    """See `pattern.py`."""
    becomes: str
    """For people: what that is."""
    build: Callable[[Match], Replacement | None]
    """None where the rule does not apply. Raises Mismatch where it nearly does."""
    failure: str = ""
    """What a mismatch means: "WHAT is not fused". Without it mismatches are not reported."""


class Rewriting(Pass):
    """A pass that is a table of rules."""

    @abstractmethod
    def rules(self) -> tuple[Rule, ...]:
        """The rules; for each op the first that applies is taken."""

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, self.rules())


class Workspace:
    """A graph under rewriting, with its def-use chains kept up to date."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._params = {param.value.name: param for param in graph.params}
        self._caches = list(graph.caches)
        self._outputs = list(graph.outputs)
        self._names = {value.name for value in graph.values()}
        self._ops: dict[int, Op] = {}
        self._rank: dict[int, float] = {}
        self._producer: dict[str, int] = {}
        self._users: dict[str, dict[int, None]] = {}
        self._next = 0
        for rank, op in enumerate(graph.ops):
            self._add(op, rank)
        self._drop_dead(list(self._ops))

    # --- what rules may ask -------------------------------------------------------------------------------------------

    def producer(self, value: Value, *kinds: str) -> Op | None:
        """The op that makes a value, if it is of one of the kinds (any if none is given)."""
        key = self._producer.get(value.name)
        op = self._ops[key] if key is not None else None
        return op if op is not None and (not kinds or op.kind in kinds) else None

    def users(self, value: Value) -> list[Op]:
        """The ops that read a value."""
        return [self._ops[key] for key in self._users.get(value.name, ())]

    def is_output(self, value: Value) -> bool:
        """Whether a value is an output of the graph."""
        return value in self._outputs

    def only_user(self, value: Value, *kinds: str) -> Op | None:
        """The one op that reads a value, if there is exactly one, of one of the kinds, and it is no graph output."""
        users = self.users(value)
        if len(users) != 1 or value in self._outputs or (kinds and users[0].kind not in kinds):
            return None
        return users[0]

    def param(self, value: Value) -> Param | None:
        """The parameter that a value is, if it is one."""
        return self._params.get(value.name)

    def fresh(self, hint: str) -> str:
        """A name that no value has."""
        name, number = hint, 0
        while name in self._names:
            number += 1
            name = f"{hint}_{number}"
        self._names.add(name)
        return name

    # --- changing -----------------------------------------------------------------------------------------------------

    def ops(self) -> Iterator[Op]:
        """The ops present now, and still present when their turn comes."""
        for key in list(self._ops):
            if key in self._ops:
                yield self._ops[key]

    def apply(self, replacement: Replacement) -> None:
        """Put new ops and values in the place of old ones."""
        forward = replacement.forward or {}
        gone = {self._producer[v.name] for op in replacement.ops for v in op.outputs if v.name in self._producer}
        rank = min((self._rank[key] for key in gone), default=0.0)
        stale = [self._producer[name] for name in forward if name in self._producer]
        self._params |= {param.value.name: param for param in replacement.params}
        self._caches += replacement.caches
        for name, value in forward.items():
            self._forward(name, value)
        stale += [key for old in gone for key in self._operands(old)]
        removed = [self._remove(key) for key in gone]
        for op in replacement.ops:
            self._add(op, rank)
        self._check_defined(removed)
        self._drop_dead(stale)

    def graph(self) -> Graph:
        """The graph as it is now, ops in an order that stays close to the original; unused parameters are gone."""
        ops = tuple(self._sorted())
        used = {value.name for op in ops for value in op.inputs} | {value.name for value in self._outputs}
        params = tuple(param for name, param in self._params.items() if name in used)
        return replace(self._graph, params=params, ops=ops, outputs=tuple(self._outputs), caches=tuple(self._caches))

    def _add(self, op: Op, rank: float) -> None:
        key, self._next = self._next, self._next + 1
        self._ops[key], self._rank[key] = op, rank
        for value in op.outputs:
            self._producer[value.name] = key
            self._names.add(value.name)
        for value in op.inputs:
            self._users.setdefault(value.name, {})[key] = None

    def _remove(self, key: int) -> Op:
        op = self._ops.pop(key)
        for value in op.inputs:
            self._users[value.name].pop(key, None)
        for value in op.outputs:
            self._producer.pop(value.name)
        return op

    def _forward(self, name: str, value: Value) -> None:
        """Let every reader of `name` read `value`. A graph output keeps its name: the new value takes it over."""
        old = next((output for output in self._outputs if output.name == name), None)
        for key in list(self._users.get(name, ())):
            self._set_inputs(key, {name: value})
        if old is None:
            return
        producer = self.producer(value)
        if producer is None or value in self._outputs:
            self._outputs = [value if output == old else output for output in self._outputs]
            return
        self._rename(value, old)

    def _rename(self, value: Value, old: Value) -> None:
        """Give the name of an output, whose producer is about to go, to another op's result."""
        for user in list(self._users.get(value.name, ())):
            self._set_inputs(user, {value.name: old})
        spare = Value(self.fresh(old.name), old.type)
        self._set_output(self._producer[old.name], old, spare)
        self._set_output(self._producer[value.name], value, old)

    def _set_output(self, key: int, value: Value, new: Value) -> None:
        op = self._ops[key]
        self._ops[key] = replace(op, outputs=tuple(new if output == value else output for output in op.outputs))
        self._producer.pop(value.name)
        self._producer[new.name] = key

    def _set_inputs(self, key: int, change: Mapping[str, Value]) -> None:
        op = self._ops[key]
        for value in op.inputs:
            self._users[value.name].pop(key, None)
        op = replace(op, inputs=tuple(change.get(value.name, value) for value in op.inputs))
        self._ops[key] = op
        for value in op.inputs:
            self._users.setdefault(value.name, {})[key] = None

    def _check_defined(self, removed: list[Op]) -> None:
        for op in removed:
            for value in op.outputs:
                wanted = self._users.get(value.name) or value in self._outputs
                if wanted and value.name not in self._producer:
                    raise InternalError(f"a rule removed {op.kind} %{value.name}, which is still read")

    def _drop_dead(self, candidates: list[int]) -> None:
        """Remove those ops that nothing reads, and then what only they read."""
        while candidates:
            key = candidates.pop()
            outputs = self._ops[key].outputs if key in self._ops else ()
            if outputs and not any(self._users.get(value.name) or value in self._outputs for value in outputs):
                candidates += self._operands(key)
                self._remove(key)

    def _operands(self, key: int) -> list[int]:
        """The ops that make an op's inputs."""
        return [self._producer[value.name] for value in self._ops[key].inputs if value.name in self._producer]

    def _sorted(self) -> Iterator[Op]:
        """Ops in topological order, the earliest rank first among those that are ready."""
        waiting = {key: len(set(self._operands(key))) for key in self._ops}
        ready = [(self._rank[key], key) for key, count in waiting.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, key = heapq.heappop(ready)
            yield self._ops[key]
            for user in {user for value in self._ops[key].outputs for user in self._users.get(value.name, ())}:
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, (self._rank[user], user))


def rewrite(graph: Graph, rules: Sequence[Rule]) -> Outcome:
    """Apply rules until none matches. Dead ops vanish too. Notes are the mismatches that are left in the end."""
    work = Workspace(graph)
    table = [(parse(rule.pattern), rule) for rule in rules]
    matches, limit = 0, 100 * len(graph.ops) + 100
    changed = True
    while changed:
        changed = False
        notes: dict[str, None] = {}
        for op in work.ops():
            replacement = _first(op, work, table, notes)
            if replacement is None:
                continue
            work.apply(replacement)
            changed, matches = True, matches + 1
            if matches > limit:
                raise InternalError(f"rewriting does not end: a rule for {op.kind} keeps matching")
    return Outcome(work.graph(), matches, tuple(notes))


def _first(
    op: Op, work: Workspace, table: Sequence[tuple[Pattern, Rule]], notes: dict[str, None]
) -> Replacement | None:
    """What the first rule that applies makes of an op."""
    for pattern, rule in table:
        for bound in find(pattern, op, work):
            try:
                replacement = rule.build(Match(op, work, bound))
            except Mismatch as reason:
                if rule.failure:
                    notes.setdefault(f"{op.source.module or op.outputs[0].name}: {rule.failure}: {reason}")
                continue
            if replacement is not None:
                return replacement
    return None
