"""`EvictionPolicy`: what every method is, and the specs that name them; plain Python, no native library."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from .parts.options import from_spec, int_at_least

if TYPE_CHECKING:
    from .observed import ObservedPrompt

_METHODS: dict[str, type[EvictionPolicy]] = {}


def methods() -> dict[str, type[EvictionPolicy]]:
    """The methods by name: those of the package, then what was defined elsewhere."""
    package = importlib.import_module(f"{__package__}.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_METHODS)


@dataclass(frozen=True)
class PageReads:
    """Decode steps that read some pages of the cache: see `methods.quest.Quest` for the fields."""

    page: int
    min_pages: int
    dense: int
    read: str


@dataclass(frozen=True)
class EvictionPolicy:
    """A method with its options; immutable. `EvictionPolicy.parse("snapkv:window=64")` makes one.

    A subclass is a frozen dataclass whose fields are the method's options (int, float or str), named by
    `class SnapKV(EvictionPolicy, name="snapkv")`; docs/adding-a-method.md has the recipe.

    Args:
        window: w, the last prompt tokens, which are always kept and whose queries are observed; default 32.

    Raises:
        ValueError: an option out of range, in one line.
    """

    window: int = 32

    name: ClassVar[str] = ""
    all_queries: ClassVar[bool] = False  # the column sums of every prompt query are needed, not only the window's

    def __init_subclass__(cls, name: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not name:
            return
        if not name.replace("_", "").isalnum():
            raise ValueError(f"a method cannot be called {name!r}, expected letters, digits and underscores")
        other = _METHODS.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"there is a method {name!r} already ({other.__module__}.{other.__qualname__}); choose another name"
            )
        cls.name = name
        _METHODS[name] = cls

    def __post_init__(self) -> None:
        if not self.name:
            raise TypeError(f"{type(self).__name__} is no method of its own; use EvictionPolicy.parse('laprox')")
        int_at_least("window", self.window, 1)

    def keep(self, prompt: ObservedPrompt, k: int) -> list[npt.NDArray[np.int32]] | None:
        """Kept candidates (positions before the window) of each KV head, ascending; None: nothing is evicted.

        Args:
            prompt: what was observed; heads are numbered by layer, then by KV head.
            k: candidates per head on average: exactly `prompt.n_heads * k` of them stay.
        """
        raise NotImplementedError

    @property
    def evicts(self) -> bool:
        """Whether anything leaves the cache."""
        return True

    def check_model(self, model_path: str) -> None:
        """Raise ValueError when the method lacks something for this model."""

    def page_reads(self) -> PageReads | None:
        """How decode steps choose what they read; None: they read all that is kept."""
        return None

    @classmethod
    def parse(cls, spec: str | EvictionPolicy) -> EvictionPolicy:
        """`"laprox"`, `"laprox:preset=paper:window=16"`, `"criticalkv:pool=reach12:0.3"`; a policy comes back as it is.

        `"laprox+quest:read=256"` reads pages of what LaProx leaves.

        Raises ValueError for an unknown method, option or value.
        """
        if isinstance(spec, EvictionPolicy):
            return spec
        if not isinstance(spec, str):
            raise ValueError(f"kv_evict is {spec!r}, expected a string such as 'laprox', an EvictionPolicy or None")
        known = methods()
        below, plus, above = spec.strip().rpartition("+")
        if plus and above.partition(":")[0] not in known and ("/" in below or "\\" in below):  # a "+" in a path
            below, plus, above = "", "", spec.strip()
        name, *parts = above.split(":")
        if name not in known:
            raise ValueError(f"unknown eviction method {name!r}, expected one of {', '.join(sorted(known))}")
        options = from_spec(spec, parts, known[name])
        if plus:
            if "base" not in known[name].__dataclass_fields__:
                raise ValueError(f"{name!r} cannot follow '+' in {spec!r}, expected 'quest'")
            if "base" in options:
                raise ValueError(f"base is given twice in {spec!r}, before the '+' and after it")
            options["base"] = str(cls.parse(below))
        return known[name](**options)

    def _defaults(self) -> dict[str, Any]:
        return {f.name: f.default for f in fields(self)}

    def _spec(self, hidden: Collection[str] = ()) -> str:
        defaults = self._defaults()
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}
        return ":".join([self.name, *(f"{key}={value}" for key, value in values.items() if value != defaults[key])])

    def __str__(self) -> str:
        """The shortest spec that parses back to this policy."""
        return self._spec()
