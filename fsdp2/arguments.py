"""`checked`: the one place where what users pass is compared with what a public function says it takes.

The annotations say which types; rules, for single arguments, say what annotations cannot. A function that is checked
changes nothing before all of its arguments have passed. What arguments mean together is checked where they meet.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar, Union

import torch

from fsdp2.errors import FSDPTypeError, FSDPValueError

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class")


@dataclass(frozen=True, slots=True)
class Rule:
    """What one argument must be.

    Attributes:
        expected: ends the sentence "takes ...".
        accepts: whether a value is that.
        is_kind: whether it is of the right type at least; if not, that is a `FSDPTypeError`, else a `FSDPValueError`.
        kinds: types whose instances are accepted, whatever they are: looked up first.
    """

    expected: str
    accepts: Callable[[Any], bool]
    is_kind: Callable[[Any], bool] = lambda value: True
    kinds: frozenset[type] = frozenset()


ANYTHING = Rule("anything", lambda value: True)
"""For arguments that the function checks itself, for its message says more."""


def at_least(least: float) -> Rule:
    """A number, ``least`` or more (inf too, nan not), or a tensor of one; the value of one on a device is not read."""

    def accepts(value: Any) -> bool:
        on_host = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
        return is_number(value) and (not on_host or float(value) >= least)

    return Rule(f"a number >= {least:g}", accepts, is_number)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number, or a real tensor of one element."""
    if isinstance(value, numbers.Real):
        return not isinstance(value, bool)
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_one and not value.is_complex() and value.dtype is not torch.bool


def checked_class(**rules: Rule) -> Callable[[type[Class]], type[Class]]:
    """`checked`, for what a class is made of."""

    def decorate(kind: type[Class]) -> type[Class]:
        setattr(kind, "__init__", checked(None, **rules)(kind.__init__))  # noqa: B010, type checkers refuse it
        return kind

    return decorate


def checked(unknown: Callable[[str], str] | None = None, /, **rules: Rule) -> Callable[[Function], Function]:
    """Check the arguments of every call of a function, by its annotations, and by ``rules`` for those named there.

    Args:
        unknown: says what to write instead of a keyword that there is not, "" if it does not know.
        rules: by the names of arguments. (``Any`` without a rule is not checked: the function does that.)
    """

    def decorate(function: Function) -> Function:
        arguments = _Arguments(function, rules, unknown)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments.check(args, kwargs)
            return function(*args, **kwargs)

        return typing.cast(Function, call)

    return decorate


class _Arguments:
    """The arguments of one function; rules are made of its annotations in the first call, when all names exist."""

    def __init__(
        self, function: Callable[..., Any], rules: dict[str, Rule], unknown: Callable[[str], str] | None
    ) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._function = function
        self._unknown = unknown
        self._given = rules
        self._rules: dict[str, Rule] | None = None
        self._positional = tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
        self._names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        self._required = [each.name for each in parameters if each.name in self._names and each.default is each.empty]
        self._takes_any = {each.kind for each in parameters} & {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }
        missing = rules.keys() - self._names
        assert not missing, f"rules for {missing}, which {function.__qualname__} does not take"

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what does not fit.

        Raises:
            FSDPTypeError: an argument too many or too few, or of another type.
            FSDPValueError: one of the right type that does not fit.
        """
        if self._rules is None:
            self._rules = self._made()
        if len(args) > len(self._positional) and inspect.Parameter.VAR_POSITIONAL not in self._takes_any:
            found = str(len(args))
            raise FSDPTypeError(
                f"{self._name} takes {len(self._positional)} at most, got {found}; pass others by name."
            )
        given = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name in given or (name not in self._names and inspect.Parameter.VAR_KEYWORD not in self._takes_any):
                self._refuse_keyword(name)
            given[name] = value
        for name in self._required:
            if name not in given:
                raise FSDPTypeError(f"{self._name} lacks the argument '{name}'.")
        for name, value in given.items():
            rule = self._rules.get(name)
            if rule is not None and type(value) not in rule.kinds and not rule.accepts(value):
                kind = FSDPValueError if rule.is_kind(value) else FSDPTypeError
                raise kind(f"{self._name} takes {rule.expected} as '{name}', got {shown(value)}.")

    @property
    def _name(self) -> str:
        return f"{self._function.__qualname__}()".removesuffix(".__init__()").removeprefix("FSDPModule.")

    def _refuse_keyword(self, name: str) -> NoReturn:
        if name in self._names:
            raise FSDPTypeError(f"{self._name} got the argument '{name}' twice.")
        remedy = "" if self._unknown is None else self._unknown(name)
        known = ", ".join(each for each in inspect.signature(self._function).parameters if each != "self")
        raise FSDPTypeError(f"{self._name} takes no argument '{name}'. {remedy or f'There are: {known}.'}")

    def _made(self) -> dict[str, Rule]:
        hints = typing.get_type_hints(self._function)
        rules = dict(self._given)
        for name, hint in hints.items():
            if name in self._names and name not in ("self", "cls", "return") and hint is not Any:
                rules.setdefault(
                    name, Rule(_text(hint), functools.partial(accepts, hint), lambda value: False, _kinds(hint))
                )
        return rules


def accepts(hint: Any, value: Any) -> bool:
    """Whether ``value`` is what the annotation ``hint`` says. Iterators are not looked into."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if isinstance(hint, TypeVar):
        return hint.__bound__ is None or accepts(hint.__bound__, value)
    if origin in (Union, types.UnionType):
        return any(accepts(each, value) for each in arguments)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in arguments)
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if hint is float:
        return is_number(value)
    if hint in (Callable, collections.abc.Callable) or origin is collections.abc.Callable:
        return callable(value) and not isinstance(value, type)
    if origin is type:
        return isinstance(value, type) and (not isinstance(arguments[0], type) or issubclass(value, arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        return _is_iterable_of(arguments[0] if arguments else Any, value)
    return not isinstance(hint, type) or isinstance(value, hint)


def _kinds(hint: Any) -> frozenset[type]:
    """Types whose instances ``hint`` accepts, whatever they are."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return frozenset().union(*map(_kinds, typing.get_args(hint)))
    if hint is None:
        return frozenset((type(None),))
    if hint is float:
        return frozenset((int, float))
    return frozenset((hint,)) if isinstance(hint, type) and typing.get_origin(hint) is None else frozenset()


def _is_iterable_of(item: Any, value: Any) -> bool:
    if isinstance(value, (str, bytes, Mapping, torch.Tensor)) or not isinstance(value, collections.abc.Iterable):
        return False
    if not isinstance(value, (list, tuple, set, frozenset)):
        return True
    if item is torch.Tensor:  # of which there may be thousands: one of each type is looked at
        value = dict(zip(map(type, value), value, strict=True)).values()
    return all(accepts(item, each) for each in value)


def _text(hint: Any) -> str:
    """``hint`` as an expected argument: "a bool", "a DeviceMesh or None"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, TypeVar):
        return _text(hint.__bound__)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_text, arguments)))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if hint is type(None):
        return "None"
    if hint in (Callable, collections.abc.Callable) or origin is collections.abc.Callable:
        return "a function"
    if origin is type:
        return f"a class derived from {getattr(arguments[0], '__name__', arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable) and arguments:
        return f"an iterable, each {_text(arguments[0])}"
    if hint is float:
        return "a number"
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def shown(value: Any) -> str:
    """``value`` and its type, in a few words."""
    kind = type(value).__name__
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, list, tuple)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:80]}..."
    return f"a {kind}" if not isinstance(value, type) else f"the class {value.__name__}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Of ``known`` the one that ``word`` may have been meant to be, as a question with a space before it; else ""."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{found[0]}'?" if found else ""
