"""The options of the objective, checked once: recipe section `loss_fn` -> `LossConfig`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import ConfigError
from .kl import KL_TYPES, KLType

Level = Literal["token", "sequence"]
Truncation = Literal["tis", "icepop", "seq-mask-tis"]
TRUNCATIONS: tuple[Truncation, ...] = ("tis", "icepop", "seq-mask-tis")


class LossSection(Protocol):
    """The attributes read from the recipe's `loss_fn` section."""

    ratio_clip_min: float
    ratio_clip_max: float
    ratio_clip_c: float | None
    use_cispo: bool
    token_level_loss: bool
    reference_policy_kl_penalty: float
    reference_policy_kl_type: KLType
    kl_input_clamp_value: float | None
    kl_output_clamp_value: float | None
    use_importance_sampling_correction: bool
    truncated_importance_sampling_type: Truncation | None
    truncated_importance_sampling_ratio: float | None
    truncated_importance_sampling_ratio_min: float | None
    sequence_level_importance_ratios: bool
    entropy_coef: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Options of the objective, under their recipe names.

    `ratio_level` and `is_level` say over what the ratio (mean over the sequence) and the importance weight (sum) are
    taken; the recipe's `sequence_level_importance_ratios` sets both. Raises ConfigError naming every bad key.
    """

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    ratio_level: Level = "token"
    use_cispo: bool = False
    token_level_loss: bool = True
    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: KLType = "k3"
    kl_input_clamp_value: float | None = None
    kl_output_clamp_value: float | None = None
    use_importance_sampling_correction: bool = False
    is_level: Level = "token"
    truncated_importance_sampling_type: Truncation | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    entropy_coef: float = 0.0

    @classmethod
    def from_recipe(cls, section: LossSection) -> LossConfig:
        level: Level = "sequence" if section.sequence_level_importance_ratios else "token"
        return cls(
            ratio_clip_min=section.ratio_clip_min,
            ratio_clip_max=section.ratio_clip_max,
            ratio_clip_c=section.ratio_clip_c,
            ratio_level=level,
            use_cispo=section.use_cispo,
            token_level_loss=section.token_level_loss,
            reference_policy_kl_penalty=section.reference_policy_kl_penalty,
            reference_policy_kl_type=section.reference_policy_kl_type,
            kl_input_clamp_value=section.kl_input_clamp_value,
            kl_output_clamp_value=section.kl_output_clamp_value,
            use_importance_sampling_correction=section.use_importance_sampling_correction,
            is_level=level,
            truncated_importance_sampling_type=section.truncated_importance_sampling_type,
            truncated_importance_sampling_ratio=section.truncated_importance_sampling_ratio,
            truncated_importance_sampling_ratio_min=section.truncated_importance_sampling_ratio_min,
            entropy_coef=section.entropy_coef,
        )

    def __post_init__(self) -> None:
        problems = [*self._range_problems(), *self._choice_problems(), *self._truncation_problems()]
        if problems:
            raise ConfigError([f"loss_fn.{problem}" for problem in problems])

    @property
    def uses_reference(self) -> bool:
        return self.reference_policy_kl_penalty > 0

    @property
    def uses_entropy(self) -> bool:
        return self.entropy_coef > 0

    def _range_problems(self) -> Iterator[str]:
        if self.ratio_clip_c is not None and not (self.ratio_clip_c > 1 and math.isfinite(self.ratio_clip_c)):
            yield f"ratio_clip_c must be > 1 (it bounds the ratio where the advantage is negative): {self.ratio_clip_c}"
        for key, value in (
            ("ratio_clip_min", self.ratio_clip_min),
            ("ratio_clip_max", self.ratio_clip_max),
            ("reference_policy_kl_penalty", self.reference_policy_kl_penalty),
            ("entropy_coef", self.entropy_coef),
        ):
            if not (value >= 0 and math.isfinite(value)):
                yield f"{key} must be a finite number >= 0: {value}"
        for key, clamp in (
            ("kl_input_clamp_value", self.kl_input_clamp_value),
            ("kl_output_clamp_value", self.kl_output_clamp_value),
        ):
            if clamp is not None and not clamp > 0:
                yield f"{key} must be > 0 or null: {clamp}"

    def _choice_problems(self) -> Iterator[str]:
        for key, value, choices in (
            ("reference_policy_kl_type", self.reference_policy_kl_type, KL_TYPES),
            ("truncated_importance_sampling_type", self.truncated_importance_sampling_type, (None, *TRUNCATIONS)),
            ("ratio_level", self.ratio_level, ("token", "sequence")),
            ("is_level", self.is_level, ("token", "sequence")),
        ):
            if value not in choices:
                yield f"{key} must be one of {', '.join(map(str, choices))}: {value}"

    def _truncation_problems(self) -> Iterator[str]:
        kind, upper = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        lower = self.truncated_importance_sampling_ratio_min
        if kind is None:
            for key, value in (("ratio", upper), ("ratio_min", lower)):
                if value is not None:
                    yield (
                        f"truncated_importance_sampling_{key} is {value} but truncated_importance_sampling_type is "
                        f"not set: choose one of {', '.join(TRUNCATIONS)} or remove the {key.replace('_', ' ')}"
                    )
            return
        if upper is None or not upper > 0:
            yield f"truncated_importance_sampling_ratio (type {kind}) must be > 0: {upper}"
        elif lower is not None and not 0 <= lower <= upper:
            yield (
                f"truncated_importance_sampling_ratio_min must be between 0 and "
                f"truncated_importance_sampling_ratio {upper}: {lower}"
            )
