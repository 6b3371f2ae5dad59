"""Pattern rewriting: rules are small functions from an op to its replacement; one walker applies them everywhere."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..runtime.errors import InternalError
from .ir import Graph, Op, Param, Value
from .pass_ import Outcome


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a matched op.

    A new op's output that has the name of an existing value takes that value's place, so results keep their names; the
    old op must go with it (all its outputs are replaced, or it is the match). `forward` maps other values' names to
    values that take their place. Ops that nothing reads afterwards vanish.
    """

    ops: tuple[Op, ...] = ()
    forward: Mapping[str, Value] | None = None
    params: tuple[Param, ...] = ()


Rule = Callable[[Op, "Workspace"], Replacement | None]
"""Looks at an op and what surrounds it; None where it does not apply."""


class Workspace:
    """A graph under rewriting, with its def-use chains kept up to date."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._params = {param.value.name: param for param in graph.params}
        self._outputs = list(graph.outputs)
        self._names = {value.name for value in graph.values()}
        self._ops: dict[int, Op] = {}
        self._rank: dict[int, float] = {}
        self._producer: dict[str, int] = {}
        self._users: dict[str, dict[int, None]] = {}
        self._next = 0
        self.notes: dict[str, None] = {}
        for rank, op in enumerate(graph.ops):
            self._add(op, rank)
        for op in graph.ops:
            self._drop_if_dead(op)

    # --- what rules may ask -------------------------------------------------------------------------------------------

    def producer(self, value: Value, *kinds: str) -> Op | None:
        """The op that makes a value, if it is of one of the kinds (any if none is given)."""
        key = self._producer.get(value.name)
        op = self._ops[key] if key is not None else None
        return op if op is not None and (not kinds or op.kind in kinds) else None

    def users(self, value: Value) -> list[Op]:
        """The ops that read a value."""
        return [self._ops[key] for key in self._users.get(value.name, ())]

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

    def note(self, text: str) -> None:
        """Report something that could not be done, once."""
        self.notes.setdefault(text)

    # --- changing -----------------------------------------------------------------------------------------------------

    def ops(self) -> Iterator[Op]:
        """The ops present now, and still present when their turn comes."""
        for key in list(self._ops):
            if key in self._ops:
                yield self._ops[key]

    def apply(self, root: Op, replacement: Replacement) -> None:
        """Put the replacement in the place of `root`."""
        new_names = {value.name for op in replacement.ops for value in op.outputs}
        gone = {self._producer[name] for name in new_names if name in self._producer} | {self._key(root)}
        rank = min(self._rank[key] for key in gone)
        for param in replacement.params:
            self._params[param.value.name] = param
        for name, value in (replacement.forward or {}).items():
            self._forward(name, value)
        operands = [value for key in gone for value in self._ops[key].inputs]
        removed = [self._remove(key) for key in gone]
        for op in replacement.ops:
            self._add(op, rank)
        self._check_defined(removed)
        for value in operands:
            if (producer := self.producer(value)) is not None:
                self._drop_if_dead(producer)

    def graph(self) -> Graph:
        """The graph as it is now, ops in an order that stays close to the original; unused parameters are gone."""
        ops = tuple(self._sorted())
        used = {value.name for op in ops for value in op.inputs} | {value.name for value in self._outputs}
        params = tuple(param for name, param in self._params.items() if name in used)
        return replace(self._graph, params=params, ops=ops, outputs=tuple(self._outputs))

    def _key(self, op: Op) -> int:
        return self._producer[op.outputs[0].name]

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
        self._rename(self._key(producer), value, old)

    def _rename(self, key: int, value: Value, old: Value) -> None:
        """Give the name of an output, whose producer is about to go, to another op's result."""
        for user in list(self._users.get(value.name, ())):
            self._set_inputs(user, {value.name: old})
        op = self._ops[key]
        self._ops[key] = replace(op, outputs=tuple(old if output == value else output for output in op.outputs))
        stale = self._ops[self._producer[old.name]]
        spare = Value(self.fresh(old.name), old.type)
        self._ops[self._producer[old.name]] = replace(
            stale, outputs=tuple(spare if output == old else output for output in stale.outputs)
        )
        self._producer[spare.name] = self._producer[old.name]
        self._producer[old.name] = key
        self._producer.pop(value.name)

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

    def _drop_if_dead(self, op: Op) -> None:
        stack = [op]
        while stack:
            op = stack.pop()
            key = self._producer.get(op.outputs[0].name)
            if key is None or any(self._users.get(value.name) or value in self._outputs for value in op.outputs):
                continue
            self._remove(key)
            stack += [producer for value in op.inputs if (producer := self.producer(value)) is not None]

    def _sorted(self) -> Iterator[Op]:
        """Ops in topological order, the earliest rank first among those that are ready."""
        waiting = {
            key: len({self._producer[value.name] for value in op.inputs if value.name in self._producer})
            for key, op in self._ops.items()
        }
        ready = [(self._rank[key], key) for key, count in waiting.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, key = heapq.heappop(ready)
            yield self._ops[key]
            for user in {user for value in self._ops[key].outputs for user in self._users.get(value.name, ())}:
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, (self._rank[user], user))


ANY = "*"
"""Stands for every op kind in a table of rules."""


def rewrite(graph: Graph, rules: Mapping[str, Rule]) -> Outcome:
    """Apply rules, a table from op kind to rule, until none matches. Dead ops vanish too."""
    work = Workspace(graph)
    matches, limit = 0, 100 * len(graph.ops) + 100
    changed = True
    while changed:
        changed = False
        for op in work.ops():
            rule = rules.get(op.kind) or rules.get(ANY)
            replacement = rule(op, work) if rule is not None else None
            if replacement is None:
                continue
            work.apply(op, replacement)
            changed, matches = True, matches + 1
            if matches > limit:
                raise InternalError(f"rewriting does not end: a rule for {op.kind} keeps matching")
    return Outcome(work.graph(), matches, tuple(work.notes))
