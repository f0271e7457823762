"""The folder from which vLLM learns what model it runs: `config.json`, and the tokenizer where text ends completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...config.policy_schema import ModelArchitecture

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM"}


def write_model_folder(
    folder: Path, shape: ModelArchitecture, *, vocab_size: int, eos_id: int, pad_id: int, dtype: str
) -> None:
    """A Hugging Face model directory without weights. `vocab_size` counts the tokenizer's ids: none is padding."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(shape, vocab_size) | {"eos_token_id": eos_id, "pad_token_id": pad_id, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def hf_config(shape: ModelArchitecture, vocab_size: int) -> dict[str, Any]:
    same = (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    )  # fmt: skip
    return {
        "architectures": [ARCHITECTURES[shape.model_type]],
        **{key: getattr(shape, key) for key in same},
        "rope_theta": shape.rope_theta,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
    }
