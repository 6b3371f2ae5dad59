"""What a step reads and computes, against sums over the model's shapes and masks."""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cli.workload import StepSize, named_args, work
from toolkit.kernels_templates.packing import q8_row_bytes
from toolkit.runtime.errors import UserError
from toolkit.runtime.load import read_plan
from toolkit.runtime.plan import DimArg, Launch, Plan, WeightArg

SIZES = st.builds(
    lambda batch, tokens, past: StepSize(batch, tokens, tokens + past),
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(0, 200),
)


def launches_of(plan: Plan, family: str) -> list[Launch]:
    return [launch for launch in plan.buckets[0].launches if plan.kernels[launch.kernel].family == family]


@given(size=SIZES)
def test_linear_layers_read_weights_once_and_multiply_every_row(llama_plan: Path, size: StepSize) -> None:
    plan = read_plan(llama_plan)
    linear = launches_of(plan, "linear")
    assert len(linear) == 4 * 4 + 1
    assert sum(DimArg("R") in launch.args for launch in linear) == 4  # from the last layer's attention on
    for launch in linear:
        (weight,) = (plan.weights[arg.name] for arg in launch.args if isinstance(arg, WeightArg))
        rows = size.batch if DimArg("R") in launch.args else size.batch * size.tokens
        found = work(plan, launch, size)
        assert found.flops == 2 * rows * prod(weight.shape)
        params = plan.kernels[launch.kernel].params
        extras = 4 * weight.shape[0] * rows * sum(params[f"extra{number}"] == "t" for number in range(1, 5))
        assert found.bytes == weight.bytes + rows * q8_row_bytes(weight.shape[1]) + extras


@given(size=SIZES)
def test_attention_reads_what_its_mask_shows(gemma_plan: Path, size: StepSize) -> None:
    plan = read_plan(gemma_plan)
    for layer, launch in enumerate(launches_of(plan, "attention")):
        positions = np.arange(size.context)
        distance = positions[-size.tokens :, None] - positions[None]
        mask = (distance >= 0) & (distance < (size.context if layer in (2, 4) else 20))
        found = work(plan, launch, size)
        assert found.flops == size.batch * mask.sum() * 4 * (16 + 16) * 2  # heads, dims, multiply and add
        queries = size.rows * 4 * 16 * 4
        assert found.bytes - queries == size.batch * mask.any(axis=0).sum() * 2 * (16 + 16) * 4


def test_a_token_of_a_short_context_costs_what_the_plan_says(llama_plan: Path) -> None:
    plan = read_plan(llama_plan)
    program = plan.buckets[0].launches
    needs = [work(plan, launch, StepSize(1, 1, 1)) for launch in program]
    assert sum(need.bytes for need in needs) == sum(launch.bytes for launch in program) + plan.kv_bytes_per_token
    assert [need.flops for need in needs if need.flops] == [
        launch.flops or 4 * 4 * (16 + 16) // 2 for launch in program if launch.flops or "attention" in launch.op
    ]


def test_arguments_have_the_catalogs_names(llama_plan: Path) -> None:
    plan = read_plan(llama_plan)
    (head,) = (launch for launch in plan.buckets[0].launches if launch.op == "linear:lm_head")
    assert [spec.name for spec, _ in named_args(plan, head)] == ["x", "weight", "out", "rows", "N", "K"]


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (StepSize(9), "at most 512 tokens and 8 sequences"),
        (StepSize(1, 5, 4), "5 to 256"),
        (StepSize(1, 1, 257), "256"),
    ],
)
def test_steps_that_no_bucket_runs_are_refused(llama_plan: Path, size: StepSize, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        size.of(read_plan(llama_plan)).bucket(read_plan(llama_plan))


@pytest.mark.parametrize(
    ("size", "context"), [(StepSize(), 128), (StepSize(2, 200), 200), (StepSize(1, 1, 7), 7), (StepSize(1, 9), 128)]
)
def test_a_context_is_chosen_where_none_is_given(llama_plan: Path, size: StepSize, context: int) -> None:
    plan = read_plan(llama_plan)
    assert size.of(plan) == StepSize(size.batch, size.tokens, context)
    short = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, max_context=50))
    assert StepSize().of(short).context == 50
