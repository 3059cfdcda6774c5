"""Every study by name: its paper, what it asks, and where it is.

This table needs no torch, so that studies can be listed at once: the module of a study is imported when it
runs. A study is `run(asked) -> Result`; its sizes are in `presets.py`. Those of "Stage-Partitioned Learning"
have arms, seeds and claims with verdicts: the paper states its Experiments A to E as an agenda (§10.7) and
has run none; its depth sweep (§8) it has run, with one seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from papers.outcome import Asked, Result
from topograd.errors import ConfigError


@dataclass(frozen=True)
class Study:
    """What a study asks, and how it is run."""

    title: str
    prediction: str
    """What the paper says should come out, or what is asked where it says nothing."""
    module: str
    """FOLDER.MODULE of this package."""
    function: str = "run"
    staged: bool = False
    """Whether it is an experiment in staged learning, with arms, seeds and claims (`staged_runs.py`)."""
    pictures: bool = False
    """Whether it is about pictures: of a folder that is named, or scikit-learn's digits."""
    rows: str | None = None
    """The study among whose measurements it keeps its own, because they have arms in common."""

    @property
    def paper(self) -> str:
        """The paper's name as in `reproduction.PAPERS`, or "beyond" where the question is ours."""
        return self.module.partition(".")[0].replace("_", "-")

    def run(self, args: Asked) -> Result:
        function = getattr(import_module(f"papers.{self.module}"), self.function)
        if self.staged:
            from papers.staged_runs import judged

            return judged(function, args)
        result: Result = function(args)
        return result


STUDIES: Mapping[str, Study] = {
    "stage0-depth": Study(
        "The depth of the first stage",
        "At a fixed number of stages, BPB falls with the depth of the first one, less and less and through "
        "all of training, the tails behind it are exchangeable, and no partition beats backprop (Lemma 8.1, "
        "§8.4, Corollary 8.12).",
        "stage_partitioned_learning.stage0_depth",
        staged=True,
    ),
    "experiment-a": Study(
        "Residual Log-OP objective",
        "Under the residual Log-OP the fall of BPB with the depth of the first stage weakens, later stages "
        "become more useful, and tails of another order are no longer the same (§10.5.4, §10.7 A).",
        "stage_partitioned_learning.experiment_a",
        staged=True,
    ),
    "experiment-b": Study(
        "Detached input bus",
        "A detached input bus improves BPB where the first stage is shallow, flattens the slope by its "
        "depth, and makes later stages more useful (§10.5.1, §10.7 B).",
        "stage_partitioned_learning.experiment_b",
        staged=True,
    ),
    "experiment-c": Study(
        "Stage forest against chain",
        "A forest has no single root: its BPB does not hang on the depth of the first branch as a chain's "
        "does, its branches are independent experts, and pooled they compete with the chain (Prop. 10.12, "
        "§10.7 C).",
        "stage_partitioned_learning.experiment_c",
        staged=True,
    ),
    "experiment-d": Study(
        "Soft boundaries, two objectives",
        "With the expected number of boundaries fixed at two, learning under the losses alone hardens at a "
        "large first stage, and with U_cap in the objective at an interior partition (Prop. 8.11, Prop. "
        "10.2, §10.7 D).",
        "stage_partitioned_learning.experiment_d",
        staged=True,
    ),
    "experiment-e": Study(
        "Bandwidth: rank and gates",
        "The effective rank at the end of the first stage goes with a better BPB, a multiplicative gate "
        "there lowers BPB, and a bounded relay narrows what it passes on and raises it (§8.9, §10.5.5, "
        "§10.7 E).",
        "stage_partitioned_learning.experiment_e",
        staged=True,
    ),
    "partition-search": Study(
        "Three searches for a partition",
        "Dynamic programming over stage costs, learned boundaries and surgery find partitions of low cost "
        "(§10.2); whether they choose better than chance with the same budget is left open.",
        "stage_partitioned_learning.partition_search",
        staged=True,
    ),
    "property-profile": Study(
        "Every property over the stages and the depth of the first",
        "Along three stages BPB falls with the depth of the first, memory follows the deepest stage, and "
        "capability, specialists and composition decline; over (K, d_0) refining costs BPB, capability is "
        "largest where there are two stages or more of at least two layers, and the interior is on the front "
        "(§7, §8.6, §10.6 levels 1 and 2).",
        "stage_partitioned_learning.property_profile",
    ),
    "front-scale": Study(
        "The front against scale",
        "No partition beats backprop and coarser stages cost less at every scale (Corollary 8.12); whether "
        "the gap at a fixed number of stages shrinks, and whether the front keeps its shape, is left open "
        "(§10.6 level 5).",
        "stage_partitioned_learning.front_scale",
    ),
    "gap": Study(
        "What cutting the gradient costs, and what closes the gap",
        "Stages cost 6 % BPB at 1.3 billion parameters (Product of Experts, §3.1); whether it can cost "
        "nothing, at equal time or in equal memory, is left open (§8.1, §10.1).",
        "product_of_experts.gap",
    ),
    "token-ratio": Study(
        "The gap against tokens per parameter, with rates tuned for each arm",
        "The gap is structural: it is there at every budget, does not close from r = 10 to r = 30, and is "
        "smaller for coarser stages (Product of Experts, §5.6, §8.1, §10.1); whether rates of the stages' "
        "own or heads of their own close it is left open (§9, §10.2).",
        "product_of_experts.token_ratio",
    ),
    "distillation": Study(
        "A teacher of a staged student",
        "A backprop teacher lowers the BPB of a staged student at equal steps and at equal work, and hands "
        "rare facts on (Product of Experts, §10.2(2)).",
        "product_of_experts.distillation",
    ),
    "specialists": Study(
        "Specialists and facts",
        "A specialist with a head of its own leaves the base's logits as they are, bit for bit, and training "
        "the shared head destroys them; chats make a model trust passages more than prose does, and framings "
        "of a wrong claim hardly matter (Product of Experts, §6.3 to §6.6, §8.2.1).",
        "product_of_experts.specialist_facts",
    ),
    "specialist-surface": Study(
        "How deep a specialist should be for how much text",
        "A head alone learns, every depth learns more from more text, and depth is worth more the more text "
        "there is; the paper has one depth and one size (Product of Experts, §6.6).",
        "product_of_experts.specialist_surface",
    ),
    "specialist-widths": Study(
        "A specialist moved to a wider base that was trained anew",
        "A specialist can be carried to a base that was trained anew, and a few steps mend the rest (Product "
        "of Experts, §10.4); another width is our question.",
        "product_of_experts.specialist_widths",
    ),
    "image-topologies": Study(
        "Topologies and local rules across networks on pictures",
        "PoE with diversity is level with backprop on an MLP, hierarchical PoE comes within 1.25 to 2.45 "
        "points on convolutions where flat PoE fails, and mechanical replacements of backprop fail (Product "
        "of Experts, A.1, A.2).",
        "product_of_experts.image_topologies",
        pictures=True,
    ),
    "elastic": Study(
        "Stages that come and go",
        "A stage can be added while training goes on, left out at inference, and lost: a failed device "
        "affects only the stages that it hosts (Product of Experts, §8.5).",
        "product_of_experts.elastic",
        pictures=True,
    ),
    "continual": Study(
        "Tasks one after another",
        "PoE with distillation keeps 2.1 times EWC's accuracy on Split-CIFAR-10, and shrinkage that is added "
        "when it predicts gains 4.3 points (Product of Experts, A.3).",
        "product_of_experts.continual",
        pictures=True,
    ),
    "composition": Study(
        "The best pool of a model's stages",
        "Stages pooled in log space with fitted weights predict better than the last alone; weighting by "
        "confidence does not help, and shrinkage belongs behind training (Product of Experts, eq. 6, C.5, "
        "Principle 2.7).",
        "product_of_experts.composition",
        staged=True,
    ),
    "head-perturbation": Study(
        "Noise in the head",
        "A model trained in stages through one head is no more robust against noise in it than backprop: it "
        "loses 1.02 to 2.59 times as much (Product of Experts, §8.6).",
        "product_of_experts.head_perturbation",
        staged=True,
    ),
    "interfaces": Study(
        "What a bounded interface costs in quality",
        "A model of regions with bounded interfaces comes close to the dense model, on four architectures "
        "(LBI, Tables 2, 6 and 7).",
        "latent_bounded_interfaces.interface_quality",
    ),
    "interface-hypotheses": Study(
        "Why a causal interface carries so little",
        "Nine hypotheses of ours, from a shift that is stricter than causality needs to messages that "
        "nobody reads, each with the experiment that settles it (beside LBI, §3.1 and Table 2).",
        "latent_bounded_interfaces.interface_hypotheses",
    ),
    "interface-verdict": Study(
        "What bounded interfaces keep of depth, with controls",
        "A model of regions with bounded interfaces comes close to the dense model (LBI, Table 2), asked "
        "with a positive control, the right shallow one and tuned rates.",
        "latent_bounded_interfaces.interface_verdict",
    ),
    "interface-rank": Study(
        "How wide an interface must be, from a checkpoint's adjoints",
        "The spectrum of a dense checkpoint's adjoints says which rank an interface needs. A question that "
        "LBI, §A, leaves open.",
        "latent_bounded_interfaces.interface_rank",
    ),
    "forward-sweeps": Study(
        "The forward over depth in parallel sweeps",
        "With the Jacobians that a scan has anyway, Newton's method solves the forward of all regions at "
        "once in few sweeps. A question of ours (beside LBI, §3.2).",
        "latent_bounded_interfaces.forward_sweeps",
    ),
    "masked-encoder": Study(
        "A bounded interface in an encoder",
        "Where all positions may be read, a state of the whole sequence is legitimate, and regions that are "
        "joined by it keep the quality of depth (LBI, §3.1 and Table 2, asked of a masked model).",
        "latent_bounded_interfaces.masked_encoder",
    ),
    "planted-message": Study(
        "What the published interface can learn to say",
        "A label that only a message can bring is learned through the published interface; that nobody reads "
        "its messages in an encoder of text is a matter of its learning rate. A question of ours (beside "
        "LBI, §3.1).",
        "latent_bounded_interfaces.planted_message",
    ),
    "leak": Study(
        "The published interface sees the future",
        "The published interface adds a summary of a whole sequence to every position. A causal one cannot "
        "beat chance on random tokens, and predicts text as well from prefixes alone (LBI, §3.1).",
        "latent_bounded_interfaces.bounded_interfaces",
        function="run_leak",
    ),
    "jacobians": Study(
        "Interface Jacobians in training",
        "Jacobians from message to message have norms of 1.3 to 1.9 and 0.6 to 0.75 per direction while a "
        "model of regions learns (LBI, appendix F).",
        "latent_bounded_interfaces.bounded_interfaces",
        function="run_jacobians",
    ),
    "learning-coefficient": Study(
        "The learning coefficient, read and sampled",
        "A reading of Fisher rates replaces posterior sampling, at a small part of its cost (Dead "
        "Directions, §13.5).",
        "dead_directions.learning_coefficient",
    ),
    "minilm": Study(
        "Kernels of a pretrained model's norms",
        "At every LayerNorm, trained or fresh, the inverse gain is the flattest direction of the outputs; "
        "RMSNorm has no such direction (Dead Directions, §9.2).",
        "dead_directions.minilm",
    ),
    "pruning": Study(
        "Which units a model can do without",
        "Units that lie along dead directions can be taken out at less cost than those that are small or "
        "hardly vary (a use of Dead Directions, §5.1, that the paper does not test).",
        "beyond.pruning",
    ),
    "adapter-placement": Study(
        "Where an adapter should sit",
        "Corrections in directions that the old text does not use learn a new text and forget less than "
        "random ones or the leading singular vectors (a use of Dead Directions, §5.1, that the paper does "
        "not test).",
        "beyond.adapter_placement",
    ),
    "edges": Study(
        "A gradient that is cut, late or thin",
        "Four bits across every border come within 1 % of backprop, and a gradient that is one step late at "
        "each of two borders is better than none (the question is ours; Stage-Partitioned Learning, §9, has "
        "edges that scale a gradient, and none that round or delay it).",
        "beyond.edges",
    ),
    "edges-stages": Study(
        "Six stages with a late gradient",
        "Six stages, the first of which is five steps late, are better than six that hear nothing of one "
        "another (the question is ours).",
        "beyond.edge_questions",
        "stages",
        rows="edges",
    ),
    "edges-uniform": Study(
        "One step late everywhere",
        "One step late for all of a model is better than up to five, one at each border of six stages (the "
        "question is ours).",
        "beyond.edge_questions",
        "uniform",
        rows="edges",
    ),
    "edges-alone": Study(
        "Late and thin with one loss at the end",
        "Four and three bits are free where nothing but the rounding differs from backprop, and a late "
        "gradient comes within 1 % (the question is ours).",
        "beyond.edge_questions",
        "alone",
        rows="edges",
    ),
    "edges-adamw": Study(
        "Cut, late and thin with AdamW",
        "What edges cost with Muon they cost with AdamW: four bits and late come within 1 % of backprop, and "
        "late is better than none (the question is ours).",
        "beyond.edge_questions",
        "adamw",
        rows="edges",
    ),
    "edges-length": Study(
        "Cut and late over a longer training",
        "Over three times the steps the gap of late edges vanishes, and that of the cut does not (the "
        "question is ours).",
        "beyond.edge_questions",
        "length",
        rows="edges",
    ),
    "edges-rates": Study(
        "Six late stages with rates that follow the lateness, or weights that are foretold",
        "Both are better than late stages as they are, and four bits add nothing (the question is ours).",
        "beyond.edge_questions",
        "rates",
        rows="edges",
    ),
    "edges-size": Study(
        "Cut, late and thin at twice the width",
        "What edges cost at width 48 they cost at 96 (the question is ours).",
        "beyond.edge_questions",
        "size",
        rows="edges",
    ),
    "edges-early": Study(
        "Early losses that are not late",
        "Three late stages with early losses are better where the head, or each stage, learns from those at "
        "once (the question is ours).",
        "beyond.edge_questions",
        "early",
        rows="edges",
    ),
    "safe-adapters": Study(
        "Fine-tuning without forgetting, against null-space peers",
        "LoRA held in safe directions learns a new text and forgets less of the model's own than LoRA, dead "
        "directions (LoRA-Null), OPLoRA and replay (a use of Dead Directions, §5.1, that the paper does not "
        "test).",
        "beyond.safe_adapters",
    ),
    "adapter-peers": Study(
        "Fine-tuning without forgetting, against EWC, CorDA, self-distillation, LoPT and a specialist",
        "LoRA held in safe directions forgets less than each of them where all have learned alike (the "
        "question is ours).",
        "beyond.adapter_peers",
    ),
    "adapter-reach": Study(
        "How much old text, which rank and which layers safe directions need; CORE before and after",
        "Two windows of old text are enough to forget less than LoRA, and safe directions keep more of what "
        "CORE tasks ask (the question is ours).",
        "beyond.adapter_reach",
    ),
    "chain-rates": Study(
        "Where a trained chain still shows its rate",
        "A chain that descends toward a singularity shows the exponent of its rate under other activations, "
        "optimizers, norms, losses, residuals, depths and starts (Dead Directions, appendix B.4).",
        "dead_directions.chain_rates",
    ),
    "optimizers": Study(
        "Does it help to respect a network's symmetries?",
        "DDCAdam, whose steps do not depend on the gauge, generalises better than AdamW at equal budgets; a "
        "companion paper reports gaps of 0.67 and 5.88 (Dead Directions, §11).",
        "dead_directions.optimizer_comparison",
    ),
    "optimizer-parts": Study(
        "DDCAdam's gain taken apart, and second-order peers",
        "DDCAdam generalises because its steps do not depend on the gauge (Dead Directions, §11); Shampoo, "
        "SOAP and K-FAC stand beside it.",
        "dead_directions.optimizer_parts",
    ),
    "rate-recovery": Study(
        "What keeps a rate, and what memorising does to it",
        "Several directions, cross-entropy, biases and rotations leave the ladder as it is (Table 9); where "
        "a network memorises, the empirical Fisher loses it and the expected one does not (Dead Directions, "
        "appendix B.2, Corollary 39).",
        "dead_directions.rate_recovery",
    ),
    "grokking": Study(
        "Grokking on one axis of steps",
        "A memorising phase in which the weights grow gives way to a generalising one that compresses; "
        "change points of λ̂ and of Fisher readings mark it, and the empirical Fisher collapses when a "
        "network memorises (Dead Directions, §12.1, §13.5, §15, Corollary 39).",
        "dead_directions.grokking",
    ),
    "fields": Study(
        "Fields during training, a generated teacher",
        "What kernels, projectors and spectra do during training, which the paper leaves open; concentrated "
        "projectors make the spectra of WᵀW heavy-tailed (Gram Metrics, §9, §10.3).",
        "gram_metrics.field_training",
        function="teacher",
    ),
    "fields-digits": Study(
        "Fields during training, scikit-learn's digits",
        "The same questions as in `fields`, on digits.",
        "gram_metrics.field_training",
        function="digits",
    ),
    "tail-fits": Study(
        "Exponents of tails by two programs",
        "The paper speaks of exponents and names no estimator. Ours and weightwatcher's should agree, but "
        "for the distance by which the threshold is chosen (Gram Metrics, §10.3).",
        "gram_metrics.tail_fits",
    ),
}


def study_named(name: str) -> Study:
    """The study called `name`."""
    if name not in STUDIES:
        raise ConfigError(setting="study", given=name, allowed=f"one of {', '.join(STUDIES)}")
    return STUDIES[name]
