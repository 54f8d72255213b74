"""Pages of the rules that a replay decides: non-finite values, underflow, loss scaling, updates, the replay itself."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import Rule

_FLOAT64 = (
    "The op is run again in float64 on the inputs that it had. A value that is finite there and larger than the output "
    "format's largest number overflowed; one that is non-finite there too is invalid for every format."
)
_PATH = (
    "Only a birth whose values reach the loss, a gradient, a weight, a buffer or optimizer state is a finding; they "
    "are "
    "followed through memory, so a mask that softmax absorbs is none."
)

REPLAY_RULES: tuple[Rule, ...] = (
    Rule(
        code="AMP201",
        name="forward-overflow",
        title="An activation is beyond the compute format's range",
        worst="error",
        meaning=(
            "An op of the forward or of the loss makes a number that its output format cannot hold. No loss scale "
            "helps: "
            "it acts on the backward alone, so a GradScaler skips step after step."
        ),
        decided=f"{_FLOAT64} {_PATH}",
        threshold=(
            "The format's largest finite number (fp16: 65504). Where the infinity is absorbed into a finite value, "
            "that "
            "value must depart by more than a sixteenth of what it would be without the overflow: a few roundings to "
            "bf16 move it by 2^-9 of itself each, inf -> rsqrt -> 0 by all of it, inf -> tanh -> 1 by nothing."
        ),
        action=(
            "Run that module in fp32 or the model in bf16, or bring the op's inputs down (divide before the product)."
        ),
        wrong="A random op cannot be run again; its finding then rests on the kind of value alone.",
    ),
    Rule(
        code="AMP202",
        name="invalid-op",
        title="An op gets an operand outside its domain",
        worst="error",
        meaning=(
            "0/0, log(0), the derivative of sqrt at 0, inf - inf, the mean of nothing: no wider format helps this op."
        ),
        decided=f"{_FLOAT64} {_PATH} A NaN that float64 does not make either is one of a constant lost inside the op.",
        threshold="None: non-finite in float64 from finite inputs, or NaN here and in range there.",
        action=(
            "Find what made the operand: often an epsilon that flushed to zero (1e-8 in fp16) or a probability that "
            "rounded to 0 or 1. Clamp it, use an epsilon the format can hold, or compute that part in fp32."
        ),
        wrong="Where an epsilon was flushed, the op named is the one that divides, not the one that added it.",
    ),
    Rule(
        code="AMP203",
        name="backward-overflow",
        title="A gradient is beyond the compute format's range",
        worst="error",
        meaning=(
            "The derivative of an op makes a number that its format cannot hold, and a lower loss scale is no cure."
        ),
        decided=f"{_FLOAT64} {_PATH} Births in a step that the scaler skips are first tried at a lower scale (AMP405).",
        threshold="The format's largest finite number.",
        action="Run that module in fp32, or the model in bf16.",
        wrong="With a loss scale of the user's own making, a scale that is too high is reported here.",
    ),
    Rule(
        code="AMP204",
        name="bad-data",
        title="The batch is non-finite, or beyond the compute format",
        worst="error",
        meaning="The loader gave NaN or an infinity, or numbers that the first cast of the batch cannot hold.",
        decided="The path of non-finite values ends in the batch itself, or in the cast of a batch tensor.",
        threshold="The compute format's largest finite number, at the first cast.",
        action="Check the data pipeline (no-data pixels, rescaling twice); drop or repair the batch.",
        wrong="A batch that only the model's own ops drive out of range is reported as AMP201.",
    ),
    Rule(
        code="AMP405",
        name="scale-too-high",
        title="The loss scale is above what the gradients allow",
        worst="error",
        meaning=(
            "Scaled gradients exceed 65504 in the backward, and a lower loss scale cures it. A GradScaler skips such "
            "steps until it has come down; without one, or with a scale made by hand, they reach the weights."
        ),
        decided=(
            "bisect-nan replays the first skipped step at the scale that its overflow asks for, down to 1; recommend "
            "measures the gradients in fp32 and replays with the scale that they allow."
        ),
        threshold=(
            "A warning where no step was taken by the end of the replay, an error where gradients or weights become "
            "non-finite and nothing skips the step. Skips that end are a scaler at work, and no finding."
        ),
        action="Start at the scale given, or wait for the scaler.",
        wrong="A replay of few steps ends before a healthy scaler has settled; hence no more than a warning for skips.",
    ),
    Rule(
        code="AMP406",
        name="scaler-collapse",
        title="No loss scale of 1 or more works",
        worst="error",
        meaning=(
            "The unscaled gradients themselves are beyond fp16: the scaler halves, a step for each binade, below 1 and "
            "on, and at 2^-128 1/scale is infinite and a clean step ruins the weights."
        ),
        decided=(
            "bisect-nan replays the first skipped step at lower scales, down to 1, and it is skipped at each; "
            "recommend measures the largest half gradient in fp32."
        ),
        threshold=(
            "Scale 1, the floor of most frameworks. An error where the replay takes no step at its end, else a warning."
        ),
        action="Bring the loss's own factor down (mean instead of sum, a smaller weight), or use bf16.",
        wrong="GradScaler itself accepts scales below 1, and such a run may train well once it has settled.",
    ),
    Rule(
        code="AMP407",
        name="scaler-misuse",
        title="The step breaks the scaler's protocol",
        worst="error",
        meaning=(
            "Gradients are clipped, stepped on or put into another loss while scaled, scaled and unscaled ones are "
            "added up, the scaler refuses a call as out of turn, or a checkpoint's settled scale is not continued."
        ),
        decided=(
            "The step's calls on scaler and optimizers are recorded (never its source text), and its gradients are "
            "compared with fp32's. Where only a part of a gradient is in the wrong scale, the step must agree with "
            "fp32 once that is put right from outside. A loop that is watched while it runs is not compared: there the "
            "calls alone must show it, in a loop that has never asked for the scale. A checkpoint's scaler state is "
            "compared with the run's own."
        ),
        threshold=(
            "The gradient that reaches the optimizer is more than twice too long or too short: rounding alone would "
            "need "
            "a relative error of 0.5 for that. Where a part is in the wrong scale, a relative error of 0.1. A scale is "
            "settled when its growth tracker is above 0."
        ),
        action=(
            "backward, scaler.unscale_(optimizer), clip, scaler.step(optimizer), scaler.update(); save and load "
            "the scaler."
        ),
        wrong=(
            "Unscaling by hand, without the scaler's knowledge, is left alone as long as the gradients come out right."
        ),
    ),
    Rule(
        code="AMP501",
        name="optimizer-precision",
        title="Updates or moments are lost in their format",
        worst="error",
        meaning="Gradients are fine, but an epsilon flushes to zero, a moment overflows, or updates round away.",
        decided=(
            "A birth inside the optimizer's step on half tensors; or the step's updates beside fp32's; or, where "
            "weights are kept in bf16 and torch's own optimizers step them, what bf16 would keep of the updates of a "
            "pass in fp32."
        ),
        threshold=(
            "Of all elements that move in fp32, three quarters stay here, and three quarters of the update is lost. "
            "Measured: 0.97 to 1.0 in runs that stand still, 0.42 in a pure fp16 run that learns. A small transformer "
            "in pure bf16 that loses up to 0.4 of its updates ends within 0.04 of fp32's loss, with 0.5 to 0.75 lost "
            "0.1 to 0.3 above, with more 0.3 to 1."
        ),
        action=(
            "Keep weights, moments and averages in fp32 (autocast or master weights); raise the optimizer's epsilon."
        ),
        wrong="Stochastic rounding and Kahan summation recover lost updates over many steps; one step cannot show it.",
    ),
    Rule(
        code="AMP901",
        name="nondeterministic-replay",
        title="The same step does not come back bit by bit",
        worst="warning",
        meaning="What is said of the step describes its last replay, which is not quite the run that was first seen.",
        decided="Loss, module outputs and gradients are hashed; a snapshot and a fresh run both give another hash.",
        threshold="One bit.",
        action="Seed every generator in the factory; keep counters and open files of the loop inside it.",
        wrong="Never: two replays that agree in every checked bit are not reported.",
    ),
    Rule(
        code="AMP902",
        name="not-reproduced",
        title="The run is known to fail, and did not fail here",
        worst="note",
        meaning=(
            "The replayed steps are clean, which is no health: the failure needs other steps, data, state or hardware."
        ),
        decided=(
            "The user says so (--expect-failure), or the checkpoint shows it: a non-finite loss saved with it or in "
            "the Trainer's log beside it, non-finite gradient norms up to the log's end, or a loss scale below 1 that "
            "an overflow has just lowered."
        ),
        threshold="None for a loss; a non-finite gradient norm that finite ones follow is a GradScaler at work.",
        action=(
            "Replay more steps, from a checkpoint shortly before the failure, with the batches of the failing step "
            "first, on the device where it failed."
        ),
        wrong="A log that ends with the one step that a GradScaler skipped counts as a failure.",
    ),
)
