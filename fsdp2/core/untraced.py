"""What a state's hooks do in a graph for which nothing was prepared: they refuse."""

from __future__ import annotations

from typing import Any, NoReturn

from fsdp2.errors import FSDPRuntimeError


class Untraced:
    """Stands in for the hooks of a state of which no compiled call has begun."""

    def pre_forward(self, *_: Any) -> NoReturn:
        """Refuse.

        Raises:
            FSDPRuntimeError: always, with the remedy.
        """
        raise FSDPRuntimeError(
            "torch.compile traces into a sharded module that nothing has prepared for it. Compile a module on which "
            "fully_shard was called (torch.compile(model), model.compile() or block.compile()), or call "
            "fsdp2.prepare_compile(model) before each call of a compiled function that calls it."
        )

    def called_eagerly(self, name: str) -> None:
        """Nothing was to be in a graph."""

    def post_forward(self, output: Any) -> Any:
        """Never reached."""
        return output


UNTRACED = Untraced()
