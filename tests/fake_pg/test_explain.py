"""`fsdp2.explain`: texts as a user reads them, advice where it applies and where not, JSON."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import FSDPValueError, MixedPrecisionPolicy, fully_shard
from fsdp2.tools.explaining.advice import advice_for
from fsdp2.tools.facts import facts_of
from tests.harness.fake import FakeWorlds
from tests.harness.shared.language_model import LM, sharded, step, two_axes

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


# ---- texts ---------------------------------------------------------------------------------------------


def test_text(simulate: FakeWorlds) -> None:
    simulate(8, rank=3)
    model = sharded(LM(width=256), mp_policy=MIXED)
    assert_expected_inline(
        str(fsdp2.explain(model)),
        """\
LM has 1.6 million parameters, 6.1 MiB. They are cut into 4 groups, sharded over 8 ranks. Rank 3 keeps 784.2
KiB of them at rest, and 784.8 KiB of gradients after a backward. A group is gathered whole just before its
module computes, and freed after that: the largest, 'blocks.0', then takes 1 MiB, and all that are there at a
time 2.1 MiB at most. In one step a rank sends 8.1 MiB to others, all on one node. No step has run yet, so
groups are taken to be needed in the order of the modules.

group       class  parameters         at rest  unsharded  dtypes              over  after forward  sent in a step
----------  -----  -----------  -------------  ---------  ------------------  ----  -------------  --------------
(LM)        LM     25,600              14 KiB     56 KiB  fp32 > bf16 > fp32  8     kept                147.9 KiB
blocks.0-2  Block  3 x 525,824  3 x 256.8 KiB  3 x 1 MiB  fp32 > bf16 > fp32  8     freed                 7.9 MiB

collective      among ranks  in forward  in backward  sent inside node  to other nodes
--------------  -----------  ----------  -----------  ----------------  --------------
all-gather      0-7                   4            3           5.3 MiB             0 B
reduce-scatter  0-7                   0            4           2.7 MiB             0 B

More on one group: explain(model).details("blocks.0")""",
    )
    step(model)
    summary = str(fsdp2.explain(model, ranks_per_node=4)).partition("\n\n")[0]
    assert_expected_inline(
        summary,
        """\
LM has 1.6 million parameters, 6.1 MiB. They are cut into 4 groups, sharded over 8 ranks. Rank 3 keeps 784.2
KiB of them at rest, and 784.8 KiB of gradients after a backward. A group is gathered whole just before its
module computes, and freed after that: the largest, 'blocks.0', then takes 1 MiB, and all that are there at a
time 2.1 MiB at most. In one step a rank sends 8.1 MiB to others: 6 MiB inside its node, 2 MiB between 2
nodes. Groups are gathered ahead in the order that the last step has shown.""",
    )


def test_details(simulate: FakeWorlds) -> None:
    simulate(8, rank=3)
    model = LM(width=256, tied=True)
    model.blocks[1].norm.requires_grad_(False)
    sharded(model, mesh=two_axes(), reshard_after_forward=2, mp_policy=MIXED)
    explanation = fsdp2.explain(model, ranks_per_node=4)
    assert_expected_inline(
        explanation.details("blocks.1"),
        """\
blocks.1 (Block), sharded over 4 ranks in 2 copies, as strategy="zero3"

  mesh            (replicate=2 x shard=4) on cpu, fake
  shard ranks     0-3
  copies on       3, 7
  at rest         513.5 KiB
  unsharded       1 MiB
  gradients       513.1 KiB
  after forward   to 2 ranks

parameter             shape       on this rank    bytes  placement         rests  computes  reduced  gather  reduce
--------------------  ----------  ------------  -------  ----------------  -----  --------  -------  ------  ------
blocks.1.norm.weight  256         64              256 B  Shard(0)/shard=4  fp32   bf16      frozen   packed  stays
blocks.1.norm.bias    256         64              256 B  Shard(0)/shard=4  fp32   bf16      frozen   packed  stays
blocks.1.up.weight    1024 x 256  256 x 256     256 KiB  Shard(0)/shard=4  fp32   bf16      fp32     packed  direct
blocks.1.up.bias      1024        256             1 KiB  Shard(0)/shard=4  fp32   bf16      fp32     packed  packed
blocks.1.down.weight  256 x 1024  64 x 1024     256 KiB  Shard(0)/shard=4  fp32   bf16      fp32     packed  direct

Gathered packed: blocks.1.norm.weight, blocks.1.norm.bias, blocks.1.up.weight, blocks.1.up.bias and 1 more:
  smaller than 1 MiB.
Reduced not at all: blocks.1.norm.weight, blocks.1.norm.bias: frozen.
Reduced directly: blocks.1.up.weight, blocks.1.down.weight: 1 MiB or larger.
Reduced packed: blocks.1.up.bias: smaller than 1 MiB.

in a step  collective      ranks  times  members  bytes of a rank  sent inside node  to other nodes
---------  --------------  -----  -----  -------  ---------------  ----------------  --------------
forward    all-gather          4      1        1        256.8 KiB         770.2 KiB             0 B
backward   all-gather          2      1        1        513.5 KiB         513.5 KiB             0 B
backward   reduce-scatter      4      1        3        257.1 KiB         771.4 KiB             0 B
backward   all-reduce          2      1        1        513.1 KiB               0 B       513.1 KiB""",
    )
    assert_expected_inline(
        explanation.details("embed.weight"),
        """\
LM (LM), sharded over 4 ranks in 2 copies, a root, as strategy="zero3"

  mesh            (replicate=2 x shard=4) on cpu, fake
  shard ranks     0-3
  copies on       3, 7
  at rest         13 KiB
  unsharded       26 KiB
  gradients       13.1 KiB
  after forward   to 2 ranks

parameter     shape     on this rank   bytes  placement         rests  computes  reduced  gather  reduce
------------  --------  ------------  ------  ----------------  -----  --------  -------  ------  ------
embed.weight  50 x 256  11 x 256      11 KiB  Shard(0)/shard=4  fp32   bf16      fp32     packed  packed

Gathered packed: embed.weight: smaller than 1 MiB.
Reduced packed: embed.weight: smaller than 1 MiB.
Tied: embed.weight is also head.weight.

in a step  collective      ranks  times  members  bytes of a rank  sent inside node  to other nodes
---------  --------------  -----  -----  -------  ---------------  ----------------  --------------
forward    all-gather          4      1        1          6.5 KiB          19.5 KiB             0 B
backward   all-gather          2      1        1         12.5 KiB          12.5 KiB             0 B
backward   reduce-scatter      4      1        1         13.1 KiB          39.4 KiB             0 B
backward   all-reduce          2      1        1         13.1 KiB               0 B        13.1 KiB""",
    )


def test_text_of_a_model_that_is_not_sharded() -> None:
    assert_expected_inline(
        str(fsdp2.explain(LM())),
        """\
LM has 8,032 parameters, 31.4 KiB. Nothing of it is sharded: fully_shard was called on no module, and this
rank keeps it whole.

in no group: embed.weight, blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.up.weight, blocks.0.up.bias,
blocks.0.down.weight and 11 more (31.4 KiB on every rank)

What could be better:
1. [wrong] Nothing of LM is sharded: every rank keeps all 31.4 KiB, and no gradient is averaged over the
   ranks.
     fsdp2.auto_shard(model)  # or: fully_shard(block) for each block, then fully_shard(model)""",
    )


def test_names_that_details_knows(simulate: FakeWorlds) -> None:
    simulate(8)
    model = sharded(LM(tied=True))
    explanation = fsdp2.explain(model)
    assert explanation.details("") == explanation.details("LM")
    assert "blocks.1.up.weight" in explanation.details("blocks.1.up")
    assert "blocks.1.down.weight" not in explanation.details("blocks.1.up")
    assert "embed.weight" in explanation.details("head.weight")  # tied
    with pytest.raises(FSDPValueError, match=r"got 'layers\.1'\. There are: '', 'blocks\.0', 'blocks\.1', 'blocks\.2'"):
        explanation.details("layers.1")
    with pytest.raises(FSDPValueError, match="There are: no groups at all"):
        fsdp2.explain(nn.Linear(2, 2)).details("weight")


# ---- advice ----------------------------------------------------------------------------------------------


def kinds(model: nn.Module, **arguments: Any) -> set[str]:
    return {each.kind for each in fsdp2.explain(model, **arguments).advice}


def large(**arguments: Any) -> LM:
    """Without memory: 12 MiB in each block of 1,024 x 4,096."""
    with torch.device("meta"):
        return LM(**{"width": 1024, "words": 1024, **arguments})


def test_no_advice_where_all_is_well(simulate: FakeWorlds) -> None:
    simulate(8)
    assert kinds(sharded(LM())) == set()
    assert kinds(sharded(large())) == {"meta"}


ADVICE: dict[str, Callable[[], nn.Module]] = {
    "not-sharded": lambda: LM(),
    "in-no-group": lambda: fully_shard_blocks(LM()),
    "ignored-but-trained": lambda: ignoring_the_head(LM()),
    "one-group": lambda: fully_shard(large()),
    "heavy-root": lambda: sharded(large(words=50_000)),
    "huge-group": lambda: sharded(large(width=16_384)),
    "tiny-groups": lambda: norms_apart(large(blocks=4)),
    "embedding": lambda: embedding_apart(large(words=40_000)),
}


def fully_shard_blocks(model: LM) -> LM:
    for block in model.blocks:
        fully_shard(block)
    return model


def ignoring_the_head(model: LM) -> nn.Module:
    return sharded(model, ignored_params=[model.head.weight])


def norms_apart(model: LM) -> nn.Module:
    for block in model.blocks:
        fully_shard(block.norm)
    return sharded(model)


def embedding_apart(model: LM) -> nn.Module:
    fully_shard(model.embed)
    return sharded(model)


@pytest.mark.parametrize("kind", list(ADVICE))
def test_advice(kind: str, simulate: FakeWorlds) -> None:
    simulate(8)
    found = {each.kind: each for each in fsdp2.explain(ADVICE[kind]()).advice}
    assert kind in found, sorted(found)
    advice = found[kind]
    assert advice.where and advice.what.endswith(".") and advice.change


def test_advice_where_nothing_reduces(simulate: FakeWorlds) -> None:
    """A step that accumulates, and no last microbatch."""
    simulate(8)
    model = sharded(LM(), mesh=two_axes())
    model.set_requires_gradient_sync(False)
    step(model)
    (advice,) = [each for each in fsdp2.explain(model).advice if each.kind == "never-reduced"]
    assert advice.level == "wrong" and "blocks.0" in advice.where
    assert "set_requires_gradient_sync(False) is on for LM, blocks.0" in advice.what
    assert "fsdp2.accumulate(model, last=" in advice.change and "set_requires_gradient_sync(True)" in advice.change
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    (advice,) = [each for each in fsdp2.explain(model).advice if each.kind == "never-reduced"]
    assert "set_requires_all_reduce(False) is on" in advice.what and "copies, which drift apart" in advice.what
    model.set_requires_all_reduce(True)
    assert "never-reduced" not in kinds(model)


def test_advice_on_links(simulate: FakeWorlds) -> None:
    simulate(16)
    model = sharded(large(blocks=8))
    (advice,) = [each for each in fsdp2.explain(model, ranks_per_node=8).advice if each.kind == "slow-links"]
    assert advice.change == "fully_shard(..., reshard_after_forward=8)"
    assert "slow-links" not in kinds(model)
    followed = sharded(large(blocks=8), reshard_after_forward=8)
    assert "slow-links" not in kinds(followed, ranks_per_node=8)
    mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
    assert "slow-links" not in kinds(sharded(large(blocks=8), mesh=mesh), ranks_per_node=8)


def test_advice_on_sums(simulate: FakeWorlds) -> None:
    simulate(64)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    assert "narrow-sums" in kinds(sharded(large(), mp_policy=bf16))
    assert "narrow-sums" not in kinds(sharded(large(), mp_policy=MIXED))


def test_advice_on_devices(simulate: FakeWorlds) -> None:
    """As if the ranks computed on GPUs, of which there are none here."""
    simulate(8)
    facts = facts_of(sharded(large()))
    device = torch.device("cuda", 0)
    on_devices = replace(facts, groups=tuple(replace(group, device=device) for group in facts.groups))
    assert {each.kind for each in advice_for(on_devices)} == {"meta", "full-precision"}
    assert "full-precision" not in {each.kind for each in advice_for(facts)}


def test_modules_that_did_not_run(simulate: FakeWorlds) -> None:
    simulate(8)
    model = LM()
    model.forward = lambda tokens: model.head(model.blocks[0](model.embed(tokens)))  # type: ignore[method-assign]
    sharded(model)
    step(model)
    (advice,) = fsdp2.explain(model).advice
    assert (advice.kind, advice.where) == ("not-reached", ("blocks.1", "blocks.2"))


# ---- JSON, other ways to look ----------------------------------------------------------------------------


def test_json(simulate: FakeWorlds) -> None:
    simulate(8, rank=1)
    model = sharded(LM(width=256), mp_policy=MIXED, mesh=two_axes())
    read = json.loads(fsdp2.explain(model).to_json(indent=1))
    facts = facts_of(model)
    assert read["class_name"] == "LM" and read["world_size"] == 8 and len(read["groups"]) == len(facts.groups)
    group = read["groups"][1]
    assert group["name"] == "blocks.0" and group["shard_ranks"] == [0, 1, 2, 3] and group["device"] == "cpu"
    assert group["params"][0]["computes"] == "bfloat16" and group["mesh"][1] == {"name": "shard", "size": 4}
    assert sum(each["inside_bytes"] for each in read["exchanges"]) == sum(e.inside_bytes for e in facts.exchanges)


def test_show_without_a_terminal_prints_the_text(simulate: FakeWorlds) -> None:
    simulate(4)
    explanation = fsdp2.explain(sharded(LM()))
    out = io.StringIO()
    explanation.show(out)
    assert out.getvalue() == f"{explanation}\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_show_on_a_terminal(simulate: FakeWorlds) -> None:
    pytest.importorskip("rich", reason="rich is optional; without it, show() prints the text")
    simulate(4)
    explanation = fsdp2.explain(ignoring_the_head(LM()))
    out = _Terminal()
    explanation.show(out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert text != out.getvalue() and "blocks.0-2" in text and "1. wrong head.weight is ignored and trained" in text


# ---- docs/explain.md -------------------------------------------------------------------------------------


def test_the_docs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], simulate: FakeWorlds
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    simulate(16)  # as the first block does
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks:
        exec(re.sub(r"^dist\.init_process_group.*$", "", block, flags=re.MULTILINE), names)
    printed = capsys.readouterr().out
    assert "TransformerEncoderLayer" in printed and "slow-links" in {each.kind for each in names["explanation"].advice}
