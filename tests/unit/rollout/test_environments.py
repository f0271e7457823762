"""The built-in tasks: their questions, their split, their verifiers; and how a user's own class is found."""

import pickle
import subprocess
import sys
import threading

import pytest

from megatron_grpo.config.schema import EnvironmentBlock
from megatron_grpo.data.stream import PromptRow
from megatron_grpo.errors import ConfigError, DataError
from megatron_grpo.rollout.environments import (
    MathVerify,
    ReasoningGym,
    SortDigits,
    blocks_in_use,
    build_environment,
)
from megatron_grpo.rollout.environments.math_answers import last_boxed
from megatron_grpo.types import Problem

FAKE = "tests.fakes:FixedEnvironment"


@pytest.fixture(scope="module")
def spell():
    return ReasoningGym("spell_backward", {"min_word_len": 3, "max_word_len": 4}, only_matching=": [a-z]+$")


@pytest.fixture(scope="module")
def grader():
    return MathVerify()


def questions(problems):
    return [problem.question for problem in problems]


def test_sorting_gives_credit_by_position():
    problem = Problem(question="876=", answer="678")
    scores = {response: SortDigits().score(problem, response) for response in ("678", "687", "6", "6789", "", "x")}
    assert scores == pytest.approx({"678": 1, "687": 1 / 3, "6": 1 / 3, "6789": 3 / 4, "": 0, "x": 0})


def test_only_the_sorted_digits_alone_are_correct():
    problem = SortDigits().problems("train", 1, 0)[0]
    assert SortDigits().is_correct(problem, SortDigits().solution(problem))
    assert not SortDigits().is_correct(problem, problem.answer + "0")


@pytest.mark.parametrize("num_digits", [1, 3, 7])
def test_no_digits_are_in_both_splits_whatever_the_seeds(num_digits):
    environment = SortDigits(num_digits=num_digits)
    train = {question for seed in range(3) for question in questions(environment.problems("train", 900, seed))}
    held_out = {question for seed in range(3) for question in questions(environment.problems("validation", 300, seed))}
    assert train and held_out and not train & held_out


def test_a_small_space_repeats_training_questions_but_not_held_out_ones():
    environment = SortDigits(num_digits=1, held_out_share=0.5)
    train, held_out = (questions(environment.problems(split, 50, 0)) for split in ("train", "validation"))
    assert len(train) == 50 and len(held_out) == len(set(held_out)) < 10
    assert set(train) | set(held_out) == {f"{digit}=" for digit in range(10)}


def test_problems_repeat_for_a_seed_and_differ_between_seeds():
    environment = SortDigits()
    assert environment.problems("train", 20, 3) == environment.problems("train", 20, 3)
    assert environment.problems("train", 20, 3) != environment.problems("train", 20, 4)


def test_the_split_of_a_question_is_the_same_in_another_process():
    code = (
        "from megatron_grpo.rollout.environments import SortDigits;"
        "print([p.question for p in SortDigits().problems('validation', 20, 5)])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(questions(SortDigits().problems("validation", 20, 5)))


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'test'"):
        SortDigits().problems("test", 1, 0)


@pytest.mark.parametrize("share", [0.0, 1.0, -1])
def test_a_share_that_empties_one_side_is_refused(share):
    with pytest.raises(ValueError, match="held_out_share"):
        SortDigits(held_out_share=share)


def test_a_side_without_any_question_is_refused():
    with pytest.raises(DataError, match="held_out_share"):
        SortDigits(num_digits=1, held_out_share=0.001).problems("validation", 1, 0)


def test_spelling_words_are_split_and_match_the_filter(spell):
    train, held_out = (questions(spell.problems(split, 300, 1)) for split in ("train", "validation"))
    assert len(set(train)) == 300 and len(set(held_out)) == 300 and not set(train) & set(held_out)
    assert all(question.rpartition(" ")[2].islower() for question in train)


def test_the_librarys_own_verifier_scores(spell):
    problem = spell.problems("train", 1, 0)[0]
    solution = spell.solution(problem)
    assert solution == problem.question.rpartition(" ")[2][::-1]
    assert spell.score(problem, solution) == 1.0 and spell.is_correct(problem, solution)
    half_right = solution[:2] + "#" * (len(solution) - 2)
    assert 0 < spell.score(problem, half_right) < 1 and not spell.is_correct(problem, half_right)


def test_a_problem_travels_to_another_process_and_is_scored_there(spell):
    problem = spell.problems("validation", 1, 0)[0]
    arrived = pickle.loads(pickle.dumps(problem))
    elsewhere = ReasoningGym("spell_backward", {"min_word_len": 3, "max_word_len": 4})
    assert elsewhere.is_correct(arrived, problem.answer)


def test_any_dataset_of_the_library_is_reached_by_name():
    environment = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    problem = environment.problems("train", 5, 0)[0]
    assert environment.is_correct(problem, problem.answer) and not environment.is_correct(problem, "nonsense")


def test_a_dataset_without_answers_has_no_solution():
    environment = ReasoningGym("propositional_logic")
    with pytest.raises(NotImplementedError, match="propositional_logic"):
        environment.solution(environment.problems("train", 1, 0)[0])


def test_unknown_dataset_and_options_are_named():
    with pytest.raises(ConfigError, match="no_such_set"):
        ReasoningGym("no_such_set")
    with pytest.raises(ConfigError, match="min_wordlen"):
        ReasoningGym("spell_backward", {"min_wordlen": 3})


@pytest.mark.parametrize(
    "answer, response, right",
    [
        ("42", "so \\boxed{42}", True),
        ("1/2", "\\boxed{\\frac{1}{2}}", True),
        ("1/2", "0.5", True),
        ("3", "\\boxed{2}, no, \\boxed{3}", True),
        ("2", "\\boxed{2}, no, \\boxed{3}", False),
        ("3", "\\boxed{3} and then \\boxed{2", True),
        ("Paris", "\\boxed{Paris}", True),
        ("42", "I first got 41, but it is 42", True),
        ("42", "", False),
        ("", "\\boxed{}", False),
        ("1e400", "Answer 1e400", False),
        ("1e400", "\\boxed{1e400}", True),
    ],
)
def test_math_answers(grader, answer, response, right):
    problem = Problem(question="?", answer=answer)
    assert grader.is_correct(problem, response) is right
    assert grader.score(problem, response) == float(right)


def test_math_is_graded_outside_the_main_thread(grader):
    results = []
    thread = threading.Thread(target=lambda: results.append(grader.score(Problem(question="", answer="4"), "2+2=4")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_the_last_box_that_closes_is_the_answer():
    assert last_boxed("\\boxed{a{b}c} \\boxed{d") == "a{b}c"
    assert last_boxed("none") is None


def test_math_has_no_generator_of_its_own(grader):
    with pytest.raises(DataError, match="data.train.path"):
        grader.problems("train", 1, 0)


def test_a_users_class_is_built_from_its_block():
    environment = build_environment("mine", {"target": FAKE, "num_workers": 3, "options": "x"})
    assert environment.options == "x"


def test_a_builtin_name_needs_no_target():
    assert build_environment("sort_digits", {"num_digits": 2, "target": None, "num_workers": 1}).problems("train", 1, 0)


@pytest.mark.parametrize(
    "block, words",
    [
        ({}, ["sort_digits", "module:Class"]),
        ({"target": "no_such_module_9:Task"}, ["no_such_module_9"]),
        ({"target": "tests.fakes:NoSuchClass"}, ["NoSuchClass"]),
        ({"target": "tests.fakes"}, ["module:Class"]),
        ({"target": "tests.fakes:make_prompt"}, ["not a class"]),
        ({"target": "tests.fakes:EnvironmentWithoutSolution"}, ["lacks solution"]),
        ({"target": "tests.fakes:EnvironmentThatCannotStart"}, ["words.txt"]),
        ({"target": FAKE, "colour": "red"}, ["colour"]),
    ],
)
def test_a_block_that_cannot_be_built_names_its_target_key(block, words):
    with pytest.raises(ConfigError) as refused:
        build_environment("mine", block)
    assert all(word in str(refused.value) for word in ["env.mine.target", *words])


def test_the_heavy_libraries_are_not_imported_with_the_package():
    code = (
        "import sys, megatron_grpo.rollout.environments, megatron_grpo.rollout.rewards, megatron_grpo.data.tokenize;"
        "print([m for m in ('reasoning_gym', 'math_verify', 'torch', 'transformers', 'ray') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_only_environments_that_a_prompt_names_are_in_use():
    blocks = {name: EnvironmentBlock() for name in ("math", "sort_digits", "inherited")}
    problem = Problem(question="", answer="")
    rows = [PromptRow(token_ids=(), env_name=name, problem=problem) for name in ("sort_digits", "math", "math")]
    assert list(blocks_in_use(blocks, rows)) == ["math", "sort_digits"]
