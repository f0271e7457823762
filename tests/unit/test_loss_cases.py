"""The tables of known loss faults, every kind, in float64 and float32.

The KL gradient compared with is the one without the score term. float32 is compared relative to terms of order one:
a loss that is a small difference of such terms cannot be better than their rounding.
"""

import math

import numpy as np
import pytest
import torch

from megatron_grpo.algorithms.advantages import group_advantages
from megatron_grpo.algorithms.loss import Normalizer, grpo_loss
from megatron_grpo.algorithms.policy_term import policy_terms
from megatron_grpo.batching.pack import pack_rows
from megatron_grpo.errors import ConfigError
from megatron_grpo.rollout.reward_values import read_rewards
from tests.unit.loss_case_batches import (
    DTYPES,
    array,
    batches_in,
    config_of,
    counts_of,
    loss_inputs,
    numbers,
    read_cases,
    valid_of,
)
from tests.unit.loss_case_ranks import reduced_over_ranks

CASES = read_cases()


def of_kind(*kinds):
    return pytest.mark.parametrize("case", [c for c in CASES if c["kind"] in kinds], ids=lambda c: c["id"])


in_both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def near(expected, case, dtype):
    rtol, atol = (case["rtol"], case["atol"]) if dtype == torch.float64 else (max(case["rtol"], 1e-5), 1e-6)
    return pytest.approx(expected, rel=rtol, abs=atol, nan_ok=False)


def assert_not_wrong(values, case):
    """`wrong_answers` are what known defects give, a number or several: ours are not these."""
    for defect, wrong in case.get("wrong_answers", {}).items():
        wrong = numbers(wrong) if isinstance(wrong, list) else [float(wrong)]
        assert not all(any(math.isclose(v, w, rel_tol=1e-5, abs_tol=1e-9) for v in values) for w in wrong), defect


def run_loss(batch, options, dtype, counts=None):
    num_tokens, num_sequences = counts or counts_of(batch)
    inputs = loss_inputs(batch, dtype)
    normalizer = Normalizer(num_tokens=num_tokens, num_sequences=num_sequences)
    output = grpo_loss(config_of(options), inputs, normalizer)
    output.loss.backward()
    return output, inputs


def matches(expected, output, inputs, case, dtype):
    """Loss, its parts and its gradient against those that `expected` states."""
    found = {"loss": output.loss.item(), "actor_loss": output.actor_loss.item(), "kl": output.kl.item()}
    found["grad_wrt_curr"] = inputs.current_logprobs.grad.flatten().tolist()
    for name, value in found.items():
        if name in expected and near(numbers(expected[name]), case, dtype) != numbers(value):
            return False
    return all(map(math.isfinite, numbers(list(found.values()))))


@of_kind("loss")
@in_both_dtypes
def test_loss_parts_and_gradient(case, dtype):
    batch = case["inputs"]
    output, inputs = run_loss(batch, case["options"], dtype)
    assert matches(case["expected"], output, inputs, case, dtype), (output, inputs.current_logprobs.grad)
    assert_not_wrong([output.loss.item()], case)
    assert (inputs.current_logprobs.grad[~torch.tensor(valid_of(batch))] == 0).all()


@of_kind("loss")
@in_both_dtypes
def test_terms_of_every_token(case, dtype):
    inputs = loss_inputs(case["inputs"], dtype)
    terms = policy_terms(config_of(case["options"]), inputs)
    ours = {"ratio": terms.ratio, "is_weight": terms.importance_weight, "pg": terms.policy}
    for name, expected in case["expected"].get("per_token", {}).items():
        if name in ours:
            found = ours[name].detach().expand_as(inputs.valid)[inputs.valid].tolist()
            assert found == near(array(expected)[inputs.valid.numpy()].tolist(), case, dtype), name


@of_kind("loss_any_of")
@in_both_dtypes
def test_loss_is_one_of_the_defensible_values(case, dtype):
    output, inputs = run_loss(case["inputs"], case["options"], dtype)
    choices = next(v for k, v in case["expected"].items() if k.endswith("any_of") or isinstance(v, list))
    choices = choices.values() if isinstance(choices, dict) else choices
    choices = [choice if isinstance(choice, dict) else {"loss": choice} for choice in choices]
    assert any(matches(choice, output, inputs, case, dtype) for choice in choices), output.loss
    assert_not_wrong([output.loss.item()], case)


@of_kind("micro_batches")
@in_both_dtypes
def test_micro_batches_add_up(case, dtype):
    parts = batches_in(case["inputs"])
    counts = tuple(np.sum([counts_of(part) for part in parts], axis=0).tolist())
    assert case["inputs"].get("N_tok", counts[0]) == counts[0]
    results = [run_loss(part, case["options"], dtype, counts) for part in parts]
    losses = [output.loss.item() for output, _ in results]
    gradient = [x for _, inputs in results for x in inputs.current_logprobs.grad.flatten().tolist()]
    assert_adds_up(case, dtype, sum(losses), losses, gradient)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    cases = [
        {"id": case["id"], "config": case["options"], "ranks": batches_in(case["inputs"])}
        for case in CASES
        if case["kind"] == "dp_ranks"
    ]
    results = {}
    for size in {len(case["ranks"]) for case in cases}:
        of_size = [case for case in cases if len(case["ranks"]) == size]
        results |= reduced_over_ranks(of_size, size, tmp_path_factory.mktemp(f"ranks{size}"))
    return results


@of_kind("dp_ranks")
@in_both_dtypes
def test_data_parallel_ranks_add_up(case, dtype, reduced):
    result = reduced[case["id"]][str(dtype).removeprefix("torch.")]
    assert_adds_up(case, dtype, result["total"], result["parts"], result["gradient"])


def assert_adds_up(case, dtype, total, parts, gradient):
    expected = case["expected"]
    assert total == near(expected.get("total", expected.get("loss")), case, dtype)
    if "parts" in expected:
        assert parts == near(numbers(expected["parts"]), case, dtype)
    for name in [name for name in expected if name.startswith("grad") and not name.endswith("score")]:
        assert gradient == near(numbers(expected[name]), case, dtype)
    assert_not_wrong([total], case)


@of_kind("invariance")
@in_both_dtypes
def test_every_split_padding_and_packing_gives_the_same(case, dtype):
    named = {name: batch for name, batch in case["inputs"].items() if isinstance(batch, dict) and "curr" in batch}
    base = next(iter(named.values()))
    counts = counts_of(base)
    (expected, *others) = [value for name, value in case["expected"].items() if name.startswith("total")]
    output, inputs = run_loss(base, case["options"], dtype, counts)
    gradient = inputs.current_logprobs.grad[inputs.valid].tolist()
    assert output.loss.item() == near(expected, case, dtype)
    assert others == [near(expected, case, torch.float64)] * len(others)
    for layout in [*layouts(base), *([batch] for name, batch in named.items() if "pack" not in name)]:
        results = [run_loss(part, case["options"], dtype, counts) for part in layout]
        found = [x for _, part in results for x in part.current_logprobs.grad[part.valid].tolist()]
        assert sum(output.loss.item() for output, _ in results) == near(expected, case, dtype)
        assert sorted(found) == near(sorted(gradient), case, dtype)
    assert_not_wrong([output.loss.item()], case)


def layouts(base):
    """The batch row by row, padded with junk to 8 and 64, and packed into one row; each a list of micro-batches."""
    names = [name for name, value in base.items() if np.ndim(value) == 2]
    rows = range(len(base["sample_mask"]))
    yield [{name: [value[row]] for name, value in base.items()} for row in rows]
    for width in (8, 64):
        junk = [0.0 if name == "token_mask" else float("nan") for name in names]
        padded = {
            name: [row + [fill] * (width - len(row)) for row in base[name]]
            for name, fill in zip(names, junk, strict=True)
        }
        yield [base | padded]
    lengths = [max(t for t, flag in enumerate(row) if flag) + 1 for row in base["token_mask"]]
    plan = pack_rows(lengths, sum(lengths))
    packed = {name: plan.pack(array(base[name]), 0.0).tolist() for name in names}
    yield [packed | {"sample_mask": [1.0], "segment_ids": plan.segment_ids.tolist()}]


@of_kind("config_error")
def test_refused_naming_the_key(case):
    given = {name: value for name, value in case["inputs"].items() if name != "config"}
    alternatives = [
        {name: value} for name, values in given.items() if isinstance(values, list) for value in values
    ] or [{}]
    together = {name: value for name, value in given.items() if not isinstance(value, list)}
    for alternative in alternatives:
        with pytest.raises(ConfigError, match=case["expected"]["message_names_key"]):
            config_of(case["options"] | together | alternative)


def advantages_of(case, dtype):
    inputs = case["inputs"]
    rewards = array(inputs["rewards"]).astype(str(dtype).removeprefix("torch."))
    ids = next(inputs[name] for name in ("group_ids", "group_index", "groups", "ids") if name in inputs)
    usable = np.array([reward.unusable is None for reward in read_rewards(rewards, len(rewards), "the table")])
    return group_advantages(
        rewards,
        np.unique(ids, return_inverse=True)[1],
        usable & (array(inputs.get("sample_mask", [1] * len(rewards))) > 0),
        leave_one_out=inputs["leave_one_out"],
        normalize=inputs.get("normalise", inputs.get("normalize", False)),
    )


@of_kind("advantages")
@in_both_dtypes
def test_advantages(case, dtype):
    found = advantages_of(case, dtype).tolist()
    assert found == near(case["expected"]["advantages"], case, dtype)
    assert max(map(abs, found)) <= case["expected"].get("max_abs", math.inf)
    assert_not_wrong(found, case)


@of_kind("advantages_choice")
@in_both_dtypes
def test_advantages_go_by_group_id(case, dtype):
    choices = case["expected"].get("advantages", case["expected"])
    if isinstance(choices, dict):
        choices = next(value for name, value in choices.items() if "id" in name and isinstance(value, list))
    found = advantages_of(case, dtype).tolist()
    assert found == near(choices, case, dtype)
    assert_not_wrong(found, case)


def test_every_kind_of_the_tables_is_run():
    known = {"loss", "loss_any_of", "micro_batches", "dp_ranks", "invariance"}
    known |= {"config_error", "advantages", "advantages_choice"}
    assert {case["kind"] for case in CASES} == known
