"""The table of prompts that break data loaders. A row's right outcome follows from what is in it."""

import json
import logging
import os
import re
from pathlib import Path

import pytest

from megatron_grpo.data.datasets import encode_rows, load_file
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.data.task_tokenizer import TaskTokenizer
from megatron_grpo.errors import DataError
from tests.fakes import CharacterTokenizer

FOLDER = Path(os.environ.get("MEGATRON_GRPO_CASES") or Path(__file__).parents[2] / "cases")
PROMPTS = FOLDER / "prompts_hard.jsonl"
EXPECTED = json.loads((FOLDER / "prompts_hard.expect.json").read_text())
MAX_PROMPT_TOKENS = 511


def whole_lines():
    """The lines that are JSON, and their rows."""
    lines, rows = [], []
    for line in PROMPTS.read_bytes().split(b"\n"):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            continue
        lines.append(line)
        rows += [row] if row is not None else []
    return lines, rows


LINES, ROWS = whole_lines()


def usable(row):
    problem, answer = row.get("problem"), row.get("expected_answer")
    return isinstance(problem, str) and isinstance(answer, str) and bool(problem.strip())


@pytest.fixture
def repaired(tmp_path):
    """The table without its broken lines."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(LINES))
    return path


def test_every_row_of_the_table_has_an_expectation():
    assert {row["id"] for row in ROWS} <= set(EXPECTED)


def test_the_broken_line_is_refused_with_file_and_line():
    line = re.search(r"line (\d+)", EXPECTED["last_line"]).group(1)
    with pytest.raises(DataError) as refused:
        load_file(PROMPTS, "math")
    assert f"{PROMPTS} line {line}:" in str(refused.value) and len(refused.value.problems) == 1


def test_usable_rows_are_kept_in_order_and_twins_stay_apart(repaired):
    split = load_file(repaired, "math")
    kept = [row for row in ROWS if usable(row)]
    assert [problem.question for problem in split.problems] == [row["problem"] for row in kept]
    assert [problem.metadata["id"] for problem in split.problems] == [row["id"] for row in kept]
    assert [problem.answer for problem in split.problems] == [row["expected_answer"] for row in kept]


def test_unusable_rows_are_named_by_id_and_field(repaired, caplog):
    with caplog.at_level(logging.WARNING):
        split = load_file(repaired, "math")
    unusable = [row for row in ROWS if not usable(row)]
    assert unusable and sum(split.skipped.values()) == len(unusable)
    warnings = caplog.text.splitlines()
    for row in unusable:
        named = [line for line in warnings if f"{row['id']} (" in line]
        wrong = "expected_answer" if isinstance(row.get("problem"), str) and row["problem"].strip() else "problem"
        assert len(named) == 1 and f": {wrong} is " in named[0]


def test_overlong_prompts_are_skipped_and_the_batches_stay_full(repaired, caplog):
    problems = load_file(repaired, "math").problems
    with caplog.at_level(logging.WARNING):
        rows = encode_rows(problems, CharacterTokenizer(), env_name="math", max_prompt_tokens=MAX_PROMPT_TOKENS)
    too_long = [problem for problem in problems if len(problem.question) > MAX_PROMPT_TOKENS]
    assert too_long and len(rows) == len(problems) - len(too_long)
    assert f"skipped {len(too_long)} of {len(problems)} rows: longer than {MAX_PROMPT_TOKENS} tokens" in caplog.text
    stream = PromptStream(rows, num_prompts_per_step=4, num_epochs=1, seed=0, shuffle=False)
    prompts = [stream.next_prompt() for _ in range(4)]
    assert [prompt.ordinal for prompt in prompts] == [0, 1, 2, 3]
    assert prompts[0].token_ids == prompts[1].token_ids  # the twins: two prompts of one text


def test_the_task_tokenizer_carries_every_text_exactly(repaired):
    problems = load_file(repaired, "math").problems
    tokenizer = TaskTokenizer.from_problems(problems)
    for problem in problems:
        assert tokenizer.decode(tokenizer.encode(problem.question)) == problem.question
        assert tokenizer.eos_id not in tokenizer.encode_prompt(problem)
