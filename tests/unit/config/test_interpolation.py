"""`${...}` and the environment."""

import pytest

from megatron_grpo.config.interpolation import resolve


def test_references_follow_values_and_defaults():
    resolved = resolve({"a": "${b.c}", "b": {"c": "${d}"}, "e": "x-${f}"}, {"d": 4, "f": 5})
    assert resolved.values == {"a": 4, "b": {"c": 4}, "e": "x-5"}
    assert resolved.shown == resolved.values and resolved.problems == ()


def test_defaults_only_serve_as_targets():
    assert resolve({"a": 1}, {"a": 2, "b": 3}).values == {"a": 1}


def test_small_arithmetic():
    given = {"a": "${mul:${b},4}", "c": "${div:${b},2}", "d": "${div:${b},4}", "e": "${max:${b},2}", "b": 6}
    assert resolve(given, {}).values == {"a": 24, "c": 3, "d": 1.5, "e": 6, "b": 6}


@pytest.mark.parametrize("expression", ["${mul:${text},3}", "${add:true,1}", "${div:1,0}"])
def test_arithmetic_is_for_numbers(expression):
    assert resolve({"a": expression, "text": "4x"}, {}).problems[0][0] == ("a",)


def test_what_comes_from_the_environment_is_shown_as_its_expression(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    resolved = resolve({"a": "${oc.env:SECRET_TOKEN}/run", "b": "${a}/logs", "c": ["${oc.env:SECRET_TOKEN}"]}, {})
    assert resolved.values == {"a": "hunter2/run", "b": "hunter2/run/logs", "c": ["hunter2"]}
    expression = "${oc.env:SECRET_TOKEN}"
    assert resolved.shown == {"a": f"{expression}/run", "b": f"{expression}/run/logs", "c": [expression]}
    assert resolved.secrets["hunter2"] == expression


def test_an_environment_variable_can_be_a_number(monkeypatch):
    monkeypatch.setenv("NODES", "4")
    resolved = resolve({"a": "${oc.decode:${oc.env:NODES}}"}, {})
    assert resolved.values == {"a": 4} and resolved.shown == {"a": "${oc.decode:${oc.env:NODES}}"}


def test_an_environment_default_needs_no_variable(monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    assert resolve({"a": "${oc.env:NOT_THERE,fallback}"}, {}).values == {"a": "fallback"}


def test_every_unresolvable_key_is_a_problem_and_is_left_out(monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    given = {"s": {"a": "${oc.env:NOT_THERE}"}, "b": "${no.where}", "c": "${", "d": "${nothing:1}", "e": "???", "ok": 1}
    resolved = resolve(given, {})
    problems = {".".join(key): text for key, text in resolved.problems}
    assert set(problems) == {"s.a", "b", "c", "d", "e"}
    assert "NOT_THERE" in problems["s.a"] and "no.where" in problems["b"]
    assert resolved.values == {"s": {}, "ok": 1}


def test_a_circle_of_references_is_a_problem():
    assert {key for key, _ in resolve({"a": "${b}", "b": "${a}"}, {}).problems} == {("a",), ("b",)}


def test_the_given_values_are_left_alone():
    given = {"a": {"b": "${c}"}}
    resolve(given, {})
    assert given == {"a": {"b": "${c}"}}


@pytest.mark.parametrize("path", ["a", "list"])
def test_a_problem_in_a_list_names_the_key_of_the_list(path):
    assert resolve({path: [1, "${gone}"]}, {}).problems[0][0] == (path,)
