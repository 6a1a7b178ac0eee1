"""Module trees: names, who has a forward, and what `Structure` notices of later changes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fsdp2.core.structure import Structure, has_forward, module_paths
from tests.unit.helpers import for_each


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


def test_paths_are_names_below_the_first_root_that_has_a_module() -> None:
    model, other = build(), nn.Module()
    other.tied = model[0]
    paths = module_paths([model, other])
    assert list(paths.values()) == ["", "0", "1", "1.0", "1.1", ""]
    assert paths[model[0]] == "0" and paths[other] == ""


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a module was appended": lambda model: model.append(nn.ReLU()),
    "a module was replaced": lambda model: setattr(model[1], "0", nn.GELU()),
    "a module was removed": lambda model: delattr(model[1], "0"),
    "a leaf got a module": lambda model: model[0].add_module("adapter", nn.Linear(2, 2)),
    "a parameter was added": lambda model: model[0].register_parameter("scale", nn.Parameter(model[0].weight[0])),
    "a vacant name was filled": lambda model: setattr(model[0], "bias", nn.Parameter(model[0].weight[0])),
    "a parameter was removed": lambda model: delattr(model[0], "weight"),
}


@for_each("change", CHANGES.values())
def test_what_changed_is_noticed(change: Callable[[nn.Module], object]) -> None:
    model = build()
    structure = Structure([model])
    assert not structure.has_changed()
    change(model)
    assert structure.has_changed()


def test_another_parameter_in_the_same_place_is_no_change_of_structure() -> None:
    """Groups notice that themselves: see `Registrations`."""
    model = build()
    structure = Structure([model])
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    model[0].register_buffer("seen", None)
    assert not structure.has_changed()


def test_containers_have_no_forward_unless_they_are_given_one() -> None:
    assert has_forward(nn.Linear(2, 2)) and not has_forward(nn.ModuleList()) and not has_forward(nn.Module())
    given = nn.ModuleDict()
    given.forward = lambda x: x  # type: ignore[method-assign]
    assert has_forward(given)
