"""toolkit: compile a language model into a self-contained plan, then serve the plan without torch.

The names below are loaded on first use, so that `import toolkit` costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cli.driver import compile as compile
    from .runtime.llm import LLM as LLM
    from .runtime.llm import AsyncLLM as AsyncLLM
    from .runtime.request import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "compile"]

_HOMES = {
    "LLM": ".runtime.llm",
    "AsyncLLM": ".runtime.llm",
    "SamplingParams": ".runtime.request",
    "compile": ".cli.driver",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)
