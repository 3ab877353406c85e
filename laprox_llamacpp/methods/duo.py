"""DuoAttention."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import duo_profile
from ..observed import ObservedPrompt
from ..parts.alloc import Kept
from ..parts.options import int_at_least
from ..policy import EvictionPolicy


@dataclass(frozen=True)
class Duo(EvictionPolicy, name="duo"):
    """DuoAttention (arXiv 2410.10819): heads that retrieve keep every position, the others sinks and recent positions.

    A profile of the model ranks its heads; `laprox-llamacpp calibrate duo MODEL` makes one from the attention of a
    passkey test, where the paper trains a gate for each head. The budget, not a threshold, decides how many heads
    retrieve: the best ones as far as it reaches, and the next one with what is left over.

    Args:
        protect_sinks: first positions of a streaming head, 128.
        recent: its last positions, the window among them, 256; never less than the window.
        profile: path of the profile; empty: the one that `calibrate` made for this very model file.
    """

    protect_sinks: int = 128
    recent: int = 256
    profile: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        int_at_least("protect_sinks", self.protect_sinks, 0)
        int_at_least("recent", self.recent, 0)
        if not isinstance(self.profile, str):
            raise ValueError(f"profile is {self.profile!r}, expected the path of a file as a str")

    def check_model(self, model_path: str) -> None:
        """Raise ValueError when there is no profile of this model, in one line that says how to make it."""
        self._profile(model_path)

    def keep(self, prompt: ObservedPrompt, k: int) -> Kept:
        """Sinks and recent candidates of each head, all of them in a retrieval head; see `rows_per_head`."""
        profile = self._profile(prompt.model_path)
        if profile.heads_per_layer() != prompt.n_head_kv:
            raise ValueError(
                f"the duo profile of {profile.model} has {len(profile.heads)} heads in "
                f"{len(profile.heads_per_layer())} layers, not the {prompt.n_heads} in {len(prompt.n_head_kv)} that "
                "are evicted here; calibrate again"
            )
        sinks, streaming = self._streaming(prompt, k)
        order = np.argsort(-np.array(profile.scores()), kind="stable")
        counts = np.full(prompt.n_heads, streaming)
        spare = prompt.n_heads * (k + prompt.window - streaming)
        for head in order[: -(-spare // max(1, prompt.n_prompt - streaming))]:
            counts[head] += min(spare, prompt.n_prompt - streaming)
            spare -= counts[head] - streaming
        return [self._ends(prompt, sinks, int(n) - prompt.window) for n in counts]

    def _streaming(self, prompt: ObservedPrompt, k: int) -> tuple[int, int]:
        """Sinks and rows, window included, of a streaming head."""
        recent = max(self.recent, prompt.window)
        due = min(self.protect_sinks + recent, prompt.n_prompt)
        if k + prompt.window >= due:
            return self.protect_sinks, due
        sinks = min(k, (k + prompt.window) * self.protect_sinks // (self.protect_sinks + recent))
        prompt.note = (
            f"budget of {k + prompt.window} rows per head is less than the {due} of a streaming head: every head "
            f"streams, with {sinks} sinks and {k + prompt.window - sinks} recent positions"
        )
        return sinks, k + prompt.window

    @staticmethod
    def _ends(prompt: ObservedPrompt, sinks: int, n: int) -> npt.NDArray[np.int32]:
        """The first `sinks` and the last of the candidates, `n` in all."""
        first = min(sinks, n)
        last = np.arange(prompt.n_cand - (n - first), prompt.n_cand)
        return np.concatenate([np.arange(first), last]).astype(np.int32)

    def _profile(self, model_path: str) -> duo_profile.Profile:
        mark = duo_profile.fingerprint(model_path)
        path = self.profile or str(duo_profile.default_path(mark))
        command = f"laprox-llamacpp calibrate duo {shlex.quote(model_path)}"
        advice = f"make one with: {command}" + (f" --out {shlex.quote(path)}" if self.profile else "")
        if not os.path.exists(path):
            where = f" at {path}" if self.profile else ""
            raise ValueError(f"no duo profile for {model_path}{where}; {advice}")
        try:
            profile = duo_profile.load(path)
        except ValueError as e:
            raise ValueError(f"{e}; {advice}") from e
        if profile.fingerprint != mark:
            raise ValueError(
                f"the duo profile {path} is of another model file ({profile.model}), not of {model_path}; leave it "
                f"alone and make another with: {command} --out FILE"
            )
        return profile
