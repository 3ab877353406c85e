"""What `Llama.kv_stats()` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


def mib(n_bytes: int) -> str:
    """Bytes as MiB with one decimal."""
    return f"{n_bytes / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class KVStats:
    """State of the KV cache. A row is the K and V of one position in one KV head of one layer; times are in ms."""

    policy: str = "off"
    budget: str = ""
    evicted: bool = False
    n_tokens: int = 0  # positions in the cache, evicted ones included
    n_prompt: int = 0  # N at the last eviction, 0: none
    n_window: int = 0  # w, always kept
    rows_full: int = 0  # rows before the last eviction
    rows_kept: int = 0  # rows right after it, window included
    layers: tuple[int, ...] = ()  # model layers that can be evicted
    n_layers_untouched: int = 0  # layers that keep a cache of their own (sliding window)
    kept_per_head: npt.NDArray[np.int32] = field(
        default_factory=lambda: np.zeros((0, 0), np.int32)
    )  # [len(layers), n_head_kv] rows right after the eviction, window included; -1: the layer has fewer heads
    bytes_full: int = 0  # K and V of the prompt in the evictable layers, uncut
    bytes_peak: int = 0  # most KV bytes that this context ever held
    bytes_now: int = 0  # KV bytes held now, all layers
    bytes_other: int = 0  # part of bytes_now in untouched layers
    bytes_reserve: int = 0  # part of bytes_now that waits for new tokens
    bytes_pages: int = 0  # tables of page selection, on top of bytes_now
    rows_read: int = 0  # page selection: rows that the last one-token step read, once per KV head
    rows_dense: int = 0  # rows that it would have read without
    n_grown: int = 0  # times that this reserve was grown
    devices: tuple[str, ...] = ()  # where the rows of evictable layers are, and what is computed with them
    score_path: str = ""  # last scores: "fused" (our op), "composed" (of stock ops), "mixed" by layer, "" (none)
    attention_path: str = ""  # decode steps after an eviction: "per_head" (a node each), "ragged_op" (one), "mixed"
    gram_ms: float = 0.0  # Gram matrices of W_O, once per context
    all_queries_ms: float = 0.0  # attention sums over every prompt query, for the methods that need them
    score_ms: float = 0.0
    plan_ms: float = 0.0  # pooling, allocation, selection
    commit_ms: float = 0.0
    prefill_tps: float = 0.0  # tokens per second of the last prompt, scoring included
    decode_tps: float = 0.0  # tokens per second, one at a time, since that prompt
    note: str | None = None  # why a budget could not be met
    fallback: str | None = None  # why a prompt could not be evicted and went on with the full cache

    def __repr__(self) -> str:
        lines = [f"KVStats(policy={self.policy!r}, budget={self.budget!r})"]
        if self.policy != "off":
            lines += self._lines()
        return "\n".join(lines)

    def _lines(self) -> list[str]:
        held = mib(self.bytes_now)
        if self.bytes_reserve:
            held += f" ({mib(self.bytes_reserve)} of it room for new tokens)"
        lines = [
            f"  tokens   {self.n_tokens} in the cache",
            f"  bytes    {held}, peak {mib(self.bytes_peak)}",
        ]
        if self.evicted:
            per_head = self.kept_per_head[self.kept_per_head >= 0]
            lines[0] += f", prompt {self.n_prompt}, window {self.n_window}"
            lines[1] += f", the prompt uncut {mib(self.bytes_full)}"
            lines += [
                f"  kept     {self.rows_kept} of {self.rows_full} rows ({self.rows_kept / self.rows_full:.1%}), "
                f"per head min {per_head.min()} mean {per_head.mean():.0f} max {per_head.max()}",
                f"  layers   {len(self.layers)} evicted, {self.n_layers_untouched} untouched",
                f"  ms       score {self.score_ms:.1f}, plan {self.plan_ms:.1f}, move {self.commit_ms:.1f}, "
                f"gram (once) {self.gram_ms:.1f}"
                + (f", every prompt query {self.all_queries_ms:.1f}" if self.all_queries_ms else ""),
            ]
        else:
            lines.append("  kept     everything: nothing has been evicted")
        if self.rows_dense:
            lines.append(
                f"  read     {self.rows_read} of {self.rows_dense} rows in the last step "
                f"({self.rows_read / self.rows_dense:.1%}), page tables {mib(self.bytes_pages)}"
            )
        if self.devices not in ((), ("CPU",)):
            lines.append(
                f"  device   {', '.join(self.devices)}: scores {self.score_path or 'none'}, "
                f"attention of decode steps {self.attention_path}"
            )
        lines.append(f"  tokens/s prompt {self.prefill_tps:.1f}, decode {self.decode_tps:.1f}")
        if self.note is not None:
            lines.append(f"  note     {self.note}")
        if self.fallback is not None:
            lines.append(f"  fallback {self.fallback}")
        return lines

    def one_line(self) -> str:
        """The same in one line, for a log or a command's last line."""
        if self.policy == "off":
            return f"kv: {self.n_tokens} tokens, eviction off"
        speed = f"{self.decode_tps:.1f} tokens/s"
        if not self.evicted:
            why = f" ({self.fallback})" if self.fallback else ""
            return f"kv: {self.n_tokens} tokens, nothing evicted{why}, {mib(self.bytes_now)}, {speed}"
        return (
            f"kv: {self.policy} kept {self.rows_kept / self.rows_full:.1%} of {self.n_prompt} tokens, "
            f"{mib(self.bytes_now)} now ({mib(self.bytes_reserve)} room for new tokens), uncut {mib(self.bytes_full)}, "
            f"evicted in {self.all_queries_ms + self.score_ms + self.plan_ms + self.commit_ms:.0f} ms, {speed}"
        )
