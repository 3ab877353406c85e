"""Our `Llama` as a model of lm-eval: `--model laprox --model_args path=model.gguf,kv_evict=laprox,budget=0.1`.

lm-eval finds it by the entry point "lm_eval.models", from the release on that knows plugins; for earlier ones
`python -m laprox_llamacpp.evaluate.lm` is lm-eval's command line with this model added.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from .. import models
from ..llama import Llama
from .lm_tasks import has_template, render

import llama_cpp.llama_cpp as lib  # isort: skip


class LaproxLM(TemplateLM):  # type: ignore[misc]
    """Greedy generation and log-likelihoods after a prompt that is evicted down to a budget.

    Each request's context is a prompt of its own. A context that does not fit beside the answer keeps as many tokens
    from each end, as LongBench cuts its prompts.

    Args:
        path: a known name or a GGUF file.
        kv_evict, budget: as `Llama`; without them nothing is evicted.
        n_ctx: context in tokens; 0 takes the model's own.
        max_gen_toks: longest answer where a task sets none.
        batch_size, max_batch_size, device: lm-eval passes them; prompts go one by one, on the device of the build.
        **kwargs: as `Llama`: n_threads, n_gpu_layers, type_k, type_v ...

    Raises:
        ValueError: as `Llama`, and for a batch size other than 1.
    """

    def __init__(
        self,
        path: str,
        kv_evict: str | None = None,
        budget: float | int | str | None = None,
        n_ctx: int = 0,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) != "1":
            raise ValueError(f"batch_size is {batch_size}, expected 1: a prompt is evicted on its own")
        kwargs.setdefault("verbose", False)
        self.path = models.fetch(path)
        self.llm = Llama(str(self.path), kv_evict=kv_evict, budget=budget, n_ctx=n_ctx, **kwargs)
        self.max_gen_toks = max_gen_toks
        self._scored: list[int] = []  # the context in the cache, and the logits after it
        self._logits = np.zeros(0, np.float32)

    # ---- texts and tokens

    @property
    def eot_token_id(self) -> int:
        """End of a text."""
        return int(self.llm.token_eos())

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context."""
        return int(self.llm.token_bos()) if self.llm.token_bos() >= 0 else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """lm-eval tells cached requests apart by it."""
        return self.path.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's own. Raises ValueError for a named one, and for a model without."""
        if not chat_template:
            return None
        if isinstance(chat_template, str):
            raise ValueError(f"chat template {chat_template!r} is unknown, expected the model's own (no name)")
        if not has_template(self.llm):
            raise ValueError(f"{self.path.name} has no chat template; leave out --apply_chat_template")
        return str(self.llm.metadata["tokenizer.chat_template"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Turns as the text of a prompt; without a generation prompt, the last one is an answer that goes on."""
        return render(self.llm, chat_history, add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens, with the one that begins a text where the model wants it and the text does not have it."""
        bos = self.llm.token_bos()
        begun = bos >= 0 and string.startswith(self.llm._model.token_get_text(bos))
        add = not begun if add_special_tokens is None else add_special_tokens
        tokens: list[int] = self.llm.tokenize(string.encode(), add_bos=add, special=True)
        return tokens

    # ---- requests

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers. Raises ValueError for a task that samples."""
        self._scored = []
        out = []
        for request in tqdm(requests, desc="generate_until", disable=disable_tqdm):
            text, how = request.args
            if how.get("do_sample") and how.get("temperature", 1) != 0:
                raise ValueError(f"{request.task_name} samples, expected do_sample=False: answers are greedy")
            stop = how.get("until") or []
            n = int(how.get("max_gen_toks", self.max_gen_toks))
            made: Any = self.llm.create_completion(
                self._fit(self.tok_encode(text), n), max_tokens=n, temperature=0.0,
                stop=[stop] if isinstance(stop, str) else list(stop),
            )  # fmt: skip
            out.append(made["choices"][0]["text"])
            self.cache_hook.add_partial("generate_until", request.args, out[-1])
        return out

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """The context is evicted, the continuation follows token by token; its first one comes from the prefill."""
        out = []
        for pair, context, continuation in tqdm(requests, desc="loglikelihood", disable=disable_tqdm):
            logits = self._after(self._fit(context, len(continuation)))
            total, greedy = 0.0, True
            for i, token in enumerate(continuation):
                if i:
                    self.llm.eval([continuation[i - 1]])
                    logits = self._last_logits()
                top = int(logits.argmax())
                total += float(logits[token] - logits[top]) - float(
                    np.log(np.exp(logits - logits[top], dtype=np.float64).sum())
                )
                greedy = greedy and top == token
            out.append((total, greedy))
            self.cache_hook.add_partial("loglikelihood", pair, out[-1])
        return out

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """NotImplementedError: such a text has no prompt; our own task "continuation" evicts a prefix of it."""
        raise NotImplementedError(
            "loglikelihood_rolling has no prompt to evict; use `laprox-llamacpp eval continuation` for perplexity"
        )

    def _fit(self, tokens: list[int], n_new: int) -> list[int]:
        room = self.llm.n_ctx() - n_new
        if len(tokens) <= room:
            return tokens
        if room < 2:
            raise ValueError(f"n_ctx is {self.llm.n_ctx()}, expected more than the {n_new} tokens of an answer")
        warnings.warn(
            f"a context of {len(tokens)} tokens does not fit beside {n_new} more in n_ctx={self.llm.n_ctx()}: "
            f"{room // 2} are kept from each end; raise n_ctx",
            RuntimeWarning,
            stacklevel=3,
        )
        return tokens[: room // 2] + tokens[-(room // 2) :]

    def _after(self, context: list[int]) -> Any:
        """Logits after `context`, which is in the cache then; choices of one question share its prefill."""
        if context == self._scored:
            self.llm.n_tokens = len(context)  # what follows is cut off by the next eval
        else:
            self._scored = []
            self.llm.reset()
            self.llm.eval(context)
            self._scored, self._logits = list(context), self._last_logits()
        return self._logits

    def _last_logits(self) -> Any:
        llm = self.llm
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy()


def main() -> None:
    """lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":  # python -m: the class comes from the module under its own name, as a plugin does
    from laprox_llamacpp.evaluate import lm

    lm.main()
else:
    register_model("laprox")(LaproxLM)
