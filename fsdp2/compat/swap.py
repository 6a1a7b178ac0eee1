"""`install` and `Swap`: fsdp2's names in the place of torch's, and back."""

from __future__ import annotations

import atexit
import importlib
import os
import warnings
from dataclasses import dataclass
from types import ModuleType, TracebackType

import torch.distributed

import fsdp2
from fsdp2.compat import bridges
from fsdp2.compat.names import (
    HOME,
    PUBLIC,
    Counterpart,
    counterparts,
    counterparts_of_fsdp1,
    modules_of_others,
    modules_of_torch,
    modules_with_bridges,
    without_counterpart,
    wrapped_by_torchs_fsdp1,
)
from fsdp2.compat.substitutes import Substitutes
from fsdp2.compat.switch import AfterImport, reaches_children


@dataclass(frozen=True, slots=True)
class Replacement:
    """One name in one module that refers to another object since."""

    module: str
    name: str
    torchs: object
    ours: object

    def __str__(self) -> str:
        ours = f"{getattr(self.ours, '__module__', '?')}.{getattr(self.ours, '__qualname__', '?')}"
        return f"{self.module}.{self.name} -> {ours}"


class Swap:
    """What `install` replaced. ``print(swap)`` lists it; `uninstall`, or leaving its ``with`` block, puts it back.

    Attributes:
        replacements: the names that were replaced, those in modules imported since included.
        too_early: names outside torch, ``module.name``, that were bound to torch's objects before. They still are.
        lacking: torch's public names that fsdp2 has no counterpart for. They stay torch's.
    """

    def __init__(self, pairs: tuple[Counterpart, ...]) -> None:
        self.replacements: list[Replacement] = []
        self._substitutes = Substitutes(pairs)
        wrapper = next((pair for pair in pairs if pair.name == "FullyShardedDataParallel"), None)
        self._undo = [] if wrapper is None else [bridges.serve_both(wrapper.torchs, wrapper.ours)]
        if any(pair.name == "fully_shard" for pair in pairs):
            home = importlib.import_module(HOME)
            self._undo.append(bridges.for_importers(home, self._substitutes.of_fully_shard))
        self._later = AfterImport(
            (*bridges.PIPELINING, *bridges.STATE_DICTS, *bridges.LIGHTNING, *bridges.TRANSFORMERS),
            self._replace_in,
        )
        self.lacking = without_counterpart()
        for module in list(modules_of_torch()):
            self._substitutes.learn(module)
        self.too_early = tuple(
            f"{module.__name__}.{name}"
            for module in modules_of_others()
            for name, _ in self._substitutes.to_replace(module)
        )
        for module in (*modules_of_torch(), *modules_with_bridges()):
            self._replace_in(module)
        if pairs:
            self._later.start()

    def _replace_in(self, module: ModuleType) -> None:
        self._substitutes.learn(module)
        for name, pair in self._substitutes.to_replace(module):
            setattr(module, name, pair.ours)
            self.replacements.append(Replacement(module.__name__, name, pair.torchs, pair.ours))

    def uninstall(self) -> None:
        """Put torch's names back, also in modules that were imported since. Calling it again does nothing.

        Models that were sharded meanwhile stay what they are, and modules outside torch keep what they imported.
        """
        self._later.stop()
        atexit.unregister(self._warn_if_unused)
        for module in (*modules_of_torch(), *modules_with_bridges()):
            for name, torchs in self._substitutes.to_put_back(module):
                setattr(module, name, torchs)
        self._substitutes = Substitutes(())
        while self._undo:
            self._undo.pop()()

    def _warn_if_unused(self) -> None:
        """Say so if fsdp2 sharded nothing in this process: the program trains on something else, or elsewhere."""
        # The classes themselves may be gone with their modules by now.
        if getattr(fsdp2.get_cls_to_fsdp_cls(), "were_any", True) or os.environ.get("RANK", "0") != "0":
            return
        others = _sharded_by_torch()
        if others:
            reason = f"torch's own fully_shard did ({', '.join(others)}): it was imported before install()."
        elif reaches_children():
            reason = "Processes that this one started had the swap too: what they sharded is not known here."
        else:
            reason = (
                "If it was to happen in processes that this one started, start the program by python -m fsdp2.compat; "
                "if the program shards with DDP, DeepSpeed or an FSDP1 that was left to torch, this swap does not "
                "concern it."
            )
        warnings.warn(f"fsdp2.compat: fsdp2 sharded no module in this process. {reason}", stacklevel=2)

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def __str__(self) -> str:
        lines = [str(each) for each in self.replacements]
        lines += [f"{each} stays torch's: it was imported before install()" for each in self.too_early]
        lines += [f"{PUBLIC}.{each} stays torch's: fsdp2 has no such name" for each in self.lacking]
        return "\n".join(lines)


def install(*, fsdp1: bool = True) -> Swap:
    """Put fsdp2's names in the place of torch's, in every module of torch, those imported later included.

    Call it before the libraries that shard models are imported, on every rank and in every process that a program
    starts by itself (forked processes have it already; others, of a program run by ``python -m fsdp2.compat``):

        >>> import fsdp2.compat
        >>> print(fsdp2.compat.install())
        torch.distributed.fsdp.FSDPModule -> fsdp2.api.module.FSDPModule
        ...
        >>> from accelerate import Accelerator

    Torch's own implementation stays intact beneath: its private modules, and `replicate`, which is built on them.

    Args:
        fsdp1: ``FullyShardedDataParallel`` and what belongs to it too ('Programs written for FSDP1' in the
            documentation), and what Lightning and transformers ask of it; else FSDP1 stays torch's.

    Returns:
        What was replaced, and how to undo it. Called again meanwhile: a swap of nothing, so that nesting is harmless.
        At the end of the process it warns if fsdp2 sharded no module there.

    Raises:
        FSDPRuntimeError: torch was built without ``torch.distributed``.
    """
    swap = put_in_place(fsdp1=fsdp1)
    atexit.register(swap._warn_if_unused)
    return swap


def put_in_place(*, fsdp1: bool = True) -> Swap:
    """`install`, without the warning at exit: in processes that happen to import what shards models."""
    if not torch.distributed.is_available():
        raise fsdp2.FSDPRuntimeError("fsdp2.compat needs torch.distributed, and this torch was built without it.")
    public = importlib.import_module(PUBLIC)
    importlib.import_module("torch.distributed._composable.fsdp")
    installed = public.fully_shard is fsdp2.fully_shard
    sharded = [] if installed else [f"a {name} that torch's fully_shard has sharded" for name in _sharded_by_torch()]
    if fsdp1:
        wrapped = wrapped_by_torchs_fsdp1()
        sharded += [f"a {name} that torch's FullyShardedDataParallel has wrapped" for name in wrapped]
    pairs = () if installed else counterparts()
    swap = Swap((*pairs, *counterparts_of_fsdp1()) if fsdp1 else pairs)
    if swap.too_early or sharded:
        # The program would go on with both implementations, and not notice.
        try:
            warnings.warn(
                f"fsdp2.compat.install() comes too late for {', '.join((*swap.too_early, *sharded))}: torch's own "
                "implementation stays in use there. Install before importing what shards models, or run the program "
                "with `python -m fsdp2.compat`.",
                stacklevel=3,
            )
        except Warning:  # where warnings are errors
            swap.uninstall()
            raise
    return swap


def _sharded_by_torch() -> list[str]:
    """The names of classes of which torch's own implementation has sharded modules."""
    sharded: dict[type, type] = vars(importlib.import_module(HOME)).get("cls_to_fsdp_cls", {})
    return [cls.__name__ for cls in sharded]
