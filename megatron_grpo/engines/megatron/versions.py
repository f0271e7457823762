"""Which weight version produced each generated token, from the spans that the engine stamps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_versions(spans: Sequence[Sequence[int]], prompt_length: int, num_generated: int) -> np.ndarray:
    """Versions int32 [num_generated] from `spans`, the engine's (boundary, version) pairs in order of time.

    A boundary is an INPUT position: the token that was the last one known when the version changed. The next token is
    predicted from that input by the new weights, so the token at index t has the last version whose boundary is at
    most t - 1. Example: prompt 20, version 2 set after 40 generated tokens -> boundary 59; generated token 40 (t = 60)
    is the first of version 2, token 39 (t = 59) the last of the version before.
    """
    boundaries = np.asarray([boundary for boundary, _ in spans])
    versions = np.asarray([version for _, version in spans], dtype=np.int32)
    inputs = prompt_length - 1 + np.arange(num_generated)
    # side="right": of two changes at one position (none generated between them) the later one counts.
    return versions[np.searchsorted(boundaries, inputs, side="right") - 1]
