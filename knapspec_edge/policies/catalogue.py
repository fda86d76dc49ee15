"""What each policy is, where it comes from and what it needs. Words only: `--help` reads this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Description:
    """One policy, in words."""

    title: str
    source: str  # the publication, or whose idea it is
    rule: str  # how it drafts, in one sentence
    training: str  # what has to be trained; "none"
    search: str  # what is measured or searched, and when
    differs: str  # how our form differs from the publication
    module: str
    # what it takes of a Setting beside the backend: "costs" (of sublayers), "planner" (a decision),
    # "calibration" (a text), "draft model", "extra" (the optional dependencies)
    needs: tuple[str, ...] = ()
    longest_draft: str | None = None  # the value of Config that bounds its drafts; None: no drafts


DESCRIPTIONS: dict[str, Description] = {
    "plain": Description(
        title="Plain decoding",
        source="autoregressive decoding",
        rule="one token per pass of the full model, no drafts",
        training="none",
        search="none",
        differs="",
        module="plain",
    ),
    "knapspec-paper": Description(
        title="KnapSpec as published",
        source="KnapSpec",
        rule="search over hidden states by cosine, the plan and length of the highest published "
        "TPT; always on",
        training="none",
        search="costs of sublayers, once per machine; a search every 64 rounds, as decode time",
        differs="the states of the reference window are computed beside the text; the length that "
        "was found is used",
        module="knapspec_paper",
        needs=("costs",),
        longest_draft="dp_paper_max_draft",
    ),
    "knapspec": Description(
        title="Ours",
        source="this project, after KnapSpec",
        rule="plans of a knapsack over measured costs and agreements and of a search over hidden "
        "states, judged on the target's own text; drafts as long as they are worth it; off where "
        "plain decoding is faster",
        training="none",
        search="costs, agreements and rounds, once per machine and model (seconds, kept); 1 % of "
        "the decode time",
        differs="",
        module="knapspec",
        needs=("costs", "planner"),
        longest_draft="draft_max_tokens",
    ),
}
