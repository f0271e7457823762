"""Plain YAML values with the traps closed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.config.yaml_source import read_document, read_value, to_yaml


def read(text):
    document = read_document(text)
    assert document.problems == ()
    return document.values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5E3", 5000.0),
        ("1.0e-6", 1e-6),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("-3", -3),
        ("0x10", 16),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1e-6'", "1e-6"),
        ('"false"', "false"),
        ("None", "None"),
        ("010", "010"),
        ("2024-01-01", "2024-01-01"),
        ("00:03:30:00", "00:03:30:00"),
        ("y", "y"),
        ("1e", "1e"),
    ],
)
def test_scalars_read_as_what_they_look_like(text, value):
    found = read(f"key: {text}\n")["key"]
    assert found == value and type(found) is type(value)


def test_infinity_and_not_a_number_are_numbers():
    found = read("a: .inf\nb: -.inf\nc: .nan\n")
    assert found["a"] == math.inf and found["b"] == -math.inf and math.isnan(found["c"])


@pytest.mark.parametrize("text", ["on", "Off", "yes", "NO"])
def test_bare_words_that_other_readers_take_for_booleans_are_refused(text):
    [(line, problem)] = read_document(f"a: 1\nb: {text}\n").problems
    assert line == 2 and text in problem and "true or false" in problem


@pytest.mark.parametrize("text", ["4:00:00", "1:00:00:00", "1:30.5"])
def test_base_60_numbers_are_refused(text):
    [(line, problem)] = read_document(f"limit: {text}\n").problems
    assert line == 1 and "quote it" in problem and text in problem


def test_quoted_times_and_words_are_text():
    assert read("a: '4:00:00'\nb: \"on\"\n") == {"a": "4:00:00", "b": "on"}


def test_every_duplicate_key_is_named_with_both_lines():
    document = read_document("a:\n  b: 1\n  c: 2\n  b: 3\nd: 1\nd: 2\n")
    assert document.problems == (
        (4, "a.b: duplicate key (first on line 2)"),
        (6, "d: duplicate key (first on line 5)"),
    )


def test_a_tab_is_named_with_its_line():
    [(line, problem)] = read_document("a:\n  b: 1\n\tc: 2\n").problems
    assert line == 3 and "tab" in problem


@pytest.mark.parametrize("text", ["a: [1, 2\n", "a: b: c\n", "a: 'x\n", "a: 1\n---\nb: 2\n", "a: \x00\n"])
def test_broken_syntax_is_a_problem_and_leaves_nothing_to_judge(text):
    document = read_document(text)
    assert len(document.problems) == 1 and not document.readable and document.values == {}


@pytest.mark.parametrize("text", ["- a\n", "text\n", "3\n"])
def test_a_recipe_is_a_mapping(text):
    assert "mapping" in read_document(text).problems[0][1]


def test_an_empty_file_is_an_empty_recipe():
    assert read("# nothing\n") == {}


def test_keys_are_text():
    assert "must be text" in read_document("1: a\n").problems[0][1]
    assert "must be text" in read_document("true: a\n").problems[0][1]


def test_merge_keys_are_refused_in_favour_of_defaults():
    assert "defaults" in read_document("a: &x {b: 1}\nc:\n  <<: *x\n").problems[0][1]


def test_aliases_repeat_a_value_and_may_not_contain_themselves():
    assert read("a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}
    assert "alias" in read_document("a: &x\n  b: *x\n").problems[0][1]


@pytest.mark.parametrize("text", ["a: !env HOME\n", "a: !!python/object:os.system {}\n", "a: [!x 1]\n"])
def test_tags_are_not_read(text):
    assert "tag" in read_document(text).problems[0][1]


def test_lines_point_at_the_key():
    assert read_document("a:\n  b:\n    c: 1\n").lines == {("a",): 1, ("a", "b"): 2, ("a", "b", "c"): 3}


def test_an_override_value_is_yaml_without_shell_quotes():
    assert read_value("[1, 2.5, x]") == [1, 2.5, "x"]
    assert read_value("00:04:00:00") == "00:04:00:00"
    assert read_value("1:00:00:00") == "1:00:00:00"
    assert read_value("") is None
    with pytest.raises(ValueError, match="true or false"):
        read_value("yes")
    with pytest.raises(ValueError, match="YAML syntax"):
        read_value("[1")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="ascii", min_codepoint=32)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"\A[a-z]{1,4}\Z"), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(value=plain)
def test_what_is_written_reads_back(value):
    found = read_document(to_yaml({"value_": value}))
    assert found.problems == () and found.values == {"value_": value}


@pytest.mark.parametrize(
    "text", ["1e-6", "on", "4:00:00", "010", "08", "null", "2024-01-01", "1_0", ".5e3", "${oc.env:A}/b"]
)
def test_text_that_looks_like_something_else_stays_text(text):
    assert read(to_yaml({"a": text})) == {"a": text}
