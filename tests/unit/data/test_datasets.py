"""Problems from files and generators: what is refused, what is skipped and how it is named."""

import importlib.util
import json
import logging
from types import SimpleNamespace

import pytest

from megatron_grpo.config.schema import Recipe
from megatron_grpo.data.datasets import encode_rows, load_file, load_split, max_prompt_tokens, require_rows
from megatron_grpo.data.files import read_rows
from megatron_grpo.errors import ConfigError, DataError
from megatron_grpo.types import Problem
from tests.fakes import CharacterTokenizer, FixedEnvironment

GOOD = {"problem": "1+1", "expected_answer": "2"}


def write(tmp_path, *lines, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def recipe(**data):
    return Recipe.model_validate({"data": data})


def no_environment(name):
    raise AssertionError(f"environment {name} was built although the rows come from a file")


def test_rows_keep_their_order_and_other_columns_become_metadata(tmp_path):
    path = write(tmp_path, GOOD, b"", b"   ", GOOD | {"problem": "2+2", "level": {"deep": [1]}})
    split = load_file(path, "math")
    assert split.problems == (
        Problem(question="1+1", answer="2"),
        Problem(question="2+2", answer="2", metadata={"level": {"deep": [1]}}),
    )
    assert (split.env_name, split.skipped) == ("math", {})


def test_the_last_line_needs_no_newline_and_a_byte_order_mark_is_ignored(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), GOOD)
    assert len(load_file(path, "math").problems) == 2


def test_a_line_separator_inside_a_string_does_not_split_the_row(tmp_path):
    row = json.dumps(GOOD | {"problem": "a\u2028b"}, ensure_ascii=False).encode()
    assert load_file(write(tmp_path, row), "math").problems[0].question == "a\u2028b"


@pytest.mark.parametrize(
    "line, words",
    [
        (b'{"problem": "cut of', "not valid JSON"),
        (b"[1, 2]", "a list, not a JSON object"),
        (b"42", "a int, not a JSON object"),
        (b'{"problem": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_line_is_refused_with_file_and_line(tmp_path, line, words):
    path = write(tmp_path, GOOD, b"", line, GOOD)
    with pytest.raises(DataError) as refused:
        load_file(path, "math")
    assert f"{path} line 3" in str(refused.value) and words in str(refused.value)


def test_all_broken_lines_are_named_at_once_but_not_endlessly(tmp_path):
    with pytest.raises(DataError) as refused:
        read_rows(write(tmp_path, *[b"{"] * 30))
    assert "line 1:" in str(refused.value) and "line 20:" in str(refused.value)
    assert refused.value.problems[-1].endswith("10 more broken lines")


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"expected_answer": "5"}, "problem is missing"),
        ({"problem": "x"}, "expected_answer is missing"),
        (GOOD | {"problem": None}, "problem is null"),
        (GOOD | {"expected_answer": None}, "expected_answer is null"),
        (GOOD | {"problem": 123}, "problem is of type int, not text"),
        (GOOD | {"expected_answer": ["4"]}, "expected_answer is of type list, not text"),
        (GOOD | {"problem": ""}, "problem is blank"),
        (GOOD | {"problem": " \n\t "}, "problem is blank"),
        (GOOD | {"problem": "half \ud83d"}, "problem is not valid Unicode"),
    ],
)
def test_a_useless_row_is_skipped_counted_and_named(tmp_path, caplog, row, reason):
    path = write(tmp_path, GOOD, row | {"id": "p77"}, row)
    with caplog.at_level(logging.WARNING):
        split = load_file(path, "math")
    assert len(split.problems) == 1 and split.skipped == {reason: 2}
    assert f"skipped 2 of 3 rows: {reason}: p77 ({path} line 2), {path} line 3" in caplog.text


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DataError, match="absent.jsonl cannot be read: No such file"):
        read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match=r"unknown kind of file '.csv'.*jsonl.*parquet"):
        read_rows(tmp_path / "rows.csv")


def test_parquet_says_what_to_install_or_reads(tmp_path):
    path = tmp_path / "rows.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(DataError, match="pip install pyarrow"):
            read_rows(path)
        return
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([GOOD, {"problem": None, "expected_answer": "4"}]), path)
    split = load_file(path, "math")
    assert split.problems == (Problem(question="1+1", answer="2"),) and split.skipped == {"problem is null": 1}
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_rows(path)


def test_a_recipe_names_a_file_and_its_environment(tmp_path):
    path = str(write(tmp_path, GOOD))
    own = load_split(recipe(train={"path": path, "env": "mine"}), "train", no_environment)
    default = load_split(recipe(train={"path": path}, default={"env_name": "other"}), "train", no_environment)
    assert (own.env_name, default.env_name) == ("mine", "other")
    with pytest.raises(ConfigError, match="data.train.env or data.default.env_name"):
        load_split(recipe(train={"num_rows": 3}), "train", no_environment)


def test_a_recipe_without_validation_has_none():
    assert load_split(recipe(train={"env": "fake", "num_rows": 1}), "validation", no_environment) is None


def test_an_environment_generates_the_rows_of_its_split():
    data = recipe(train={"env": "fake", "num_rows": 3, "seed": 5}, validation={"env": "fake", "num_rows": 1, "seed": 6})
    train, held_out = (load_split(data, split, lambda name: FixedEnvironment()) for split in ("train", "validation"))
    assert [problem.question for problem in train.problems] == ["train 5 0", "train 5 1", "train 5 2"]
    assert [problem.question for problem in held_out.problems] == ["validation 6 0"]


def test_an_environment_that_generates_something_else_is_named():
    class Wrong(FixedEnvironment):
        def problems(self, split, num, seed):
            return ["1+1"]

    with pytest.raises(DataError, match=r"env.fake: problems\(\) returned a str"):
        load_split(recipe(train={"env": "fake", "num_rows": 1}), "train", lambda name: Wrong())


def test_a_split_with_neither_path_nor_rows_is_refused():
    with pytest.raises(ConfigError, match="num_rows"):
        load_split(recipe(train={"env": "fake"}), "train", no_environment)


def test_prompts_too_long_for_the_model_are_skipped_with_a_count(caplog):
    problems = [Problem(question="x" * length, answer="") for length in (3, 4, 5, 600)]
    with caplog.at_level(logging.WARNING):
        rows = encode_rows(problems, CharacterTokenizer(), env_name="e", max_prompt_tokens=4, source="data.train")
    assert [len(row.token_ids) for row in rows] == [3, 4] and rows[0].env_name == "e"
    assert "data.train: skipped 2 of 4 rows: longer than 4 tokens" in caplog.text


def test_prompts_without_a_token_are_skipped(caplog):
    with caplog.at_level(logging.WARNING):
        assert not encode_rows(
            [Problem(question="", answer="")], CharacterTokenizer(), env_name="e", max_prompt_tokens=4
        )
    assert "no token at all" in caplog.text


@pytest.mark.parametrize("input_length, model_length, longest", [(None, 512, 511), (64, 512, 64), (512, 512, 511)])
def test_the_longest_prompt_leaves_room_for_one_token(input_length, model_length, longest):
    policy = SimpleNamespace(max_total_sequence_length=model_length)
    assert max_prompt_tokens(
        SimpleNamespace(policy=policy, data=SimpleNamespace(max_input_seq_length=input_length))
    ) == (longest)


def test_fewer_rows_than_a_step_are_refused_naming_both_numbers():
    require_rows(4, 4, "data.train")
    with pytest.raises(DataError) as refused:
        require_rows(3, 4, "data.train")
    assert all(word in str(refused.value) for word in ("3", "4", "grpo.num_prompts_per_step", "data.train"))


def test_rows_that_are_missing_because_they_are_too_long_are_told_as_such():
    with pytest.raises(DataError, match=r"640 of 640 .* 3 tokens.*policy.max_total_sequence_length"):
        require_rows(0, 4, "data.train", num_too_long=640, max_tokens=3)


@pytest.mark.parametrize("answer", [None, ValueError("no such file")])
def test_an_environment_that_cannot_give_problems_is_named(answer):
    class Broken:
        def problems(self, split, num, seed):
            if answer is None:
                return
            raise answer

    data = SimpleNamespace(
        train=SimpleNamespace(env="mine", path=None, num_rows=4, seed=0), default=SimpleNamespace(env_name=None)
    )
    with pytest.raises(DataError, match=r"env.mine: problems\(\) failed"):
        load_split(SimpleNamespace(data=data), "train", lambda name: Broken())
