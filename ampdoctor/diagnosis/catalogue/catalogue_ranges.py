"""Pages of the rules on ranges and on the loss scale that they ask for: AMP206, AMP3xx, AMP41x."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import Rule

RANGE_RULES: tuple[Rule, ...] = (
    Rule(
        code="AMP206",
        name="nonfinite-in-fp32",
        title="The run is not finite in fp32 either",
        worst="error",
        meaning=(
            "The same steps in fp32 throughout give NaN or Inf in the loss, the gradients or the state. Precision is "
            "not the cause: no loss scale, no bf16 and no fp32 module helps."
        ),
        decided=(
            "A replay in fp32; what is checked is what harms training. bisect-nan asks where it proves no cure of an "
            "overflow: in fp32 from the start, no more than three steps after it, and only the updates before that "
            "step do it (a batch that is not finite by itself keeps its own diagnosis)."
        ),
        threshold="One non-finite value in the loss, a weight gradient, a parameter or the optimizer's state.",
        action=(
            "Run bisect-nan: it names the op, or the batch, that makes the first non-finite value. Where it says that "
            "the updates drive the run there, lower the learning rate or warm it up, and clip the gradients."
        ),
        wrong="Not known to be.",
    ),
    Rule(
        code="AMP207",
        name="departs-in-half",
        title="In half precision the run departs from fp32, and no loss scale explains it",
        worst="error",
        meaning=(
            "The same steps are fine in fp32; in half precision something becomes non-finite, or the gradients point "
            "elsewhere. What was measured at the borders of modules neither overflows nor flushes at this loss scale, "
            "so it happens inside one, in the loss or in the optimizer, and another loss scale does not help."
        ),
        decided="Replays in fp32 and in the run's own precision from the same states.",
        threshold=(
            "One non-finite value in loss, weight gradients, parameters or optimizer state; a step that is skipped "
            "with the recommended scale as well: an error. A relative L2 error of the weight gradients above 0.1, "
            "where training was seen to fail: a warning, as nothing shows where it comes from."
        ),
        action="Run bisect-nan: it names the op. bf16 is the change that needs no code, where a replay verified it.",
        wrong=(
            "A network so sensitive to rounding that any two runs part ways looks the same, and so does a run whose "
            "loss draws from a random generator or a counter of its own."
        ),
    ),
    Rule(
        code="AMP301",
        name="gradient-underflow",
        title="Gradients are lost below fp16's range",
        worst="error",
        meaning=(
            "At this loss scale gradients that are not zero become zero, or keep so few bits that the update points "
            "elsewhere. Training slows down or stands still; nothing ever becomes NaN."
        ),
        decided=(
            "bisect-nan and recommend: the same steps in fp32 and in the run's precision from the same states; L2 "
            "error of all weight gradients, and the share of elements that are zero only there. profile: from "
            "histograms of the fp32 gradients, which gives the share of activation gradients within a tenth, and of "
            "weight gradients a lower bound where activation gradients flush; shadow steps in fp16 measure both."
        ),
        threshold=(
            "Relative error of the weight gradients: above 0.1 an error, above 2e-2 a warning, above 5e-3 a note, and "
            "each only where another scale is at least twice as good (--error-bad, --error-warning, --error-note), and "
            "only where more than 1e-3 of the gradients flush (--tau: the share that adaptive loss scaling, arXiv "
            "1910.12385, aims at). Small transformers trained like fp32 below 5e-3 "
            "(bf16 itself has 3e-3 to 5.5e-3), a little worse at 1.5e-2 to 9e-2, and failed to learn at 0.3. The share "
            "of zeros alone does not decide: runs with 19 % of the activation gradients flushed trained as well as "
            "fp32. bisect-nan, which tells underflow from other errors, asks beside an error above 2e-2 that flushed "
            "elements make up half of it, or 10 % of all."
        ),
        action="Use the loss scale that is recommended, or train in bf16, which needs none.",
        wrong=(
            "The bounds come from small networks. Optimizers that normalise (Adam) make even tiny gradients matter; "
            "look at the layers with the largest flushed share."
        ),
    ),
    Rule(
        code="AMP302",
        name="forward-range",
        title="Activations do not fit fp16",
        worst="error",
        meaning=(
            "Values of the forward pass reach fp16's limit of 65504. A loss scale moves gradients only: the scaler "
            "would halve for ever."
        ),
        decided=(
            "The largest magnitude of each module's output along an fp32 replay, where that output is half in the run; "
            "it is an error only where the fp16 replay's loss or state becomes non-finite."
        ),
        threshold="Half of 65504, one binade from overflow, is a warning for an fp16 run.",
        action="Run those modules in fp32 (autocast off around them), or the whole run in bf16.",
        wrong=(
            "Masks written as finfo.min are large on purpose: magnitudes of 2^120 and above are not counted. Values "
            "inside a fused op are not seen."
        ),
    ),
    Rule(
        code="AMP303",
        name="no-common-scale",
        title="No single loss scale serves all modules",
        worst="warning",
        meaning=(
            "At every scale some module's gradients overflow or another's are rounded away: together they span more "
            "than fp16's 40 binades."
        ),
        decided=(
            "For each module the scales at which none of its half gradients is expected to overflow and each keeps its "
            "error low; the scale inside most of these intervals, weighted by parameters, is taken, and the modules "
            "that it misses are named: no cheaper set exists."
        ),
        threshold=(
            "3.5 times the rounding error of each gradient at most 5e-3 (bf16's own): 3.5 is the median ratio of a "
            "run's error to the rounding error of its parts. Where the missed modules hold more than 20 % of the "
            "parameters (--fp32-share, a default of ours), bf16 is the better advice."
        ),
        action="Keep the named modules in fp32, or train in bf16.",
        wrong=(
            "A module whose gradients are tiny and do not matter (behind a gate that starts at zero) is named too. A "
            "tensor at the border of an fp32 module is still cast on one side."
        ),
    ),
)
