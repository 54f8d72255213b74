"""Pages of the rules on an optimizer's saved state: AMP502 to AMP505."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import Rule

OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        code="AMP502",
        name="second-moment-flushed",
        title="A second moment was flushed to zero where the first was not",
        worst="error",
        meaning=(
            "Adam's second moment is a square, and squares leave fp16 long before the gradient does: with beta2 = "
            "0.999 a gradient below 5.5e-3 leaves a zero. An element whose next gradient is absent or small (a token "
            "that is not in the batch) is then moved by its first moment over epsilon alone, thousands of learning "
            "rates. Casting a whole checkpoint to fp16 to save space does this, and the harm shows when training is "
            "resumed, in whatever format (measured on a small language model: updates of 350 to 60,000 learning rates, "
            "the loss from 2.4 to 7.2 and from 0.01 to 0.4)."
        ),
        decided=(
            "First and second moments are read side by side, element by element, where the second is in fp16 or an "
            "8-bit float."
        ),
        threshold=(
            "100 learning rates: the largest first moment beside a zero, over the largest epsilon of all groups. "
            "Adam's own updates are at most (1 - beta1) / sqrt(1 - beta2), about 3, and with a flushed second moment "
            "and a gradient as before about 1 / sqrt(1 - beta2) = 32. An error where a thousandth of the elements or "
            "more is concerned, else a warning. With eps = 1e-4, as pure fp16 training needs it, a flushed moment "
            "gives at most 55."
        ),
        action="Keep second moments in fp32 or bf16; reset the optimizer's state of the named parameters.",
        wrong=(
            "Where every element gets a gradient in every step the harm is small. AMSGrad divides by another moment "
            "and is left alone. Quantised 8-bit optimizers store codes, not floats, and are not judged."
        ),
    ),
    Rule(
        code="AMP503",
        name="epsilon-lost",
        title="The optimizer's epsilon is zero in its format",
        worst="warning",
        meaning=(
            "Weights and moments are in fp16, and so is the arithmetic of an optimizer that is not fused: an epsilon "
            "up to 2^-25 becomes 0 there. Wherever the second moment is zero the update is then 0 / 0 = NaN, or Inf."
        ),
        decided=(
            "eps of every parameter group, and the dtypes of all weights and second moments: exp_avg_sq (Adam), "
            "square_avg (RMSprop), sum (Adagrad)."
        ),
        threshold=(
            "2^-25 = 3e-8, up to which fp16 rounds to zero; the default of Adam and RMSprop is 1e-8, Adagrad's 1e-10. "
            "AMP501 is the same seen to happen in a replay."
        ),
        action="eps of 1e-4 or more for pure fp16, fused=True (computes in fp32), or weights in fp32.",
        wrong="An optimizer with fp32 arithmetic of its own is not harmed; fp32 moments are taken as its sign.",
    ),
    Rule(
        code="AMP504",
        name="step-counters",
        title="The optimizer's step counters stand still or disagree",
        worst="warning",
        meaning=(
            "Adam's bias correction needs the number of steps. Counted in a 16-bit format it stops at 256 (bf16) or "
            "2048 (fp16), and the correction stays as it was then. Counters that disagree between parameters are "
            "reported as a note: those behind joined later, had no gradient at times, or were skipped."
        ),
        decided="The step counters' values and dtypes.",
        threshold=(
            "2^8 and 2^11, the whole numbers to which 1 cannot be added any more in bf16 and fp16: a warning once they "
            "are reached, a note before. Any disagreement is a note, never more, because health looks the same."
        ),
        action="Keep the counters in fp32; load_state_dict of torch's own optimizers does.",
        wrong="An optimizer that counts anew in a group of its own makes counters disagree in health.",
    ),
    Rule(
        code="AMP505",
        name="optimizer-settings",
        title="Optimizer settings that cannot be right",
        worst="error",
        meaning=(
            "A learning rate, epsilon or weight decay that is NaN or Inf, a beta of 1 or more, or an epsilon of 0 "
            "beside zeros in the second moment put NaN into the weights with the next step. Negative settings train "
            "backwards. Constructors refuse most of these; load_state_dict and schedulers do not."
        ),
        decided="The stored parameter groups.",
        threshold="An error for what makes the next step NaN, a warning for negative numbers. A rate of 0 is fine.",
        action="Set them anew after load_state_dict, and look at what the scheduler computed.",
        wrong="Not known to be.",
    ),
)
