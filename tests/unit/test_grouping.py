"""The groups that are chosen in models of well-known shapes, as printed. All on meta."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fsdp2
from fsdp2 import FSDPTypeError, FSDPValueError, GroupChoice, MixedPrecisionPolicy, choose_groups
from tests.harness.shared.grouped_models import (
    GPT,
    EncoderDecoder,
    GPTBlock,
    LlamaForCausalLM,
    Recommender,
    ResNet,
    Shaped,
    Swin,
    SwinStage,
    Torchs,
    Unequal,
)
from tests.unit.helpers import for_each

MIB = 2**20
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def choose(make: Callable[[], nn.Module], **options: Any) -> GroupChoice:
    return choose_groups(on_meta(make), **options)


def names(choice: GroupChoice) -> list[str]:
    return [group.name for group in choice.groups]


# Printed choices


def test_llama() -> None:
    assert_expected_inline(
        str(choose(LlamaForCausalLM, mp_policy=BF16)),
        """\
LlamaForCausalLM: 35 groups, 15.0 GiB of parameters in torch.bfloat16 (max_bytes 1.0 GiB, min_bytes 1.0 MiB)
  model.embed_tokens  Embedding              1002.0 MiB  the rest was above the largest block
  model.layers.0-31   LlamaDecoderLayer  32 x 416.0 MiB  a block: one of 32 of its class in a ModuleList
  lm_head             Linear                 1002.0 MiB  the rest was above the largest block
  (model)             LlamaForCausalLM          8.0 KiB  the rest""",
    )


@pytest.mark.full
def test_a_block_above_max_bytes_is_split() -> None:
    assert_expected_inline(
        str(choose(lambda: LlamaForCausalLM(80, 8192, 1024, 28672), mp_policy=BF16)),
        """\
LlamaForCausalLM: 323 groups, 131.4 GiB of parameters in torch.bfloat16 (max_bytes 1.0 GiB, min_bytes 1.0 MiB)
  model.embed_tokens               Embedding                2.0 GiB  the rest was above max_bytes; above max_bytes, but cannot be split
  model.layers.0-79.self_attn      LlamaAttention    80 x 288.0 MiB  part of LlamaDecoderLayer, which is above max_bytes
  model.layers.0-79.mlp.gate_proj  Linear            80 x 448.0 MiB  part of LlamaMLP, which is above max_bytes
  model.layers.0-79.mlp.up_proj    Linear            80 x 448.0 MiB  part of LlamaMLP, which is above max_bytes
  model.layers.0-79.mlp.down_proj  Linear            80 x 448.0 MiB  part of LlamaMLP, which is above max_bytes
  lm_head                          Linear                   2.0 GiB  the rest was above max_bytes; above max_bytes, but cannot be split
  (model)                          LlamaForCausalLM         2.5 MiB  the rest""",  # noqa: E501
    )


def test_gpt_with_a_tied_head() -> None:
    assert_expected_inline(
        str(choose(GPT, blocks=GPTBlock)),
        """\
GPT: 14 groups, 474.7 MiB of parameters in own dtypes (max_bytes 1.0 GiB, min_bytes 1.0 MiB)
  transformer.wte     Embedding      147.2 MiB  the rest was above the largest block
  transformer.h.0-11  GPTBlock   12 x 27.0 MiB  a block: its class is in blocks
  (model)             GPT              3.0 MiB  the rest""",
    )


def test_encoder_and_decoder() -> None:
    assert_expected_inline(
        str(choose(EncoderDecoder)),
        """\
EncoderDecoder: 14 groups, 231.0 MiB of parameters in own dtypes (max_bytes 1.0 GiB, min_bytes 1.0 MiB)
  shared             Embedding           62.8 MiB  the rest was above the largest block
  encoder.block.0-5  EncoderLayer    6 x 12.0 MiB  a block: one of 6 of its class in a ModuleList
  decoder.block.0-5  DecoderLayer    6 x 16.0 MiB  a block: one of 6 of its class in a ModuleList
  (model)            EncoderDecoder       4.0 KiB  the rest""",
    )


def test_modules_of_torch_stay_whole() -> None:
    assert_expected_inline(
        str(choose(Torchs)),
        """\
Torchs: 6 groups, 68.1 MiB of parameters in own dtypes (max_bytes 1.0 GiB, min_bytes 1.0 MiB)
  encoder.layers.0-3  TransformerEncoderLayer  4 x 12.0 MiB  a block: one of 4 of its class in a ModuleList
  attention           MultiheadAttention           16.0 MiB  the rest was above the largest block
  (model)             Torchs                        4.0 MiB  the rest""",
    )


def test_a_giant_embedding() -> None:
    assert_expected_inline(
        str(choose(Recommender)),
        """\
Recommender: 4 groups, 24.1 GiB of parameters in own dtypes (max_bytes 1.0 GiB, min_bytes 1.0 MiB)
  items    Embedding     23.8 GiB  the rest was above the largest block; above max_bytes, but cannot be split
  users    Embedding    244.1 MiB  the rest was above the largest block
  tower.2  Linear         4.0 MiB  a block: one of 3 of its class in a Sequential
  (model)  Recommender  520.0 KiB  the rest""",
    )


def test_stages_of_blocks() -> None:
    assert_expected_inline(
        str(choose(Swin, max_bytes=64 * MIB)),
        """\
Swin: 24 groups, 334.5 MiB of parameters in own dtypes (max_bytes 64.0 MiB, min_bytes 1.0 MiB)
  layers.0              SwinStage        2.0 MiB  a block: one of 4 of its class in a ModuleList
  layers.1              SwinStage        8.0 MiB  a block: one of 4 of its class in a ModuleList
  layers.2.blocks.0-17  GPTBlock   18 x 12.0 MiB  a block: one of 18 of its class in a ModuleList
  layers.2              SwinStage        8.0 MiB  the rest of SwinStage, which is above max_bytes
  layers.3.blocks.0-1   GPTBlock    2 x 48.1 MiB  a block: one of 2 of its class in a ModuleList
  (model)               Swin             3.9 MiB  the rest""",
    )


def test_by_size() -> None:
    assert_expected_inline(
        str(choose(Unequal, max_bytes=200 * MIB)),
        """\
Unequal: 7 groups, 367.5 MiB of parameters in own dtypes (max_bytes 200.0 MiB, min_bytes 1.0 MiB)
  net.images  Conv2d      3.0 MiB  by size: there are no blocks
  net.mixer   Linear      8.0 MiB  by size: there are no blocks
  net.lstm    LSTM      128.1 MiB  by size: there are no blocks
  net.wide.0  Linear    128.1 MiB  part of Sequential, which is above max_bytes
  net.wide.2  Bilinear    4.0 MiB  part of Sequential, which is above max_bytes
  net.wide.3  Conv1d     96.0 MiB  part of Sequential, which is above max_bytes
  (model)     Unequal   400.1 KiB  the rest""",
    )


# What blocks are


@for_each("blocks", [GPTBlock, "GPTBlock", {"GPTBlock"}, (GPTBlock, nn.LSTM, "Other")[:1], [GPTBlock]])
def test_blocks_by_class_or_name(blocks: Any) -> None:
    choice = choose(Swin, blocks=blocks)
    assert [group.class_name for group in choice.groups[:-1]] == ["GPTBlock"] * 24
    assert choice.groups[0].reason == "a block: its class is in blocks"


def test_of_nested_blocks_the_outermost_that_fit() -> None:
    both = {"blocks": (SwinStage, GPTBlock)}
    assert names(choose(Swin, **both)) == ["layers.0", "layers.1", "layers.2", "layers.3", ""]
    inner = [f"layers.2.blocks.{number}" for number in range(18)]
    assert names(choose(Swin, **both, max_bytes=100 * MIB)) == [
        "layers.0",
        "layers.1",
        *inner,
        "layers.2",
        "layers.3",
        "",
    ]


def test_named_blocks_may_be_small_and_those_found_may_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert names(choose_groups(model)) == [""]
    assert names(choose_groups(model, blocks=nn.Linear)) == ["0", "1", ""]
    assert names(choose_groups(model, min_bytes=0)) == ["0", "1", ""]


def test_no_blocks_at_all() -> None:
    assert names(choose(ResNet, blocks=())) == ["layer2", "layer3", "layer4", "fc", ""]


def test_no_split_modules_of_transformers() -> None:
    model = on_meta(Swin)
    model._no_split_modules = ["GPTBlock", "OfAnotherModel"]
    choice = choose_groups(model)
    assert {group.class_name for group in choice.groups} == {"GPTBlock", "Swin"}
    assert choice.groups[0].reason == "a block: its class is in _no_split_modules"
    assert choose_groups(model, blocks=SwinStage).groups[0].class_name == "SwinStage"
    for useless in (["OfAnotherModel"], None, []):
        model._no_split_modules = useless
        assert choose_groups(model).groups[0].class_name == "SwinStage"


def test_unknown_blocks_are_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(FSDPValueError) as error:
        choose(GPT, blocks=(GPTBlock, "GPT2Block", nn.LSTM))
    assert_expected_inline(
        str(error.value),
        """blocks names 'GPT2Block', 'LSTM', but GPT has no module of that class that can be a group. Those with parameters and a forward are: Embedding (2), GPT (1), GPTBlock (12), LayerNorm (25), Linear (48), Sequential (12).""",  # noqa: E501
    )
    with pytest.raises(FSDPValueError, match="'ModuleList', but GPT has no module of that class that can be a group"):
        choose(GPT, blocks=nn.ModuleList)
    inside = on_meta(lambda: nn.Sequential(nn.MultiheadAttention(8, 2)))
    with pytest.raises(FSDPValueError, match=r"are: MultiheadAttention \(1\), Sequential \(1\)\.$"):
        choose_groups(inside, blocks="NonDynamicallyQuantizableLinear")


@for_each("blocks", [3, [3], int, [nn.Linear(1, 1)], nn.Linear(1, 1)])
def test_blocks_of_another_type(blocks: Any) -> None:
    with pytest.raises(FSDPTypeError, match="blocks must be a class of modules"):
        choose(GPT, blocks=blocks)


# The model itself


def test_a_model_that_is_a_block() -> None:
    choice = choose(lambda: GPTBlock(768), blocks=GPTBlock)
    assert [(group.name, group.reason) for group in choice.groups] == [("", "the model is a block itself")]
    assert names(choose(lambda: GPTBlock(768), blocks=GPTBlock, max_bytes=12 * MIB)) == [
        "attn.c_attn",
        "attn.c_proj",
        "mlp.0",
        "mlp.2",
        "",
    ]


@for_each("make", [nn.Identity, nn.Sequential, lambda: nn.Sequential(nn.ReLU(), nn.ModuleList())])
def test_a_model_without_parameters(make: Callable[[], nn.Module]) -> None:
    choice = choose_groups(make())
    assert [(group.name, group.nbytes, group.reason) for group in choice.groups] == [("", 0, "no parameters")]


@pytest.mark.parametrize("model", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_a_container_without_forward(model: nn.Module) -> None:
    with pytest.raises(FSDPValueError, match=f"auto_shard cannot shard a {type(model).__name__}: it has no forward"):
        choose_groups(model)


def test_wrappers_around_the_model_are_no_groups() -> None:
    expected = names(choose(Unequal))
    wrapped = on_meta(lambda: nn.Sequential(nn.Sequential(Unequal())))
    assert names(choose_groups(wrapped)) == [f"0.0.{name}" if name else "" for name in expected]


@for_each(
    ("options", "error", "text"),
    [
        ({"max_bytes": 1.5}, FSDPTypeError, "takes an int as 'max_bytes', got 1.5"),
        ({"min_bytes": True}, FSDPTypeError, "takes an int as 'min_bytes', got True"),
        ({"min_bytes": -1}, FSDPValueError, "0 <= min_bytes <= max_bytes"),
        ({"max_bytes": 5, "min_bytes": 6}, FSDPValueError, "min_bytes=6 and max_bytes=5 must be"),
        ({"max_bytes": 0, "min_bytes": 0}, FSDPValueError, "max_bytes above 0"),
        ({"mp_policy": 3}, FSDPTypeError, "mp_policy must be"),
        ({"ignored_params": [3]}, FSDPTypeError, "as 'ignored_params', got"),
    ],
)
def test_arguments_are_validated(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        choose_groups(nn.Linear(2, 2), **options)


def test_only_modules() -> None:
    with pytest.raises(FSDPTypeError, match=r"groups are chosen in an nn\.Module, got list"):
        choose_groups([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(FSDPValueError, match=r"parameter '1\.weight' is not initialized"):
        choose_groups(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))


# What counts


def test_bytes_are_counted_as_they_are_gathered() -> None:
    model = nn.Linear(8, 8).double()
    model.register_parameter("codes", nn.Parameter(torch.zeros(8, dtype=torch.int64), requires_grad=False))

    def total(**options: Any) -> int:
        return choose_groups(model, **options).groups[-1].nbytes

    assert total() == 72 * 8 + 64
    assert total(mp_policy=BF16) == 72 * 2 + 64
    assert total(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)) == 72 * 8 + 64
    assert total(mp_policy=lambda fqn, parameter: BF16) == 72 * 8 + 64
    narrow_weights = MixedPrecisionPolicy(
        torch.bfloat16, param_dtype_override_fn=lambda parameter: parameter.dtype if parameter.dim() == 1 else None
    )
    assert total(mp_policy=narrow_weights) == 64 * 2 + 8 * 8 + 64
    assert total(ignored_params=[model.weight]) == 8 * 8 + 64


def test_ignored_parameters_make_no_groups() -> None:
    model = on_meta(GPT)
    block = model.transformer["h"][3]
    choice = choose_groups(model, ignored_params=block.parameters())
    assert "transformer.h.3" not in names(choice) and "transformer.h.4" in names(choice)


def test_a_tied_weight_counts_in_the_group_that_will_own_it() -> None:
    """The encoder's is called before the model's, which holds the weight first."""
    model = nn.Sequential()
    model.register_parameter("table", nn.Parameter(torch.zeros(64, 16)))
    model.append(nn.Sequential(nn.Linear(16, 64), nn.Tanh()))
    model.append(nn.Sequential(nn.Linear(64, 16), nn.Tanh()))
    model[0][0].weight = model.table
    choice = choose_groups(model, min_bytes=0)
    assert [(group.name, group.nbytes) for group in choice.groups] == [("0", 4352), ("1", 4160), ("", 0)]


class Twice(Shaped):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.shared = shared


def test_a_module_below_several_groups_is_one_itself() -> None:
    shared = nn.Linear(8, 8)
    choice = choose_groups(nn.Sequential(Twice(shared), Twice(shared)), blocks=Twice)
    assert names(choice) == ["0.shared", "0", "1", ""]
    assert choice.groups[0].reason == "registered below several groups: 0, 1"
    held = nn.ModuleList([nn.ModuleList([shared])])  # has no forward: what is in it is shared
    assert names(choose_groups(nn.Sequential(Twice(held), Twice(held)), blocks=Twice))[0] == "0.shared.0.0"
    assert names(choose_groups(nn.Sequential(shared, shared), min_bytes=0)) == [""]


def test_what_has_no_forward_is_no_group() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 65)
            self.table = nn.Parameter(torch.zeros(8))

    class Model(Shaped):
        def __init__(self) -> None:
            super().__init__()
            self.bag = Bag()
            self.scales = nn.ParameterList([torch.zeros(64, 64)])

    assert names(choose_groups(Model(), min_bytes=1024)) == ["bag.first", "bag.second", ""]
    model = Model()
    model.bag.forward = lambda x: x  # type: ignore[assignment]
    assert names(choose_groups(model, min_bytes=1024)) == ["bag.first", "bag.second", ""]  # the fork is in the bag


def test_parametrized_modules_stay_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale(x)

    model = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(64, 64, 1))
    for each in model:
        torch.nn.utils.parametrize.register_parametrization(each, "weight", Scaled(), unsafe=True)
    assert names(choose_groups(model, min_bytes=256, max_bytes=512)) == ["0", "1", ""]


def test_nothing_is_changed_and_the_choice_is_the_same_again() -> None:
    model = on_meta(EncoderDecoder)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    choice = choose_groups(model)
    assert choose_groups(model) == choice == choose_groups(copy.deepcopy(model))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert type(model) is EncoderDecoder and not isinstance(model, fsdp2.FSDPModule)


def test_small_pieces_leave_the_rest_only_if_it_is_above_max_bytes() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 1 + each)) for each in range(40)))

    total = sum(parameter.numel() * 4 for parameter in make().parameters())
    assert names(choose_groups(make(), max_bytes=total, min_bytes=total // 2)) == [""]
    choice = choose_groups(make(), max_bytes=total // 2, min_bytes=total // 4)
    assert len(choice.groups) > 1 and choice.groups[-1].nbytes <= total // 2
