"""The reference that plans are measured against: a model run by transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ..runtime.errors import UserError


class Reference:
    """A model in memory, float32 whatever its checkpoint has; transformers reads GGUF files by its own code."""

    def __init__(self, model: str) -> None:
        """Load a directory, a `.gguf` file or a hub id. Raises UserError if transformers can't."""
        messages: Any = transformers_logging
        messages.set_verbosity_error()
        path = Path(model)
        where: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
        factory: Any = AutoModelForCausalLM
        try:
            with redirect_stderr(StringIO()):  # progress bars, some of which nothing turns off
                loaded = factory.from_pretrained(path.parent if where else model, dtype=torch.float32, **where)
            self._model = loaded.eval()
        except Exception as error:  # transformers raises errors of every kind for what it can't load
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"transformers can't load the reference {model}: {reason}; give a model directory, a .gguf file, "
                "a hub id or another plan"
            ) from None
        self.vocabulary = int(self._model.get_output_embeddings().weight.shape[0])

    def logprobs(self, tokens: Sequence[int]) -> Sequence[npt.NDArray[np.float32]]:
        """Log-probabilities [V] of what follows each of n tokens but the last."""
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
            return list(torch.log_softmax(logits, -1).numpy())
