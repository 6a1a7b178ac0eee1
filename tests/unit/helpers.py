"""What tests of several files use: one test of many cases that take no time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Body = Callable[..., None]


def for_each(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Body], Body]:
    """As ``pytest.mark.parametrize``, in one test: all cases run, and a failure names those that are wrong.

    For cases that take no time, and leave nothing to each other in the fixtures that they share.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [dict(zip(keys, (value,) if len(keys) == 1 else value, strict=True)) for value in values]

    def decorate(body: Body) -> Body:
        def test(**fixtures: Any) -> None:
            wrong: list[tuple[str, BaseException]] = []
            for case in cases:
                try:
                    body(**case, **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    shown = ", ".join(f"{name}={value!r:.200}" for name, value in case.items())
                    wrong.append((shown, error))
            if wrong:
                said = "\n".join(f"{shown}: {type(error).__name__}: {error}" for shown, error in wrong)
                raise AssertionError(said) from wrong[0][1]

        signature = inspect.signature(body)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        return test

    return decorate
