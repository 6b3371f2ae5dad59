"""Greedy tokens of a plan against Hugging Face's float32 implementation on the file's dequantized weights.

    quality.py MODEL.gguf PLAN [--tokens N] [--alternatives N]

Transformers reads the file by its own code. The logprob rule: at the first token that differs, each side's token must
be among the other's N most likely. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from toolkit import LLM, SamplingParams

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "To make a good cup of coffee, first",
)


def reference(model_path: Path, prompts: list[list[int]], tokens: int, alternatives: int) -> list[list[list[int]]]:
    """For each prompt and output position the `alternatives` most likely tokens, following the first of them."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    ).eval()
    results = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        results.append([logits[0].topk(alternatives).indices.tolist() for logits in output.logits])
    return results


def follows(ours: list[tuple[int, list[int]]], theirs: list[list[int]]) -> tuple[bool, int]:
    """Whether the rule holds, and how many tokens agree before the first difference."""
    for position, ((token, likely), expected) in enumerate(zip(ours, theirs, strict=True)):
        if token != expected[0]:
            return token in expected and expected[0] in likely, position
    return True, len(theirs)


def main() -> None:
    """Print how many prompts follow the reference."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--alternatives", type=int, default=5)
    args = parser.parse_args()
    params = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, logprobs=args.alternatives, skip_special_tokens=False
    )
    with LLM(args.plan, memory=4e9) as llm:
        outputs = llm.generate(list(PROMPTS), params)
    ours = []
    for output in outputs:
        assert output.logprobs is not None
        ours.append([(next(iter(table)), list(table)) for table in output.logprobs])
    theirs = reference(args.model, [output.prompt_token_ids for output in outputs], args.tokens, args.alternatives)
    verdicts = [follows(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    print(
        json.dumps(
            {
                "prompts": len(verdicts),
                "exact": sum(count == args.tokens for _, count in verdicts),
                "agree": sum(good for good, _ in verdicts),
                "agreeing_tokens": [count for _, count in verdicts],
            }
        )
    )


if __name__ == "__main__":
    main()
