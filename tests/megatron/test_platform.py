"""The CPU adapter: what it must leave alone, when it may be installed, and which device a recipe gets."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_grpo.errors import ConfigError
from megatron_grpo.platform import code_literals, cpu
from megatron_grpo.platform.device import CPU, choose_accelerator
from tests.megatron.qwen3_reference import CONFIG, ROPE_THETA, sample_tokens
from tests.megatron.samples import build_policy, tiny_recipe
from tests.megatron.world import run_world


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """transformers' results without and with the adapter, each from a process of its own."""
    folder = tmp_path_factory.mktemp("qwen3")
    outputs = {"plain": folder / "plain.npz", "adapter": folder / "adapter.npz"}
    script = [sys.executable, "-W", "ignore", "-m", "tests.megatron.qwen3_reference"]
    processes = [
        subprocess.Popen([*script, folder / "saved", outputs["plain"]]),
        subprocess.Popen([*script, folder / "saved_with_adapter", outputs["adapter"], "--adapter"]),
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {name: dict(np.load(output)) for name, output in outputs.items()}


def test_transformers_computes_the_same_with_the_adapter_installed(qwen3):
    assert qwen3["plain"].keys() == qwen3["adapter"].keys()
    for name, value in qwen3["plain"].items():
        np.testing.assert_array_equal(qwen3["adapter"][name], value, err_msg=name)
    exponents = np.arange(0, CONFIG["head_dim"], 2) / CONFIG["head_dim"]
    np.testing.assert_allclose(qwen3["adapter"]["inv_freq"], ROPE_THETA**-exponents, rtol=1e-6)


def megatron_layout(arrays: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """transformers' Qwen3 weights (or gradients) under Megatron's names and in its layout, mapped by hand."""
    of = {name.removeprefix(f"{kind}."): value for name, value in arrays.items() if name.startswith(f"{kind}.")}
    mapped = {
        "embedding.word_embeddings.weight": of["model.embed_tokens.weight"],
        "decoder.final_norm.weight": of["model.norm.weight"],
        "output_layer.weight": of["lm_head.weight"],
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        source = f"model.layers.{layer}"
        attention, mlp = f"decoder.layers.{2 * layer}", f"decoder.layers.{2 * layer + 1}"
        mapped |= {
            f"{attention}.input_layernorm.weight": of[f"{source}.input_layernorm.weight"],
            f"{attention}.self_attention.linear_qkv.weight": grouped_qkv(of, f"{source}.self_attn"),
            f"{attention}.self_attention.linear_proj.weight": of[f"{source}.self_attn.o_proj.weight"],
            f"{attention}.self_attention.q_layernorm.weight": of[f"{source}.self_attn.q_norm.weight"],
            f"{attention}.self_attention.k_layernorm.weight": of[f"{source}.self_attn.k_norm.weight"],
            f"{mlp}.pre_mlp_layernorm.weight": of[f"{source}.post_attention_layernorm.weight"],
            f"{mlp}.mlp.linear_fc1.weight": np.concatenate(
                [of[f"{source}.mlp.gate_proj.weight"], of[f"{source}.mlp.up_proj.weight"]]
            ),
            f"{mlp}.mlp.linear_fc2.weight": of[f"{source}.mlp.down_proj.weight"],
        }
    return mapped


def grouped_qkv(of: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    """Rows in groups of one key-value head: its queries, its key, its value."""
    groups, dim = CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    parts = [of[f"{prefix}.{name}_proj.weight"].reshape(groups, -1, dim, CONFIG["hidden_size"]) for name in "qkv"]
    return np.concatenate(parts, 1).reshape(-1, CONFIG["hidden_size"])


def load_and_differentiate(seat, weights):
    from megatron_grpo.engines.megatron.forward import Scoring, logits_of, scores_of_tokens

    module = build_policy(seat, tiny_recipe()).module
    parameters = dict(module.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name][: len(value)] = torch.from_numpy(value)
    tokens = sample_tokens()
    logprobs = scores_of_tokens(logits_of(module, tokens), tokens, Scoring(temperature=1.0)).logprobs[:, 1:]
    (-logprobs.mean()).backward()
    gradients = {name: parameters[name].main_grad[: len(value)].numpy() for name, value in weights.items()}
    return logprobs.detach().numpy(), gradients


def test_the_model_equals_transformers_qwen3(qwen3):
    plain = qwen3["plain"]
    ((logprobs, gradients),) = run_world(load_and_differentiate, megatron_layout(plain, "weight"))
    np.testing.assert_allclose(logprobs, plain["logprobs"], atol=2e-5)
    for name, expected in megatron_layout(plain, "gradient").items():
        assert np.abs(gradients[name] - expected).max() < 2e-5 * max(np.abs(expected).max(), 1e-3), name


def test_installing_twice_changes_nothing():
    assert cpu.installed()
    before = torch.cuda.current_device
    cpu.install()
    assert torch.cuda.current_device is before


def test_factories_of_torch_are_left_alone():
    from torch.utils._device import _device_constructors

    assert torch.tensor in _device_constructors() and torch.empty in _device_constructors()
    with torch.device("meta"):
        assert torch.arange(3).is_meta and torch.tensor([1.0]).is_meta


def test_the_adapter_is_refused_after_megatron(monkeypatch):
    monkeypatch.setattr(cpu, "_installed", False)
    assert "megatron.core" in sys.modules
    with pytest.raises(RuntimeError, match="must run before the first import of megatron"):
        cpu.install()


def test_nothing_is_touched_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu.install()
    assert not cpu.installed()


def test_literals_of_a_module_are_replaced_and_a_stale_entry_is_noticed():
    import types

    module = types.ModuleType("sample")
    code = (
        "def build():\n    def inner():\n        return 'cuda', 'torch.cuda.FloatTensor'\n    return inner()\n"
        "class Sorter:\n    @staticmethod\n    def accepts(kind):\n"
        "        return kind in ['torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor']\n"
        "def keep():\n    return 'cudart', 'torch.cuda.synchronize'\n"
    )
    exec(code, module.__dict__)  # noqa: S102
    code_literals.retarget(module)
    assert module.build() == ("cpu", "torch.FloatTensor")
    assert module.Sorter.accepts("torch.BFloat16Tensor") and not module.Sorter.accepts("torch.cuda.HalfTensor")
    assert module.keep() == ("cudart", "torch.cuda.synchronize")
    with pytest.raises(LookupError, match="sample has no CUDA literal"):
        code_literals.retarget(module)


def test_auto_takes_cuda_where_torch_sees_it_and_the_cpu_where_nothing_was_granted():
    chosen = choose_accelerator("auto", local_rank=5, environ={"CUDA_VISIBLE_DEVICES": "0,1"}, cuda_devices=4)
    assert chosen.device == torch.device("cuda", 1) and chosen.backend == "nccl"
    assert choose_accelerator("auto", environ={}, cuda_devices=0) == CPU
    assert choose_accelerator("cpu", environ={"SLURM_GPUS_ON_NODE": "4"}, cuda_devices=4) == CPU
    for nothing in ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"SLURM_GPUS_ON_NODE": "0"}):
        assert choose_accelerator("auto", environ=nothing, cuda_devices=0) == CPU


@pytest.mark.parametrize(
    "environment",
    [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"SLURM_GPUS_ON_NODE": "4"},
        {"SLURM_JOB_GPUS": "0"},
        {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""},
    ],
)
def test_auto_never_falls_back_to_the_cpu_where_gpus_were_granted(environment):
    with pytest.raises(ConfigError, match="=".join(next(iter(environment.items())))):
        choose_accelerator("auto", environ=environment, cuda_devices=0)


def test_cuda_is_refused_without_a_device_and_unknown_words_always():
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_accelerator("cuda", environ={}, cuda_devices=0)
    with pytest.raises(ConfigError, match="'tpu'"):
        choose_accelerator("tpu", environ={}, cuda_devices=0)
