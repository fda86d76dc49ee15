"""What each policy is, where it comes from and what it needs. Words only: `--help` reads this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Description:
    """One policy, in words."""

    title: str
    source: str  # the publication, or whose idea it is
    rule: str  # how it drafts
    module: str
    training: str = "none"  # that the publication needs
    search: str = "none"  # what is measured or searched, and when
    differs: str = ""  # how our form differs from the publication
    # what it takes of a Setting beside the backend: "costs" (of sublayers), "verification" (what it
    # costs, alone), "planner" (a decision), "calibration" (a text), "draft model", "extra" (the
    # optional dependencies "policies")
    needs: tuple[str, ...] = ()
    proposes: bool = False  # tokens, without a plan: models whose sublayers nobody knows will do
    longest_draft: str | None = None  # the value of Config that bounds its drafts; None: no drafts


_BESIDE = "the target's states are computed again beside the text instead of kept by verification"

DESCRIPTIONS: dict[str, Description] = {
    "plain": Description(
        title="plain decoding",
        source="-",
        rule="one token per pass of the full model",
        module="plain",
    ),
    "layerskip": Description(
        title="LayerSkip",
        source="Elhoushi et al., arXiv 2404.16710",
        rule="exit after a quarter of the layers, 6 tokens",
        module="layerskip",
        training="layer dropout and a loss at every exit, for the whole model",
        differs="weights as they are; verification runs all layers, as llama.cpp cannot begin a "
        "pass behind the exit",
        longest_draft="layerskip_max_draft",
    ),
    "kangaroo": Description(
        title="Kangaroo, training-free",
        source="Liu et al., arXiv 2404.18911",
        rule="exit after 2 layers, up to 6 tokens, stop below 0.6",
        module="kangaroo",
        training="an adapter behind the exit",
        differs="no adapter; verification runs all layers",
        longest_draft="kangaroo_max_draft",
    ),
    "del": Description(
        title="DEL",
        source="arXiv 2504.05598",
        rule="exit layer and length (up to 17) of the most tokens per layer, by what each exit "
        "would have picked at verified positions; stop threshold from the same",
        module="dynamic_exit",
        training="LayerSkip's weights",
        search="a pass over 8 tokens and a head on every layer's states, every 8 tokens",
        differs=f"weights as they are; {_BESIDE}, hence every 8 tokens and not each round",
        longest_draft="del_max_draft",
    ),
    "asd": Description(
        title="ASD, Draft on the Fly",
        source="Metel et al., arXiv 2410.01028",
        rule="leave out the half of the attention sublayers whose input and output are most alike "
        "by cosine; up to 8 tokens, adaptive stop",
        module="asd",
        search="a pass over 32 tokens, once per answer",
        differs=f"the share is fixed and two further rules are left out; {_BESIDE}",
        longest_draft="draft_verify_max_draft",
    ),
    "draft-verify": Description(
        title="Draft & Verify (Self-SD)",
        source="Zhang et al., arXiv 2309.08168",
        rule="a static mask of sublayers; up to 8 tokens, adaptive stop",
        module="draft_verify",
        search="Bayesian optimisation of measured tokens/s, once per model and machine: 2 minutes "
        "here (kept), hours as published",
        differs="a shorter search, on two pieces of our calibration text; shared noise in place of "
        "rejection sampling",
        needs=("calibration", "extra"),
        longest_draft="draft_verify_max_draft",
    ),
    "swift": Description(
        title="SWIFT",
        source="Xia et al., arXiv 2410.06916",
        rule="leave out 45 % of the sublayers, by the best mask so far; up to 25 tokens, stop "
        "below 0.8",
        module="swift",
        search="each round a random or Bayesian mask, scored on the answer's first 50 tokens",
        differs="a chain in place of a tree of likely tokens",
        needs=("extra",),
        longest_draft="swift_max_draft",
    ),
    "clasp": Description(
        title="CLaSp",
        source="arXiv 2505.24196",
        rule="leave out a quarter of the layers, by dynamic programming on the cosine at one "
        "token; up to 10 tokens, stop below 0.7",
        module="clasp",
        search="dynamic programming over layers, every 64 rounds",
        differs=f"{_BESIDE}; the first layer always runs",
        longest_draft="clasp_max_draft",
    ),
    "knapspec-paper": Description(
        title="KnapSpec as published",
        source="KnapSpec",
        rule="sublayers by a search over hidden states, plan and length (up to 10) of the highest "
        "published TPT; stop below 0.7",
        module="knapspec_paper",
        search="costs of sublayers, once per machine (kept); a search every 64 rounds",
        differs=f"{_BESIDE}; the length that was found is used",
        needs=("costs",),
        longest_draft="dp_paper_max_draft",
    ),
    "knapspec": Description(
        title="ours",
        source="this project, after KnapSpec",
        rule="what followed the end of the text before, where that is worth verifying; else plans "
        "of a knapsack over measured costs and agreements and of a search over hidden states, "
        "judged on the target's own text; lengths by value; off where plain decoding is faster",
        module="knapspec",
        search="costs, agreements and rounds, once per model and machine (seconds, kept); 1 % of "
        "the decode time",
        needs=("costs", "planner"),
        longest_draft="draft_max_tokens",
    ),
    "knapspec-masks": Description(
        title="ours without lookups",
        source="as knapspec",
        rule="as knapspec, with its plans alone; always on",
        module="knapspec_masks",
        search="as knapspec",
        needs=("costs", "planner"),
        longest_draft="draft_max_tokens",
    ),
    "lookup-by-value": Description(
        title="our lookup alone",
        source="this project, after SuffixDecoding, arXiv 2411.04975",
        rule="what followed the longest match of the text's end, of any length; up to 7 tokens by "
        "value, none where plain decoding is faster",
        module="lookup_by_value",
        search="the cost of verification, once per model and machine (a second, kept)",
        differs="chances from this text's own record in place of frequencies in a tree; no tree of "
        "earlier answers",
        needs=("verification",),
        proposes=True,
        longest_draft="draft_max_tokens",
    ),
    "lookup": Description(
        title="prompt lookup",
        source="after Saxena, Prompt Lookup Decoding, 2023",
        rule="what followed the latest earlier place of the text's last 4, 3 or 2 tokens; up to 8 "
        "tokens",
        module="lookup",
        differs="the latest place in place of the first, no match of a single token",
        proposes=True,
        longest_draft="lookup_max_draft",
    ),
    "lookup-llama-cpp": Description(
        title="prompt lookup of llama-cpp-python",
        source="llama-cpp-python, LlamaPromptLookupDecoding",
        rule="what followed the first place of the text's last 2 tokens or last one; up to 10 "
        "tokens",
        module="lookup_llama_cpp",
        differs="its rule in our loop",
        proposes=True,
        longest_draft="llama_cpp_lookup_draft",
    ),
    "draft-model": Description(
        title="a separate draft model",
        source="llama.cpp's --model-draft",
        rule="a small model of the same vocabulary drafts up to 8 tokens, and stops before one "
        "below 0.75",
        module="draft_model",
        training="none, where a small model of the family exists",
        differs="noise shared with the target",
        needs=("draft model",),
        proposes=True,
        longest_draft="draft_model_max_draft",
    ),
    "random": Description(
        title="random plan of equal cost",
        source="control",
        rule="sublayers drawn by chance until they save what ours saves; its length and stop",
        module="random_plan",
        search="as knapspec, for the cost",
        needs=("costs", "planner"),
        longest_draft="random_max_draft",
    ),
}
