"""Pages of the rules on loss scaling: AMP4xx."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import Rule

SCALER_RULES: tuple[Rule, ...] = (
    Rule(
        code="AMP401",
        name="dead-scaler",
        title="The loss scaler is dead",
        worst="error",
        meaning=(
            "With this loss scale no step can be right. At 0 or at most 2^-128, 1/scale is infinite in fp32: the next "
            "step without an overflow multiplies the gradients by Inf after they were checked, and NaN goes into the "
            "weights without a skip. At Inf or NaN every step is skipped for ever."
        ),
        decided="The scale stored in the scaler's state.",
        threshold=(
            "2^-128: GradScaler computes float32(1 / scale), whose largest finite value is just under 2^128 (measured: "
            "2^-127 still trains, 2^-128 does not). GradScaler has no floor; 166 overflows in a row lead from 65536 to "
            "0."
        ),
        action=(
            "Start a fresh scaler, and find out why it overflowed so often: a forward overflow cannot be cured by any "
            "scale."
        ),
        wrong="Not known to be.",
    ),
    Rule(
        code="AMP402",
        name="collapsed-scaler",
        title="The loss scale has fallen below 1",
        worst="error",
        meaning=(
            "A scale below 1 shrinks gradients instead of protecting them. It comes about only by overflows that went "
            "on at scale 1: either the forward pass overflows, or unscaled gradients exceed 2^15. What it then costs "
            "is underflow: elements up to 2^-25 / scale become zero, silently."
        ),
        decided=(
            "The stored scale. The harm is estimated from a gradient of typical size: its norm (the median of the last "
            "ten in the log beside the weights, else 1, where most runs clip) spread evenly over the number of weights."
        ),
        threshold=(
            "Below 1 is a warning. It is an error where that typical element, times the scale, is rounded with a "
            "relative error of 2e-2 or more (fp16's spacing of 2^-24 over the square root of 12, divided by the scaled "
            "element): from there on training was measurably worse, and with an error of 0.3 it failed to learn."
        ),
        action=(
            "Restart the scaler at 2^10 or higher and replay the run with bisect-nan: it finds the op that overflows. "
            "Growing back takes growth_interval clean steps for each factor of two."
        ),
        wrong=(
            "A run whose gradient norm really is far above 1 (a loss summed over many elements) may need such a scale; "
            "with the norm in a log beside the weights this is seen. Models trained in bf16 and continued in fp16 "
            "often end here."
        ),
    ),
    Rule(
        code="AMP403",
        name="frozen-scaler",
        title="The loss scale cannot grow any more",
        worst="warning",
        meaning=(
            "The count of clean steps is already past the growth interval, and growth happens only when they are "
            "equal: never, until an overflow."
        ),
        decided=(
            "_growth_tracker and growth_interval of the stored state; without one, a log that has the scale of every "
            "step."
        ),
        threshold=(
            "tracker >= interval. GradScaler adds one and compares with ==, so tracker = interval - 1 still grows at "
            "the next step. In a log: three times the shortest interval after which it grew before, without a change "
            "and without a norm that is not finite, below 2^24 (Apex's cap): a note."
        ),
        action=(
            "Set _growth_tracker to 0, or the interval to what it was; set_growth_interval() during a run causes this."
        ),
        wrong=(
            "Harmless where the scale is already as high as it should be. A log alone cannot tell it from an interval "
            "that was raised, a cap, or overflows that a hysteresis hides."
        ),
    ),
    Rule(
        code="AMP404",
        name="scaler-settings",
        title="Loss scaler settings that are accepted but cannot work",
        worst="error",
        meaning=(
            "GradScaler checks its arguments loosely and load_state_dict not at all. A backoff of 0 or below, or of 1 "
            "and more, a growth factor below 1, an interval of 0 or less, a negative scale or count do not do what "
            "dynamic scaling is for. A growth interval that is no int is refused at the first update() only, a scale "
            "beyond float32 at the first scale()."
        ),
        decided=(
            "The factors, interval and scale in the file; in a replay those of the run's own scaler before step 0. "
            "What torch refuses is found by giving each setting to the function that will get it; the replay goes on "
            "with a value in its place."
        ),
        threshold=(
            "0 < backoff < 1: otherwise an overflow does not lower the scale, or kills it. growth >= 1: otherwise "
            "growing shrinks it; exactly 1 is a fixed scale and fine, and so is a backoff of 1 with it. interval > 0: "
            "otherwise it never grows. scale > 0: a negative one flips the sign of every scaled gradient, which "
            "unscaling undoes, but nobody means it. A warning, as nothing is lost before an overflow or a growth; an "
            "error where torch refuses the setting, so that training ends there."
        ),
        action=(
            "Give the scaler settings that work; after load_state_dict set them again, as it overwrites them with the "
            "stored ones."
        ),
        wrong="A fixed scale can be meant with an interval of 0; a large interval says so more clearly.",
    ),
    Rule(
        code="AMP408",
        name="scale-at-floor",
        title="The loss scale is at its floor",
        worst="warning",
        meaning=(
            "The scaler has a smallest scale and is there. At the next overflow DeepSpeed's raises, and others skip "
            "for ever."
        ),
        decided="The stored scale and the floor stored with it.",
        threshold=(
            "scale <= floor. A warning where an overflow has just put it there (no clean step is counted since), a "
            "note where steps went well since."
        ),
        action="Find out what overflows at such a scale: replay the run with bisect-nan --checkpoint.",
        wrong="Files that do not store the floor (GradScaler has none, Megatron's is an argument) say nothing.",
    ),
    Rule(
        code="AMP409",
        name="scale-without-bound",
        title="The loss scale has nothing to do",
        worst="note",
        meaning=(
            "A scale this large means that nothing in fp16 ever overflows: gradients are vanishing, or the run is in "
            "bf16 or fp32 with a scaler that is not needed."
        ),
        decided="The stored scale.",
        threshold=(
            "2^33, above every scale that a framework starts with (Megatron's 2^32 is the highest; Apex stops at "
            "2^24). At 2^33 the largest fp16 gradient is below 65504 / 2^33 = 7.6e-6."
        ),
        action="Drop the scaler in bf16 and fp32; in fp16 look at the gradient norms.",
        wrong="A loss averaged over very many tokens has gradients that small in health.",
    ),
    Rule(
        code="AMP410",
        name="missing-scaler",
        title="An fp16 training state without a loss scaler",
        worst="warning",
        meaning=(
            "Matrices are stored in fp16 with an optimizer's state and without a loss scaler's. If gradients are not "
            "scaled, those up to 2^-25 become zero; if they are, a resumed run starts with another scale."
        ),
        decided=(
            "The dtype of all matrices and of their first moments, the scalers found, and whether the log has a loss "
            "scale."
        ),
        threshold=(
            "A note, because a file cast to fp16 to save space looks the same. A warning where moments are in fp16 and "
            "at least half of the elements of the median matrix's first moment are exactly zero: that is what flushed "
            "gradients leave (sparse gradients concern embeddings only, which the median passes over)."
        ),
        action="Keep weights in fp32 under autocast with a GradScaler and save its state, or train in bf16.",
        wrong=(
            "fp16 autocast with fp32 weights and without a scaler leaves no trace in a checkpoint: nothing is said. "
            "The log's gradient norms may still tell (AMP702). The share of zeros is that of a sample in tensors of "
            "more than 2^20 elements; --exact counts all."
        ),
    ),
    Rule(
        code="AMP411",
        name="settings-overwritten",
        title="Loading the scaler's state overwrites the run's own settings",
        worst="warning",
        meaning=(
            "GradScaler.load_state_dict replaces growth_factor, backoff_factor and growth_interval together with the "
            "scale: what a resumed run passes to the constructor has no effect."
        ),
        decided=(
            "The settings of the run's scaler as the factory makes it, those in the checkpoint, and those with which "
            "the replay goes on."
        ),
        threshold=(
            "Any difference in the factors or the interval. A warning where the replay's loading replaced an argument "
            "that the run names. A note where the run hands over a scaler, which the replay leaves as it is, with a "
            "setting that is neither GradScaler's default nor the checkpoint's. The scale is state: that it differs is "
            "how it should be (AMP407 says where it is not continued)."
        ),
        action="Set them after load_state_dict: scaler.set_growth_interval(...) and the like.",
        wrong="A run that means to go on with the checkpoint's settings, and still passes others, loses nothing.",
    ),
)
