"""LaProx."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..observed import ObservedPrompt
from ..parts.options import one_of
from ..ranked import Attended, Scores

_REACH: dict[str, Any] = dict(
    attention="max", pool="reach12:0.3", normalize="residual", alloc="model", protect_sinks=4
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "reach": _REACH,
    "l2": {**_REACH, "attention": "l2"},
    "paper": dict(attention="l2", pool="avg7", normalize="layer_sum", alloc="model", protect_sinks=0),
}


@dataclass(frozen=True)
class LaProx(Attended, name="laprox"):
    """LaProx (arXiv 2605.07234): an entry counts by the norm of the term that it adds to the layer's output.

    Entry i of a KV head scores ||A_h[:, i]|| * ||v_i W_O^h|| (Algorithm 1), and the model-wide best stay (Algorithm 2).

    Args:
        preset: "reach" (default), "l2" (the same with the paper's column norm) or "paper" (Algorithms 1 and 2); it
            gives the defaults of attention, pool, normalize, alloc and protect_sinks.
        score: "product" as above, or "output_norm": ||sum_h a_h(i) v_i W_O^h||_2, one score for the heads of a layer,
            with attention "sum" unless told otherwise.

    `dataclasses.replace` keeps what the preset has given; parse a spec to change the preset.
    """

    attention: str = "preset"
    value: str = "l2"
    pool: str = "preset"
    normalize: str = "preset"
    alloc: str = "preset"
    protect_sinks: int = -1  # -1: the preset's
    preset: str = "reach"
    score: str = "product"

    def __post_init__(self) -> None:
        one_of("preset", self.preset, tuple(PRESETS))
        one_of("score", self.score, ("product", "output_norm"))
        defaults = self._defaults()
        for name in PRESETS[self.preset]:
            if getattr(self, name) in ("preset", -1):
                object.__setattr__(self, name, defaults[name])
        super().__post_init__()
        if self.score == "output_norm" and (self.pool_on != "score" or self.value != "l2"):
            raise ValueError(
                "score=output_norm is the norm of the heads' sum: pool_on and value have no place in it, leave them out"
            )

    def _defaults(self) -> dict[str, Any]:
        defaults = {f.name: f.default for f in fields(self)} | PRESETS[self.preset]
        return defaults | ({"attention": "sum"} if self.score == "output_norm" else {})

    def scores(self, prompt: ObservedPrompt) -> Scores:
        """As `score` says, [n_heads, n_cand]."""
        if self.score == "output_norm":
            return prompt.score(self.attention, "output", self.gqa)
        return super().scores(prompt)
