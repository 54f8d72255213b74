"""Pages of the rules on the training log beside a checkpoint: AMP701 to AMP707."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import Rule

LOG_RULES: tuple[Rule, ...] = (
    Rule(
        code="AMP701",
        name="loss-not-finite",
        title="The logged loss is NaN or infinite",
        worst="error",
        meaning=(
            "The log shows from which step on the loss is lost. The Trainer writes 0.0 for a loss that was NaN "
            "(logging_nan_inf_filter), so a loss of 0.0 beside a gradient norm of NaN counts as one."
        ),
        decided="The log's entries by step, or the loss saved with the weights where there is no log.",
        threshold=(
            "An error where the last entry is lost and others before it, or no scaler that works is there to skip the "
            "step; a warning where it is the last entry alone; a note where finite ones follow."
        ),
        action=(
            "Take a checkpoint from before the step named, and replay from there with bisect-nan: it names the op."
        ),
        wrong="A loss that is infinite by intent (a barrier function) is reported.",
    ),
    Rule(
        code="AMP702",
        name="gradients-vanished",
        title="The logged gradient norm is exactly zero up to the end",
        worst="error",
        meaning=(
            "Nothing is learnt any more. A norm of exactly 0 over all parameters is flushed gradients (a loss scale "
            "that has collapsed, or none in fp16), a graph that was cut, or an output that is constant. The message "
            "says which of them the checkpoint speaks for: a loss scale, or fp16 weights without a scaler, with which "
            "gradients of the earlier size flush (of any size, where no norm was logged before and the scale is below "
            "1 or missing); Adam's decayed moments tell for how long."
        ),
        decided=(
            "The log's norms by step; 2^-25 over the loss scale, up to which fp16 flushes, against the typical "
            "gradient before (the norm spread evenly over the weights); the ratio of first to second moment, which "
            "falls by beta1 / sqrt(beta2) a step."
        ),
        threshold=(
            "Three entries of exactly 0 at the end, and more zeros there than NaN. A flush threshold of a sixteenth of "
            "the typical gradient explains them. An error where the loss is not zero; a warning where norms are logged "
            "with four decimals or never were anything but 0 and nothing else speaks for it, or no loss is logged; a "
            "note where the loss is 0 too: a hinge or triplet loss that is done. Where the loss falls clearly over "
            "the same entries (mean of their later half 4 standard errors and 1 % below that of the earlier one, of at "
            "least 8 losses, without the first 50 steps, which are momentum's) the norm is not to be believed: a note, "
            "and nothing where it never was anything else."
        ),
        action=(
            "As the prescription says: a fresh or a higher loss scale. With neither, look for detach, no_grad, frozen "
            "weights, and an activation that is saturated for every input."
        ),
        wrong="A trainer that logs 0 where it did not measure the norm is reported while its loss stands still.",
    ),
    Rule(
        code="AMP703",
        name="gradients-not-finite",
        title="The logged gradient norm is NaN or infinite up to the end",
        worst="error",
        meaning=(
            "Steps are skipped one after the other, or (without a scaler) ruin the weights. One infinite norm is a "
            "skipped step, and as it should be."
        ),
        decided="The log's norms by step.",
        threshold=(
            "Three entries at the end. An error where they span 8 steps or more: 8 halvings of the scale in which none "
            "worked. At the beginning of a run 40 steps are granted: a scaler that starts at 2^32 needs 32 to come "
            "down to 1. A note where the loss falls clearly over the same entries (as for AMP702) or every norm of "
            "the log is NaN, as of a norm that is not measured; nothing where no norm was ever finite and it falls."
        ),
        action="Replay from before the step named with bisect-nan.",
        wrong="A log that writes the norm of skipped steps only.",
    ),
    Rule(
        code="AMP704",
        name="spike",
        title="A spike in the loss or the gradient norm",
        worst="warning",
        meaning=(
            "An entry is far above those before it. Alone it is a note: runs recover from most. It is a warning where "
            "the loss has not come back."
        ),
        decided="The logarithm of each entry against median and MAD of the 50 entries before it, from the 21st on.",
        threshold=(
            "Twenty times the median, and ten robust standard deviations (of at least 5 %). Measured on 54 small runs "
            "(43,200 entries; Adam and SGD at three learning rates each, batches of 2 to 32): with batches of 8 or "
            "more those that did not diverge stay below 17 times; batches of 2 and learning rates at the edge of "
            "divergence reach 250 and recover, hence no more than a note. Not come back: the last five losses are, in "
            "the median, more than twice those before the spike."
        ),
        action="Look at the batch of that step; lower the learning rate or beta2, or clip.",
        wrong="Curricula and changes of the data make steps that look like spikes.",
    ),
    Rule(
        code="AMP705",
        name="loss-constant",
        title="The logged loss is exactly constant",
        worst="warning",
        meaning=(
            "Entries of different batches cannot have the same loss to the last digit, unless the output does not "
            "depend on the input; those of one batch cannot, unless the weights stand still (every step skipped, "
            "updates that round away in bf16)."
        ),
        decided="The last entries of the log.",
        threshold=(
            "Ten entries of exactly the same loss of at least 0.01. A note where the log is written with four "
            "decimals. Nothing is said while the learning rate or the gradient norm is 0: then AMP702 says it, or it "
            "is meant."
        ),
        action="See whether weights move: scan this checkpoint against an earlier one.",
        wrong="A loss that counts (an error rate) may be constant in health.",
    ),
    Rule(
        code="AMP706",
        name="scale-spiral",
        title="The loss scale falls without growing",
        worst="error",
        meaning=(
            "A scaler that works loses a binade as often as it gains one. One that only loses follows gradients that "
            "grow, or meets an op that overflows at every scale."
        ),
        decided=(
            "The logged loss scale since it settled: from its first growth, from 100 steps without a backoff, or "
            "growth_interval steps (at least 100) after its start. A jump up by more than the growths that there was "
            "time for is a new start (a fresh scaler). Without a stored scaler the interval is the shortest from a "
            "change to a growth in the log."
        ),
        threshold=(
            "4 binades since the last growth are a note, 8 or a scale below 1 a warning, a dead scale (2^-128) an "
            "error. With growths in between, 8 binades below where it settled are a warning. Below 1 the first descent "
            "counts too: in health it does not end there. In the logs of published runs 3 to 4 backoffs without a "
            "growth precede some divergences by 30 to 1000 steps and are recovered from in others: alone no more than "
            "a note. Lost within a growth interval (more slowly, growths between two entries may not show) they are a "
            "warning, and so are 4 binades below the median of the last 50 entries, where the median gradient norm "
            "since then lies 2.5 standard deviations (of logarithms, moving average of 0.97, as "
            "ZClip's) above those before. A single halving is everyday life, and a rise says nothing of underflow: a "
            "larger scale flushes less."
        ),
        action="Replay from before the step named with bisect-nan: it tells a backward overflow from a forward one.",
        wrong="A log with few entries does not show a growth between two backoffs.",
    ),
    Rule(
        code="AMP707",
        name="skip-rate",
        title="More steps are skipped than the scaler needs",
        worst="warning",
        meaning=(
            "A settled scaler skips between ln(1 + a/b) / N and a / (b N) of the steps (a, b: binades of a growth and "
            "of a backoff, N: growth_interval), 0.03 to 0.05 % with the defaults. More is lost work, and a sign of "
            "growing gradients or of batches that overflow at every scale."
        ),
        decided=(
            "Backoffs in the logged scale since it settled (AMP706), at least five; without such a log, steps that the "
            "run counts and the optimizer has not taken. Nothing is said where the growth interval is neither stored "
            "nor seen in the log: what is usual is then not known."
        ),
        threshold=(
            "1 %, twenty times the equilibrium of the defaults, or three times the scaler's own equilibrium where that "
            "is more: a note. 10 % is a warning. Steps not taken are a note from 10 % and 40 steps (per start of "
            "the scale) on, because a younger optimizer or accumulation looks the same."
        ),
        action=(
            "Replay a skipped step with bisect-nan; recommend simulates other settings, which skip at most 1e-3 of the "
            "steps once settled (--rho: what OpenSeq2Seq's LogMax scaler aims at)."
        ),
        wrong="Backoffs between two entries that a growth made up for are not seen.",
    ),
)
