"""Pages of the rules on several checkpoints of one training: AMP71x."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import Rule

TREND_RULES: tuple[Rule, ...] = (
    Rule(
        code="AMP710",
        name="growing-range",
        title="A weight or buffer grows towards fp16's limit",
        worst="warning",
        meaning=(
            "The largest magnitude of a tensor grows by a steady factor from checkpoint to checkpoint, and before as "
            "many steps have passed as were seen it is beyond fp16's 65504: a cast to fp16, or fp16 autocast, then "
            "makes it Inf."
        ),
        decided=(
            "The exact largest finite magnitude of each weight and buffer in every checkpoint that was read; a line "
            "through its log2 over the steps, or the slope of the later half of the time where that is the "
            "smaller one. With --against there are two points, and the line goes through both."
        ),
        threshold=(
            "It meets 65504 within as many steps as lie between the first and the last point: further on an "
            "extrapolation would reach beyond what it is made from. Only points from 8 on count, which no "
            "initialisation reaches (the largest of 10^9 normal numbers is 6.1), so that growth out of a start is left "
            "alone. From three points on the later half must grow at least 0.75 times as fast, in binades a step, as "
            "the earlier one: growth by a constant factor has a ratio of 1, and growth by any power of the step at "
            "most log2(3/2) / log2(2) = 0.585 over equal times from its first step. A warning where autocast casts "
            "the tensor or it is stored in fp16, else a note."
        ),
        action=(
            "Look at the learning rate, the weight decay and the normalisation of this module before it overflows; "
            "train it in bf16 or fp32 meanwhile."
        ),
        wrong=(
            "Two checkpoints cannot show that a growth slows down; give the folder of all of them instead. A tensor "
            "that jumps once, between the last two checkpoints, is not steady and is not reported before it is there."
        ),
    ),
    Rule(
        code="AMP711",
        name="falling-loss-scale",
        title="The loss scale keeps falling",
        worst="warning",
        meaning=(
            "From checkpoint to checkpoint more steps overflow than the scaler can make up for. It ends below 1, where "
            "scaling harms (AMP402), and at last at 0 (AMP401)."
        ),
        decided=(
            "The scales stored in the checkpoints that were read, from the largest on; a straight line through their "
            "log2 over the steps, as for AMP710."
        ),
        threshold=(
            "Three checkpoints, a fall by 2^4 or more, not slowing down, and 1 is reached within as many steps as were "
            "seen. A settled scale goes up and down by one or two factors of two; one that starts too high falls fast "
            "at first and then no more, which is a slowing fall."
        ),
        action="Replay a checkpoint with bisect-nan: it finds what overflows. No loss scale cures a forward overflow.",
        wrong="A scale that falls in one jump between two checkpoints and stays is taken for settled.",
    ),
    Rule(
        code="AMP712",
        name="stagnant-weights",
        title="16-bit weights stand still because updates are rounded away",
        worst="error",
        meaning=(
            "An update of less than half the distance between two neighbouring numbers of the format leaves a weight "
            "as it is, in every step anew: in bf16 that is 2^-9 to 2^-8 of the weight itself. The loss seems to have "
            "converged. Normalisation weights, which start at 1, stop first."
        ),
        decided=(
            "By comparison with an earlier checkpoint: the share of a weight's elements with exactly the same value, "
            "and what an update of the size that moments and learning rate give (Adam, Lion, SGD with momentum) does "
            "to the stored values when it is added and rounded: once, and added up over many steps and rounded only "
            "then: those in between, and at least 1000 unless a schedule has the rate below a tenth of its initial_lr "
            "(warming up, or ending). Only weights whose moments are in the same 16-bit format count: with moments in "
            "fp32 there usually are fp32 weights too."
        ),
        threshold=(
            "Three quarters of the elements are the same; exact sums would change half of them or more; and three "
            "quarters of that is lost in single updates. Three quarters is AMP501's threshold, where runs that stand "
            "still have 0.97 to 1.0 and one that learns 0.42. Measured between two checkpoints 300 Adam steps apart: "
            "with 86 % or more unchanged, pure bf16 lowered the loss by half as much as fp32 or less; with 61 % by "
            "three quarters, with 16 % by as much. An error where such weights are half of all trained elements, a "
            "warning where there is a matrix among them, else a note. Without optimizer state it is a note."
        ),
        action="Train with autocast and fp32 weights, fp32 master weights, stochastic rounding or Kahan summation.",
        wrong=(
            "A learning rate that has decayed to zero in both files leaves no update to judge by: silent. Updates are "
            "judged by the latest moments, which fluctuate."
        ),
    ),
    Rule(
        code="AMP713",
        name="unmoved-weights",
        title="Trained weights did not change at all",
        worst="warning",
        meaning=(
            "Steps have passed, the optimizer holds moments for these weights, its updates are large enough for their "
            "format, and yet every value is the same. Every step was skipped (a loss scale that overflows each time), "
            "or the optimizer updates other tensors than those that are saved."
        ),
        decided="As for AMP712, with all elements equal.",
        threshold=(
            "All elements, and an update that changes half of them or more. Where no weight at all changed and nothing "
            "is known of updates, it is a note."
        ),
        action="Look at the loss scale and at which parameters the optimizer was given.",
        wrong="Weights that were frozen during these steps while their old moments were kept look the same.",
    ),
    Rule(
        code="AMP714",
        name="changed-structure",
        title="The two checkpoints do not hold the same tensors",
        worst="note",
        meaning=(
            "Names, shapes or dtypes of weights and buffers differ between the two checkpoints; what is only in one of "
            "them was not compared."
        ),
        decided="By name and shape. Values of different dtypes are compared after exact widening.",
        threshold="One tensor.",
        action="Check that both are checkpoints of one training.",
        wrong="A renamed tensor counts as one that is gone and one that is new.",
    ),
)
