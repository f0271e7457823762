"""Building blocks of the schema: the frozen section class and the constrained number types."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One mapping of a recipe. Frozen; unknown keys are refused; nothing is converted (`true` is not 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Item = TypeVar("Item")
Items = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]  # YAML writes lists, a frozen recipe holds tuples

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what every generator in use accepts
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
