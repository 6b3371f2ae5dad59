"""What a CPU plan says to some texts, for `test_text.py`: `make_reference.py CPU_PLAN OUT.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from toolkit.runtime.llm import LLM
from toolkit.runtime.prompt import Prompts

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics state that",
    "1, 2, 3, 4, 5,",
    "In 1969, the first humans",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
)
TOKENS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    found = []
    with LLM(options.plan, prefix_cache=False) as llm:
        encode = Prompts.open(options.plan, llm.plan).encode
        params = llm.params(temperature=0.0, max_tokens=TOKENS, logprobs=5, ignore_eos=True)
        for text in TEXTS:
            output = llm.generate([text], params)[0].outputs[0]
            assert output.logprobs is not None
            top = [sorted(each, key=lambda token: -each[token])[:5] for each in output.logprobs]
            found.append({"prompt": encode(text), "text": output.text, "tokens": output.token_ids, "top": top})
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
