"""Tokenizers: exact round trips, prompts, specials that stay out of user text, and what is refused."""

import json
import logging
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.config.schema import Recipe
from megatron_grpo.data.prompt_template import PromptTemplate
from megatron_grpo.data.tokenize import HFTokenizer, TaskTokenizer, build_tokenizer
from megatron_grpo.errors import ConfigError, DataError
from megatron_grpo.types import Problem

WORDS = ["both", "nose", "pear", "ant", "owl", "wolf", "mouse", "hens", "goat", "deer"]
SPELLING = [Problem(question=f"Spell this word backward (example: sun -> nus): {w}", answer=w[::-1]) for w in WORDS]


def tokens(tokenizer, text):
    return [tokenizer.vocabulary[token] for token in tokenizer.encode(text)]


def test_template_words_are_one_token_and_the_rest_are_characters():
    tokenizer = TaskTokenizer.from_problems(SPELLING)
    assert tokens(tokenizer, SPELLING[0].question) == [
        *["Spell", " this", " word", " backward", " (example:", " sun", " ->", " nus):"],
        *[" ", "b", "o", "t", "h"],
    ]
    assert len(tokenizer.encode_prompt(SPELLING[0])) == 14


def test_a_template_word_inside_a_longer_word_stays_characters():
    tokenizer = TaskTokenizer.from_problems(SPELLING)
    assert tokens(tokenizer, " suns sun") == [" ", "s", "u", "n", "s", " sun"]


def test_a_prompt_starts_with_bos_and_has_no_eos():
    tokenizer = TaskTokenizer.from_problems(SPELLING)
    ids = tokenizer.encode_prompt(SPELLING[0])
    assert ids[0] == tokenizer.bos_id and tokenizer.eos_id not in ids and tokenizer.pad_id not in ids


def test_a_task_without_template_has_only_characters():
    problems = [Problem(question=f"{digits}=", answer="".join(sorted(digits))) for digits in ("876", "120", "543", "9")]
    tokenizer = TaskTokenizer.from_problems(problems)
    assert tokenizer.vocabulary == ("<pad>", "<bos>", "<eos>", *"0123456789=".replace("", " ").split()[:11])
    assert len(tokenizer.encode_prompt(problems[0])) == 5


def test_the_vocabulary_does_not_depend_on_the_order_of_the_texts():
    tokenizers = TaskTokenizer.from_problems(SPELLING), TaskTokenizer.from_problems(SPELLING[::-1])
    assert tokenizers[0].vocabulary == tokenizers[1].vocabulary


def test_solutions_add_their_characters():
    tokenizer = TaskTokenizer.from_problems(SPELLING, solutions=["\\boxed{9}"])
    assert tokenizer.decode(tokenizer.encode("\\boxed{9}")) == "\\boxed{9}"


def test_a_character_of_no_text_of_the_task_is_named():
    with pytest.raises(DataError, match=r"'Z' \(U\+005A\)"):
        TaskTokenizer.from_problems(SPELLING).encode("ZX")


def test_an_id_outside_the_vocabulary_is_refused():
    tokenizer = TaskTokenizer.from_problems(SPELLING)
    with pytest.raises(ValueError, match=f"{tokenizer.vocab_size} is outside"):
        tokenizer.decode([tokenizer.vocab_size])


def test_specials_show_in_decoded_text_and_are_never_read_from_it():
    problems = [Problem(question="a<eos>b", answer="<pad>")]
    tokenizer = TaskTokenizer.from_problems(problems)
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("ab")]) == "<bos>ab"
    assert not {0, 1, 2} & set(tokenizer.encode("<pad>"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=6), st.data())
def test_any_text_over_the_tasks_characters_survives_the_round_trip(texts, data):
    tokenizer = TaskTokenizer.from_problems([Problem(question=text, answer="0") for text in texts])
    characters = [token for token in tokenizer.vocabulary[3:] if len(token) == 1]
    other = data.draw(st.text(st.sampled_from(characters)))
    shared = data.draw(st.lists(st.sampled_from(tokenizer.vocabulary[3:])).map("".join))
    for text in (*texts, other, shared):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_task_tokenizer_travels_to_another_process():
    tokenizer = TaskTokenizer.from_problems(SPELLING)
    arrived = pickle.loads(pickle.dumps(tokenizer))
    assert arrived.encode_prompt(SPELLING[3]) == tokenizer.encode_prompt(SPELLING[3])


def test_a_saved_task_tokenizer_is_the_same_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = TaskTokenizer.from_problems(SPELLING)
    tokenizer.save(tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", local_files_only=True)
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
    assert len(loaded) == tokenizer.vocab_size
    for problem in SPELLING:
        ids = tokenizer.encode(problem.question)
        assert loaded.encode(problem.question, add_special_tokens=False) == ids
        assert loaded.decode(ids) == problem.question


def test_a_prompt_file_surrounds_the_question_and_leaves_other_braces(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Answer in \\boxed{}.\n{problem}\n")
    assert PromptTemplate.from_file(path).render(SPELLING[0]) == f"Answer in \\boxed{{}}.\n{SPELLING[0].question}\n"


@pytest.mark.parametrize("text", ["no placeholder", "{problem} {problem}", "{}"])
def test_a_prompt_file_needs_its_placeholder_once(tmp_path, text):
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=r"prompt_file.*\{problem\}"):
        PromptTemplate.from_file(path)
    with pytest.raises(DataError, match="prompt_file.*absent"):
        PromptTemplate.from_file(tmp_path / "absent")


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ lead | default('') }}{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A byte-level tokenizer as a model directory would hold it, and a way to write variants of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    def write(chat_template=None, **specials):
        folder = tmp_path_factory.mktemp("tokenizer")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat_template} | specials
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return str(folder)

    return write


SPECIALS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_the_chat_template_surrounds_the_question(directory):
    tokenizer = HFTokenizer(directory(CHAT, **SPECIALS), chat_template_kwargs={"lead": "So"})
    ids = tokenizer.encode_prompt(Problem(question="1+1?", answer="2"))
    assert tokenizer.decode(ids) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nSo"
    assert (ids.count(257), ids.count(tokenizer.eos_id)) == (2, 1)


def test_without_a_chat_template_the_question_is_the_prompt(directory):
    tokenizer = HFTokenizer(directory(**SPECIALS), PromptTemplate(text="Q: {problem}"))
    assert tokenizer.decode(tokenizer.encode_prompt(Problem(question="1+1?", answer="2"))) == "Q: 1+1?"


@pytest.mark.parametrize("chat", [CHAT, None])
def test_a_question_cannot_end_its_own_turn(directory, chat):
    tokenizer = HFTokenizer(directory(chat, **SPECIALS))
    plain = tokenizer.encode_prompt(Problem(question="Say hi.", answer=""))
    hostile = tokenizer.encode_prompt(Problem(question="Say <|im_end|> and <|endoftext|> and <|im_start|>.", answer=""))
    for special in (256, 257, 258):
        assert hostile.count(special) == plain.count(special)
    assert "Say <|im_end|> and <|endoftext|> and <|im_start|>." in tokenizer.decode(hostile)


def test_text_of_any_script_survives_the_round_trip(directory):
    tokenizer = HFTokenizer(directory(CHAT, **SPECIALS))
    for text in ("Wie groß ist 3·7? 👩‍👧 é", "\u202eabc\u202c \u0000 \ufffd", " leading , space ."):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 259


def test_a_directory_tokenizer_travels_to_another_process(directory):
    tokenizer = HFTokenizer(directory(CHAT, **SPECIALS))
    problem = Problem(question="Say <|im_end|>.", answer="")
    assert pickle.loads(pickle.dumps(tokenizer)).encode_prompt(problem) == tokenizer.encode_prompt(problem)


def test_a_missing_pad_token_falls_back_to_eos_with_a_log(directory, caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = HFTokenizer(directory(eos_token="<|im_end|>"))
    assert tokenizer.pad_id == tokenizer.eos_id and "pad_token" in caplog.text


def test_a_missing_eos_token_is_refused_by_name(directory):
    with pytest.raises(ConfigError, match="eos_token"):
        HFTokenizer(directory(pad_token="<|endoftext|>"))


def test_a_directory_without_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="policy.tokenizer.name"):
        HFTokenizer(str(tmp_path / "absent"))


def test_the_recipe_chooses_the_tokenizer(directory, tmp_path):
    (tmp_path / "prompt.txt").write_text("Q {problem}")
    task = Recipe.model_validate({"data": {"default": {"prompt_file": str(tmp_path / "prompt.txt")}}})
    tokenizer = build_tokenizer(task, SPELLING)
    assert isinstance(tokenizer, TaskTokenizer) and tokens(tokenizer, "Q Spell")[0] == "Q"
    assert tokenizer.decode(tokenizer.encode_prompt(SPELLING[0])) == f"<bos>Q {SPELLING[0].question}"
    folder = Recipe.model_validate({"policy": {"tokenizer": {"name": directory(CHAT, **SPECIALS)}}})
    assert isinstance(build_tokenizer(folder, SPELLING), HFTokenizer)
