"""How many K/V pages fit: memory less what the plan needs otherwise."""

from __future__ import annotations

import math

from ..errors import UserError
from ..plan import Plan


def plan_pages(plan: Plan, budget: int, own: int = 0) -> tuple[int, ...]:
    """Pages of each cache group within `budget` bytes for everything the plan needs and `own` of the process itself;
    page 0 is the trash page.

    No group gets more than every sequence at full length could use. Raises UserError, saying what would fit, if not
    even one full-length sequence does.
    """
    fixed = plan.memory.arena + plan.memory.weights + plan.memory.host + own
    full = [-(-plan.model.max_context // cache.page_tokens) for cache in plan.caches]
    costs = [len(cache.layers) * cache.page_bytes for cache in plan.caches]
    one = sum(pages * cost for pages, cost in zip(full, costs, strict=True))
    spare = budget - fixed - sum(costs)
    if spare < one:
        raise UserError(
            f"the plan needs {mib(fixed)} for weights and activations{_own(own)} and {mib(one + sum(costs))} for one "
            f"sequence of {plan.model.max_context} tokens, but the memory limit is {mib(budget)}: raise --memory, or "
            f"compile with {_smaller(plan, spare, one)}"
        )
    share = min(spare / one, plan.max_batch) if one else 1
    return tuple(int(pages * share) + 1 for pages in full)


def _own(own: int) -> str:
    return f" ({mib(own)} of it for the process itself)" if own else ""


def _smaller(plan: Plan, spare: int, one: int) -> str:
    """What of the plan could be smaller, so that it fits."""
    fits = int(spare / plan.kv_bytes_per_token) if plan.caches else 0
    choices = [f"--max-context {fits}"] if fits > 0 else []
    if spare + plan.memory.arena * (1 - 1 / plan.max_batch) > one:
        choices.append("a smaller --max-batch")
    count = sum(math.prod(weight.shape) for weight in plan.weights.values())
    for bits, name in ((8.5, "int8"), (4.5, "int4")):
        saved = plan.memory.weights - int(count * bits / 8)
        if saved > 0 and spare + saved >= one:
            return " or ".join([*choices, f"--quant {name}"])
    return " or ".join([*choices, "fewer bits a weight"])


def mib(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 2**20:,.0f} MiB"
