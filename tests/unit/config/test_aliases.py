"""Two names of one setting."""

from megatron_grpo.config.aliases import unify

CLIP, NORM = ("policy", "megatron_cfg", "optimizer", "clip_grad"), ("policy", "max_grad_norm")
PRECISION, BF16 = ("policy", "precision"), ("policy", "megatron_cfg", "optimizer", "bf16")


def policy(**values):
    optimizer = {key: values.pop(key) for key in ("clip_grad", "bf16", "weight_decay") if key in values}
    megatron = {"optimizer": optimizer} if optimizer else {}
    return {"policy": {**values, "megatron_cfg": megatron}}


def clip_of(unified):
    section = unified.values["policy"]
    return section["megatron_cfg"]["optimizer"]["clip_grad"], section["max_grad_norm"]


def test_one_name_sets_both():
    assert clip_of(unify(policy(max_grad_norm=0.5), {NORM: 0})) == (0.5, 0.5)
    assert clip_of(unify(policy(clip_grad=0.5), {CLIP: 0})) == (0.5, 0.5)


def test_the_later_layer_decides():
    unified = unify(policy(clip_grad=1.0, max_grad_norm=0.5), {CLIP: 0, NORM: 1})
    assert clip_of(unified) == (0.5, 0.5) and unified.problems == ()


def test_two_values_in_one_layer_are_refused_naming_both():
    [(_, problem)] = unify(policy(clip_grad=1.0, max_grad_norm=0.5), {CLIP: 1, NORM: 1}).problems
    assert "policy.megatron_cfg.optimizer.clip_grad = 1.0" in problem and "policy.max_grad_norm = 0.5" in problem


def test_the_same_value_twice_is_fine():
    assert unify(policy(clip_grad=0.5, max_grad_norm=0.5), {CLIP: 1, NORM: 1}).problems == ()


def test_advantage_settings_have_second_names():
    given = {"grpo": {"adv_estimator": {"normalize_rewards": False, "use_leave_one_out_baseline": False}}}
    last = {("grpo", "adv_estimator", key): 0 for key in ("normalize_rewards", "use_leave_one_out_baseline")}
    grpo = unify(given, last).values["grpo"]
    assert grpo["normalize_rewards"] is False and grpo["use_leave_one_out_baseline"] is False


def test_dtypes_follow_the_precision():
    section = unify(policy(precision="float32"), {PRECISION: 0}).values["policy"]
    assert section["megatron_cfg"]["pipeline_dtype"] == "float32"
    assert section["megatron_cfg"]["optimizer"]["bf16"] is False
    assert section["generation"]["vllm_cfg"]["precision"] == "float32"


def test_an_inherited_dtype_follows_a_later_precision():
    unified = unify(policy(precision="float32", bf16=True), {PRECISION: 1, BF16: 0})
    assert unified.problems == () and unified.values["policy"]["megatron_cfg"]["optimizer"]["bf16"] is False


def test_a_dtype_that_contradicts_the_precision_is_refused():
    [(key, problem)] = unify(policy(bf16=False), {BF16: 0}).problems
    assert key == BF16 and "policy.precision" in problem and "bfloat16" in problem
    assert unify(policy(precision="float32", bf16=True), {PRECISION: 0, BF16: 0}).problems


def test_a_weight_decay_schedule_is_refused():
    last = {("policy", "megatron_cfg", "scheduler", "end_weight_decay"): 0}
    given = {"policy": {"megatron_cfg": {"scheduler": {"end_weight_decay": 0.2}}}}
    [(_, problem)] = unify(given, last).problems
    assert "policy.megatron_cfg.optimizer.weight_decay" in problem


def test_the_dtype_of_a_backend_that_does_not_generate_is_inert():
    key = ("policy", "generation", "vllm_cfg", "precision")
    given = {"policy": {"precision": "float32", "generation": {"vllm_cfg": {"precision": "bfloat16"}}}}
    assert unify(given, {key: 0, PRECISION: 0}).problems == ()
    given["policy"]["generation"]["backend"] = "vllm"
    assert [found for found, _ in unify(given, {key: 0, PRECISION: 0}).problems] == [key]
