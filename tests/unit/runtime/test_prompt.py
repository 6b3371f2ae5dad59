"""Opening a plan's text files."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.runtime.sample_plan import write_sample_plan

from toolkit.runtime.errors import UserError
from toolkit.runtime.prompt import Prompts


def test_edited_text_files_are_refused(tmp_path: Path) -> None:
    plan = write_sample_plan(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ }")
    with pytest.raises(UserError, match=r"tokenizer\.json was changed since it was compiled; compile it again"):
        Prompts.open(tmp_path, plan)
