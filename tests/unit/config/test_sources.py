"""Layers of files and overrides."""

import os

import pytest

from megatron_grpo.config.sources import merge, read_sources


@pytest.fixture
def folder(tmp_path):
    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".yaml").write_text(text)
        return tmp_path

    return write


def merged(path, *overrides):
    sources = read_sources(path, overrides)
    assert sources.problems == ()
    return merge(layer.values for layer in sources.layers)


def test_the_child_wins_and_later_parents_win_over_earlier_ones(folder):
    root = folder(a="x: 1\ny: 1\nz: 1\n", b="x: 2\ny: 2\n", child="defaults: [a.yaml, b.yaml]\nx: 3\n")
    assert merged(root / "child.yaml") == {"x": 3, "y": 2, "z": 1}


def test_parents_resolve_depth_first_beside_the_file_that_names_them(folder, monkeypatch):
    root = folder(
        top="x: top\ny: top\nz: top\n",
        sub__middle="defaults: ../top.yaml\ny: middle\nx: middle\n",
        sub__child="defaults: middle.yaml\nx: child\n",
    )
    monkeypatch.chdir("/")
    assert merged(root / "sub" / "child.yaml") == {"x": "child", "y": "middle", "z": "top"}


def test_mappings_merge_and_lists_are_replaced(folder):
    root = folder(a="m: {p: 1, q: [1, 2]}\n", child="defaults: a.yaml\nm: {q: [3], r: null}\n")
    assert merged(root / "child.yaml") == {"m": {"p": 1, "q": [3], "r": None}}


def test_a_circle_is_named_with_its_files(folder):
    root = folder(a="defaults: b.yaml\n", b="defaults: a.yaml\n")
    [problem] = read_sources(root / "a.yaml", []).problems
    assert "circle" in problem and "a.yaml" in problem and "b.yaml" in problem


def test_the_same_grandparent_twice_is_no_circle(folder):
    root = folder(top="x: 1\n", a="defaults: top.yaml\n", b="defaults: top.yaml\n", c="defaults: [a.yaml, b.yaml]\n")
    assert merged(root / "c.yaml") == {"x": 1}


def test_every_missing_parent_is_named_with_who_asked(folder):
    root = folder(child="defaults: [nope.yaml, gone.yaml]\n")
    problems = read_sources(root / "child.yaml", []).problems
    assert len(problems) == 2
    for problem, name in zip(problems, ("nope.yaml", "gone.yaml"), strict=True):
        assert str(root / name) in problem and str(root / "child.yaml") in problem


@pytest.mark.parametrize("defaults", ["3", "[1]", "{a: b}", "[a.yaml, null]", "true"])
def test_defaults_of_another_type_are_refused(folder, defaults):
    root = folder(child=f"defaults: {defaults}\n")
    [problem] = read_sources(root / "child.yaml", []).problems
    assert "defaults must be" in problem


def problem_of(path):
    [problem] = read_sources(path, []).problems
    return problem


def test_a_recipe_that_is_not_there_is_named_with_near_names(folder):
    root = folder(grpo_math="", other="")
    problem = problem_of(root / "grpo_maht.yaml")
    assert str(root / "grpo_maht.yaml") in problem and "grpo_math.yaml" in problem


def test_a_relative_path_is_shown_whole(folder, monkeypatch):
    monkeypatch.chdir(folder(a=""))
    assert os.path.abspath("b.yaml") in problem_of("b.yaml")


def test_a_directory_is_no_recipe(folder):
    root = folder(a="")
    problem = problem_of(root)
    assert "directory" in problem and str(root) in problem and "a.yaml" in problem


def test_another_suffix_is_no_recipe(folder):
    root = folder(a="x: 1\n")
    (root / "a.json").write_text("{}")
    problem = problem_of(root / "a.json")
    assert str(root / "a.json") in problem and ".yaml" in problem


def test_an_unreadable_file_is_named(folder):
    root = folder(a="")
    (root / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert str(root / "a.yaml") in problem_of(root / "a.yaml")


def test_the_last_override_wins_and_plus_signs_are_accepted(folder):
    root = folder(a="x: 1\n")
    assert merged(root / "a.yaml", "x=2", "+y.z=[1]", "++w=null", "x=9") == {"x": 9, "y": {"z": [1]}, "w": None}


@pytest.mark.parametrize("override", ["x", "=3", "a..b=1", ".a=1", "+=2", "a.=1"])
def test_an_override_without_key_or_value_is_refused(folder, override):
    [problem] = read_sources(folder(a="x: 1\n") / "a.yaml", [override]).problems
    assert override in problem and "key.path=value" in problem


def test_an_override_value_may_hold_an_equals_sign(folder):
    assert merged(folder(a="x: 1\n") / "a.yaml", "x='a=b'") == {"x": "a=b"}


def test_places_name_file_and_lines(folder):
    root = folder(a="x:\n  y: 1\n  z: 2\n")
    sources = read_sources(root / "a.yaml", ["w=1"])
    assert (
        sources.places([("x", "z"), ("x", "y"), ("w",), ("nowhere",)])
        == f" ({root / 'a.yaml'}, lines 2, 3; command line)"
    )
    assert sources.places([("nowhere",)]) == ""
