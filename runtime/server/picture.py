"""A plan as the built-in page draws it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..layers import split_layers
from ..plan import Launch, Plan, WeightArg


def plan_picture(plan: Plan) -> dict[str, Any]:
    """What the page draws of a plan: the launches of its smallest step by layer, layers that are alike once, and the
    weights by encoding."""
    program = plan.buckets[0].launches
    encodings: dict[str, list[int]] = defaultdict(list)
    for weight in plan.weights.values():
        encodings[weight.encoding.name].append(weight.bytes)
    return {
        "graph": [
            {
                "name": part.name,
                "layers": part.layers,
                "ops": [_op(plan, program[index]) for index in part.launches[0]],
            }
            for part in split_layers(plan, program)
        ],
        "weights": [
            {"encoding": name, "tensors": len(sizes), "bytes": sum(sizes)}
            for name, sizes in sorted(encodings.items(), key=lambda item: -sum(item[1]))
        ],
    }


def _op(plan: Plan, launch: Launch) -> dict[str, Any]:
    read = {arg.name for arg in launch.args if isinstance(arg, WeightArg)}
    return {
        "op": launch.op,
        "family": plan.kernels[launch.kernel].family,
        "bytes": sum(plan.weights[name].bytes for name in read),
    }
