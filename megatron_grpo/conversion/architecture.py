"""What a Hugging Face `config.json` says of a model, in one type for every family; and back to such a configuration.

Knows no weights and neither torch nor Megatron. `FAMILIES` lists the known values of `model_type`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConversionError

CONFIG_NAME = "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What distinguishes a family; None as a default: derived, or required."""

    class_name: str
    query_key_norm: bool = False
    query_key_value_bias: bool = False
    has_experts: bool = False
    default_kv_heads: int | None = None
    default_head_dim: int | None = None


FAMILIES: dict[str, Traits] = {
    "llama": Traits(class_name="LlamaForCausalLM"),
    "qwen2": Traits(class_name="Qwen2ForCausalLM", query_key_value_bias=True, default_kv_heads=32),
    "qwen3": Traits(class_name="Qwen3ForCausalLM", query_key_norm=True, default_kv_heads=32, default_head_dim=128),
    "qwen3_moe": Traits(
        class_name="Qwen3MoeForCausalLM", query_key_norm=True, has_experts=True, default_kv_heads=4
    ),
}

# Options that change the mathematics and that no family here implements, at the value that leaves them off.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, 0.0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, 1.0, None),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaRopeScaling:
    """Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRopeScaling:
    factor: float


RopeScaling = LlamaRopeScaling | LinearRopeScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """`num` experts of width `intermediate_size` in the layers `layers`; each token uses `per_token` of them."""

    num: int
    per_token: int
    intermediate_size: int
    normalise_top_k: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Layers are counted as Hugging Face does: attention and MLP together are one."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    tied: bool
    experts: Experts | None

    @property
    def traits(self) -> Traits:
        return FAMILIES[self.family]

    @property
    def pattern(self) -> str:
        """A symbol per Megatron layer: `*` attention, `-` MLP, `E` experts.  E.g. 2 dense layers -> `*-*-`."""
        sparse = self.experts.layers if self.experts else ()
        return "".join("*E" if number in sparse else "*-" for number in range(self.num_layers))


def read_config(directory: Path) -> dict[str, Any]:
    """The values of `directory`/config.json. Raises ConversionError naming the file."""
    path = directory / CONFIG_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is not a Hugging Face model directory" if directory.is_dir() else "does not exist"
        raise ConversionError(f"{directory} {what}: there is no {path}") from None
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConversionError(f"{path} is not a JSON object")
    return values


def architecture_of(config: Mapping[str, Any], source: str = CONFIG_NAME) -> Architecture:
    """Raises ConversionError, naming `source` and the key: an unknown family, a missing size, an option that changes
    the mathematics in a way not implemented here."""
    return _Reader(config, source).architecture()


class _Reader:
    def __init__(self, config: Mapping[str, Any], source: str):
        self._config = config
        self._source = source

    def architecture(self) -> Architecture:
        family = self._config.get("model_type")
        if family not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ConversionError(f"{self._source}: model_type {family!r} is no known family (known: {known})")
        self._refuse_unsupported()
        traits, heads = FAMILIES[family], self._int("num_attention_heads")
        hidden = self._int("hidden_size")
        num_layers = self._int("num_hidden_layers")
        return Architecture(
            family=family,
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._int("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=self._int("num_key_value_heads", default=traits.default_kv_heads or heads),
            head_dim=self._int("head_dim", default=traits.default_head_dim or hidden // heads),
            norm_eps=float(self._config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(self._rope().get("rope_theta", 10000.0)),
            rope_scaling=self._rope_scaling(),
            max_positions=self._int("max_position_embeddings", default=2048),
            tied=bool(self._config.get("tie_word_embeddings", False)),
            experts=self._experts(num_layers) if traits.has_experts else None,
        )

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise ConversionError(f"{self._source}: {key} is {value!r}, a positive number is needed")
        return value

    def _refuse_unsupported(self) -> None:
        for key, neutral in UNSUPPORTED.items():
            value = self._config.get(key)
            if not any(value == item for item in neutral):
                raise ConversionError(f"{self._source}: {key}: {value!r} is not supported, only {neutral[0]!r} is")

    def _rope(self) -> Mapping[str, Any]:
        """transformers 5 writes `rope_parameters`; before, `rope_theta` beside a `rope_scaling` that may be null."""
        newer = self._config.get("rope_parameters")
        if newer is not None:
            return newer
        base = {"rope_theta": self._config["rope_theta"]} if self._config.get("rope_theta") else {}
        return {**(self._config.get("rope_scaling") or {}), **base}

    def _rope_scaling(self) -> RopeScaling | None:
        rope = self._rope()
        kind = rope.get("rope_type", rope.get("type", "default"))
        fields = {"llama3": LlamaRopeScaling, "linear": LinearRopeScaling}
        if kind in (None, "default"):
            return None
        if kind not in fields:
            raise ConversionError(f"{self._source}: rope scaling {kind!r} is not supported (default, linear, llama3)")
        try:
            return fields[kind](**{name: rope[name] for name in fields[kind].__dataclass_fields__})
        except KeyError as missing:
            raise ConversionError(f"{self._source}: rope scaling {kind} lacks {missing}") from None

    def _experts(self, num_layers: int) -> Experts:
        step, dense = self._int("decoder_sparse_step", default=1), self._config.get("mlp_only_layers") or ()
        sparse = [n for n in range(num_layers) if n not in dense and (n + 1) % step == 0]
        return Experts(
            num=self._int("num_experts"),
            per_token=self._int("num_experts_per_tok"),
            intermediate_size=self._int("moe_intermediate_size"),
            normalise_top_k=bool(self._config.get("norm_topk_prob", False)),
            layers=tuple(sparse),
        )


def config_of(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """A `config.json` for a model that never had one; `architecture_of` reads the same architecture from it."""
    values: dict[str, Any] = {
        "architectures": [architecture.traits.class_name],
        "model_type": architecture.family,
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": architecture.norm_eps,
        "rope_theta": architecture.rope_theta,
        "max_position_embeddings": architecture.max_positions,
        "tie_word_embeddings": architecture.tied,
        "attention_bias": False,
        "torch_dtype": dtype,
    }
    scaling = architecture.rope_scaling
    if scaling is not None:
        kind = "llama3" if isinstance(scaling, LlamaRopeScaling) else "linear"
        fields = {name: getattr(scaling, name) for name in scaling.__dataclass_fields__}
        values["rope_scaling"] = {"rope_type": kind, **fields}
    if architecture.experts is not None:
        experts = architecture.experts
        values |= {
            "num_experts": experts.num,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalise_top_k,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [n for n in range(architecture.num_layers) if n not in experts.layers],
        }
    return values
