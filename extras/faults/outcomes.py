"""What becomes of a case with a fault, in a word."""

from __future__ import annotations

from extras.torch_gaps.run import Ran

WORDS = ("right", "named", "no such option", "wrong", "hang", "abort", "obscure")
"""All there are, the good ones first.

* right: it works, and the gradients of the next step are right;
* named: all ranks that are left raised within 20 s an error that names ranks, and the next step was right;
* wrong: the next step's gradients are wrong, and nothing was raised;
* hang: ranks wait for each other for 30 s;
* abort: a process ended by a signal;
* obscure: another error.
"""


def word_of(ran: Ran, *, loses: int = 0) -> str:
    """One of `WORDS`; ``loses``: so many ranks are killed or stopped by the case itself."""
    details = [each.outcome.detail for each in ran.reports]
    is_named = [detail.startswith("Named") for detail in details]
    is_well = [
        each.outcome.kind == "works" or each.outcome.detail.startswith(("Named", "Ended")) for each in ran.reports
    ]
    kinds = {each.outcome.kind for each in ran.reports}
    if len(ran.crashed) > loses:
        return "abort"
    if "wrong" in kinds:  # others may wait for a rank that has noticed
        return "wrong"
    if len(ran.reports) + loses < ran.ranks:
        return "hang"
    if "no such option" in kinds:
        return "no such option"
    if any(is_named) and all(is_well):
        return "named"
    return "right" if kinds == {"works"} else "obscure"
