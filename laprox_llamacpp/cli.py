"""The command `laprox-llamacpp`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from . import __version__
from .budget import Budget
from .errors import LaproxError
from .models import ModelError
from .policy import EvictionPolicy

MAX_ANSWER = 256
PROG = "laprox-llamacpp"


def _parse(parse: Any) -> Any:
    """An option callback that turns a ValueError into a usage error of one line."""

    def callback(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        try:
            if isinstance(value, tuple):
                return tuple(parse(v) for v in value)
            return None if value is None else parse(value)
        except ValueError as e:
            raise click.BadParameter(str(e)) from e

    return callback


policy_option = click.option(
    "--policy", default="laprox", show_default=True, callback=_parse(EvictionPolicy.parse), metavar="SPEC",
    help='What to evict, e.g. "laprox:preset=paper:window=16".',
)  # fmt: skip


@click.group()
@click.version_option(__version__, prog_name=PROG)
def cli() -> None:
    """KV cache eviction per layer and KV head for llama.cpp models."""


@cli.command()
@click.option("--model", default="qwen2.5-coder-0.5b", show_default=True, help="A known name or a GGUF chat model.")
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(256), help="Least length of the text.")
@click.option(
    "--facts", default=3, show_default=True, type=click.IntRange(1, 3), help="Hidden facts; 1 for tiny models."
)
@click.option("--seed", default=1, show_default=True, help="Order of the text, facts and numbers.")
@policy_option
def demo(model: str, tokens: int, facts: int, seed: int, policy: EvictionPolicy) -> None:
    """Hide facts in a long text and ask for them at smaller and smaller budgets."""
    from rich.console import Console

    from . import demo as demo_

    demo_.run(Console(), model=model, policy=str(policy), n_tokens=tokens, n_facts=facts, seed=seed)


@cli.command()
@click.argument("questions", nargs=-1, required=True, metavar="QUESTION...")
@click.option("--model", default="smollm2-135m", show_default=True, help="A known name or a GGUF chat model.")
@click.option(
    "--file", "document", required=True, type=click.File("rb"), help="The text (UTF-8); - reads standard input."
)
@click.option("--budget", default="0.2", show_default=True, callback=_parse(Budget.parse), help="0.1, 1024 or 64MiB.")
@click.option(
    "--ctx", default=0, type=click.IntRange(0, (1 << 31) - 1), help="Context in tokens; 0 takes the model's own."
)
@click.option("--max-tokens", default=MAX_ANSWER, show_default=True, type=click.IntRange(1), help="Longest answer.")
@policy_option
def ask(
    questions: Sequence[str],
    model: str,
    document: Any,
    budget: Budget,
    ctx: int,
    max_tokens: int,
    policy: EvictionPolicy,
) -> None:
    """Ask one or more questions about a long text.

    The text and the first question are read once and evicted down to the budget; later questions follow as further
    turns of the chat, on what the first one left. Answers go to standard output, statistics to standard error.
    """
    text = _text(document)
    if not all(q.strip() for q in questions):
        raise ValueError("a question is empty, expected text")
    from . import models

    path = models.fetch(model)
    from .llama import Llama

    llm = Llama(str(path), n_ctx=ctx, kv_evict=policy, budget=budget, verbose=False)
    try:
        chat: list[dict[str, Any]] = []
        for question in questions:
            chat.append({"role": "user", "content": question if chat else f"{text}\n\n{question}"})
            answer, finish = "", None
            chunks: Any = llm.create_chat_completion(chat, stream=True, max_tokens=max_tokens, temperature=0.0)
            for chunk in chunks:
                piece = chunk["choices"][0]["delta"].get("content") or ""
                finish = chunk["choices"][0]["finish_reason"] or finish
                answer += piece
                click.echo(piece, nl=False)
            click.echo()
            if finish == "length":
                click.echo("(cut: --max-tokens or --ctx was reached)", err=True)
            click.echo(llm.kv_stats().one_line(), err=True)
            chat.append({"role": "assistant", "content": answer})
    finally:
        llm.close()


def _text(document: Any) -> str:
    """The whole of an open file as text."""
    try:
        text: str = document.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{document.name} is not UTF-8 text ({e.reason} at byte {e.start}); convert it first") from e
    if not text.strip():
        raise ValueError(f"{document.name} holds no text")
    if "\0" in text:
        raise ValueError(f"{document.name} holds a NUL byte, expected text")
    return text


@cli.command()
def check() -> None:
    """Print what was built and run a small eviction."""
    from . import check as check_

    sys.exit(check_.main())


@cli.command()
@click.argument("model", required=False)
@click.option("--tokens", default=32768, show_default=True, type=click.IntRange(1), help="Tokens of the prompt.")
@click.option(
    "--budget", "budgets", multiple=True, default=("0.2", "0.1", "0.05"), show_default=True,
    callback=_parse(Budget.parse), help="May be repeated.",
)  # fmt: skip
@click.option(
    "--type", "cache_type", default="f16", show_default=True, help="Type of K and V: f32, f16, bf16, q8_0, q4_0."
)
def memory(model: str | None, tokens: int, budgets: tuple[Budget, ...], cache_type: str) -> None:
    """KV bytes of well-known models, or of MODEL (a known name or a GGUF file), whole and evicted."""
    from rich.console import Console
    from rich.table import Table

    from . import memory as memory_
    from . import models as models_

    if model is None:
        shapes = memory_.KNOWN
    elif model in memory_.KNOWN:
        shapes = {model: memory_.KNOWN[model]}
    elif model in models_.KNOWN:
        shapes = {model: memory_.from_gguf(models_.fetch(model))}
    elif Path(model).exists():
        shapes = {Path(model).name: memory_.from_gguf(model)}
    else:
        names = ", ".join([*memory_.KNOWN, *models_.KNOWN])
        raise ValueError(f"{model} is neither a file nor a known name, expected a GGUF file or one of {names}")
    table = Table(title=f"KV MiB after a prompt of {tokens} tokens, {cache_type}")
    table.add_column("model")
    for name in ("full", *map(str, budgets)):
        table.add_column(name, justify="right")
    for name, shape in shapes.items():
        sizes = [memory_.full_bytes(shape, tokens, cache_type, cache_type)]
        sizes += [memory_.evicted_bytes(shape, tokens, b, cache_type, cache_type) for b in budgets]
        table.add_row(name, *(f"{n / (1 << 20):.0f}" for n in sizes))
    Console().print(table)


@cli.command("eval")
@click.argument("task", metavar="TASK")
@click.option("--model", default="smollm2-135m", show_default=True, help="A known name or a GGUF file.")
@click.option(
    "--methods", default="laprox,snapkv,streaming,random", show_default=True, metavar="SPECS",
    help="Eviction methods as --policy, with commas between; the full cache is always measured.",
)  # fmt: skip
@click.option("--budgets", default="0.05,0.1,0.2,0.5", show_default=True, help="With commas between.")
@click.option("--kv-type", "kv_types", default="f16", show_default=True, help="Types of K and V, commas between.")
@click.option("--samples", default=20, show_default=True, type=click.IntRange(1), help="Prompts, one prefill each.")
@click.option("--shard", default="0/1", show_default=True, metavar="I/N", help="Samples with index % N == I.")
@click.option("--threads", default=None, type=click.IntRange(1), help="All cores by default.")
@click.option(
    "--gpu-layers", default=0, show_default=True, type=click.IntRange(-1), help="On the GPU, with their cache; -1: all."
)
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Folder of this run; what it holds already is not measured again.",
)  # fmt: skip
@click.option("--ray", "ray_address", default=None, metavar="ADDRESS", help="Run the N shards on a Ray cluster.")
def eval_(
    task: str, model: str, methods: str, budgets: str, kv_types: str, samples: int, shard: str, threads: int | None,
    gpu_layers: int, out: Path, ray_address: str | None,
) -> None:  # fmt: skip
    """Measure methods and budgets on a task: needle, continuation, multi_question, similarity, longbench, ruler.

    TASK takes options after colons, "needle:kind=multikey:tokens=4096"; docs/evaluation.md has them. Each sample is
    prefilled once for all methods and budgets. A run that was stopped goes on with the same command.
    """
    from .evaluate import command

    means = command.evaluate(
        task, model, methods, budgets, kv_types, samples, shard, threads, gpu_layers, out, ray_address
    )
    click.echo(means)


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
def merge(folders: Sequence[Path], out: Path) -> None:
    """Put the shards of a run, measured in FOLDERS, into one folder."""
    from .evaluate import runner

    held, all_ = runner.merge(folders, out)
    click.echo(f"{held} of {all_} samples in {out}")


@cli.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="A known name or a GGUF file.")
@click.option("--tokens", "lengths", default="2048,8192", show_default=True, help="Of the prompts, commas between.")
@click.option(
    "--methods", default="laprox", show_default=True, metavar="SPECS", help="As --policy, with commas between."
)
@click.option("--budgets", default="0.05,0.2", show_default=True, help="With commas between.")
@click.option("--kv-type", default="f16", show_default=True, help="Type of K and V: f32, f16, bf16, q8_0, q4_0.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Times that each cache decodes.")
@click.option("--decode", "n_decode", default=24, show_default=True, type=click.IntRange(1), help="Tokens of a round.")
@click.option("--threads", default=None, type=click.IntRange(1), help="All cores by default.")
@click.option(
    "--gpu-layers", default=0, show_default=True, type=click.IntRange(-1), help="On the GPU, with their cache; -1: all."
)
@click.option(
    "--out", default=None, type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
    help="Every measured number, as JSON.",
)  # fmt: skip
def bench(
    model: str, lengths: str, methods: str, budgets: str, kv_type: str, rounds: int, n_decode: int,
    threads: int | None, gpu_layers: int, out: Path | None,
) -> None:  # fmt: skip
    """Measure speed and memory of evicted caches against the length of the prompt.

    Each evicted cache decodes in turn with the full one and with the limit: a full cache of as many rows. Prints a
    Markdown table.
    """
    from .evaluate import command

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    click.echo(command.bench(model, lengths, methods, budgets, kv_type, rounds, n_decode, threads, gpu_layers, out))


@cli.group()
def calibrate() -> None:
    """Measure what a method needs to know about a model."""


@calibrate.command("duo")
@click.argument("model")
@click.option(
    "--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
    help="The profile; by default where --policy duo looks for it.",
)  # fmt: skip
@click.option("--samples", default=8, show_default=True, type=click.IntRange(1), help="Prompts, one prefill each.")
@click.option("--tokens", default=1024, show_default=True, type=click.IntRange(256), help="Least length of their text.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the texts, passkeys and numbers."
)
def calibrate_duo(model: str, out: Path | None, samples: int, tokens: int, seed: int) -> None:
    """Rank the KV heads of a model for duo.

    MODEL is a known name or a GGUF file. A head counts by its attention on a passkey in a long text while the model
    reads the right answer to a question about it. The profile is written, and its path printed.
    """
    from rich.console import Console
    from rich.progress import Progress

    from . import duo_profile, models

    path = models.fetch(model)
    from . import calibrate as calibrate_

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"calibrating {path.name}", total=samples)
        result = calibrate_.duo(path, samples, tokens, seed, on_sample=lambda: progress.advance(task))
    out = out or duo_profile.default_path(result.profile.fingerprint)
    duo_profile.save(result.profile, out)
    console.print(calibrate_.table(result))
    click.echo(out)


@cli.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
def models(names: Sequence[str]) -> None:
    """List the models that can be fetched by name, or fetch NAME and print its path."""
    from . import models as models_

    for name in names:
        click.echo(models_.fetch(name))
    if not names:
        for name, known in models_.KNOWN.items():
            click.echo(f"{name:20} {known.size / 1e6:5.0f} MB  {known.about}")


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="DIR/report by default.")
def report(folder: Path, out: Path | None) -> None:
    """One HTML page about all runs in DIR and below, with figures and CSV files beside it."""
    from .evaluate import report as report_

    click.echo(report_.write(folder, out or folder / "report"))


@cli.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="A known name or a GGUF chat model.")
@click.option("--file", "document", type=click.File("rb"), help="The text (UTF-8); - reads standard input.")
@click.option("--text", "name", type=click.Choice(["python", "code"]), help="A text that every machine has.")
@click.option("--tokens", default=1024, show_default=True, type=click.IntRange(64), help="Longest prompt.")
@click.option("--question", required=True, help="Asked after the text.")
@click.option("--methods", default="laprox,snapkv", show_default=True, metavar="SPECS", help="With commas between.")
@click.option("--budget", default="0.05", show_default=True, callback=_parse(Budget.parse), help="0.1, 1024 or 64MiB.")
@click.option("--threads", default=None, type=click.IntRange(1), help="All cores by default.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
def kept(
    model: str, document: Any, name: str | None, tokens: int, question: str, methods: str, budget: Budget,
    threads: int | None, out: Path,
) -> None:  # fmt: skip
    """An HTML page of what methods keep of a text: by layer, head and position, and word by word."""
    if (document is None) == (name is None):
        raise click.UsageError("give --file FILE or --text NAME, one of them")
    from . import models as models_

    text = None if document is None else _text(document)
    path = models_.fetch(model)
    from .evaluate import kept as kept_
    from .evaluate import kept_page

    found = kept_.measure(
        str(path), text if text is not None else kept_.named_text(str(name)), question,
        [m.strip() for m in methods.split(",") if m.strip()], str(budget), tokens, threads,
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(kept_page.render(found), encoding="utf-8")
    click.echo(out)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; errors are one line on standard error. Returns the exit status: 2 for usage, 1 for the rest."""
    try:
        # None unless --help or the like ended it early
        status = cli.main(args=None if args is None else list(args), prog_name=PROG, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.ctx.get_help() if e.ctx else "", err=True)
        return e.exit_code
    except click.ClickException as e:
        return _fail(e.format_message(), e.exit_code)
    except click.Abort:
        return _fail("interrupted", 130)
    except MemoryError as e:
        return _fail(f"out of memory: {e}; a smaller --ctx may do", 1)
    except (ImportError, LaproxError, ModelError, OSError, ValueError) as e:
        return _fail(str(e), 1)


def _fail(text: str, status: int) -> int:
    click.echo(f"{PROG}: {' '.join(text.split())}", err=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
