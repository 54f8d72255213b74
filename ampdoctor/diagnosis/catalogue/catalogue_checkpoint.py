"""Pages of the rules on checkpoints: AMP1xx."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import Rule

CHECKPOINT_RULES: tuple[Rule, ...] = (
    Rule(
        code="AMP101",
        name="non-finite-weight",
        title="A weight is NaN or infinite",
        worst="error",
        meaning=(
            "A parameter, or (the message says so) an averaged copy of one, holds NaN or Inf. Every forward pass that "
            "uses it gives NaN from the first step on; the cause lies before this file was written."
        ),
        decided="Exact counts of NaN, +Inf and -Inf over every stored element, in the stored format.",
        threshold="One element: a single Inf reaches every output that its row feeds.",
        action=(
            "Resume from an earlier checkpoint. If only Inf is there and the file is fp16, it was probably cast from "
            "bf16 or fp32 values beyond 65504: convert again without going through fp16."
        ),
        wrong=(
            "A tensor whose values are only 0 and -Inf is taken for an additive mask and left alone. Log-probabilities "
            "that hold a deliberate -Inf beside other values (the transitions of a CRF) are reported although they "
            "work."
        ),
    ),
    Rule(
        code="AMP102",
        name="non-finite-buffer",
        title="A buffer is NaN or infinite",
        worst="error",
        meaning=(
            "A buffer (running_mean, running_var, inv_freq, ...) holds NaN or Inf. In evaluation mode every output is "
            "NaN, and a running average never recovers by itself, however healthy the batches are."
        ),
        decided="Exact counts as for AMP101, in tensors whose name is that of a known buffer.",
        threshold="One element.",
        action=(
            "Restore the buffer from an earlier checkpoint, or reset it and re-estimate it over some hundred batches."
        ),
        wrong=(
            "-Inf in a mask and the +-Inf with which quantisation observers start (min_val, max_val) are health and "
            "left alone. A buffer under an unusual name is judged by AMP101."
        ),
    ),
    Rule(
        code="AMP103",
        name="non-finite-optimizer-state",
        title="Optimizer state is NaN or infinite",
        worst="error",
        meaning=(
            "A moment holds NaN or Inf. NaN goes into the weights with the next step. An infinite second moment is "
            "silent: the update is m / inf = 0, and that layer is frozen for ever while everything looks finite."
        ),
        decided=(
            "Exact counts over every state tensor; parameters are named by the order and the shapes of the weights "
            "where that is unique."
        ),
        threshold="One element.",
        action="Reset the optimizer state of the named parameters, or all of it, and resume with a short warm-up.",
        wrong=(
            "Where the order does not give a unique match, a parameter has its number instead of a name. An optimizer "
            "that was given its parameters in another order than the model's gets wrong names where the shapes do not "
            "betray it."
        ),
    ),
    Rule(
        code="AMP104",
        name="beyond-fp16",
        title="Values beyond fp16's range",
        worst="warning",
        meaning=(
            "Some stored values are finite here and would be Inf in fp16 (half(), fp16 inference, or fp16 autocast, "
            "which casts the weights of matmul and conv). In bf16 and fp32 they are ordinary numbers."
        ),
        decided=(
            "The largest magnitude of each weight and buffer, exact, against the point where rounding to nearest "
            "leaves fp16."
        ),
        threshold=(
            "65520, halfway between 65504 and 65536: from there on a cast gives Inf. A warning for matrices stored in "
            "fp32 or fp64, which fp16 autocast casts; a note for bf16 files, vectors and buffers, which it does not "
            "cast."
        ),
        action="Stay in bf16 or fp32, or keep the named modules in fp32.",
        wrong=(
            "Nothing is wrong with the file: this is about what it can be cast to. Constant mask fills (-1e9, "
            "finfo.min) are left out."
        ),
    ),
    Rule(
        code="AMP105",
        name="lossy-cast",
        title="A cast to half precision would lose small values",
        worst="warning",
        meaning=(
            "Values of some weights are so small that a cast would flush them to zero or round them in the subnormal "
            "zone. The numbers say which share, for fp16 and bf16 apart."
        ),
        decided=(
            "From the histogram of magnitudes: shares of nonzero elements that flush, become subnormal, overflow, and "
            "the relative L2 error of rounding, per tensor and format."
        ),
        threshold=(
            "A relative L2 error of 2^-8 in a tensor: the largest error that bf16 makes in any one normal number, so "
            "fp16 has lost the advantage of its longer mantissa there (its floor is 2e-4, bf16's 1.6e-3). A warning "
            "where half of a matrix's nonzero elements would become zero."
        ),
        action="Prefer bf16 for these tensors, keep them in fp32, or fold a power of two into them.",
        wrong=(
            "Biases and freshly initialised tensors may be tiny and unimportant. The error is an estimate from eight "
            "bins a binade (within about 4 % in the normal range, 10 % around the flush threshold). Of a tensor of "
            "more than 2^20 elements a sample is counted, one run of 64 neighbours in up to 16, spread over the whole; "
            "--exact counts all."
        ),
    ),
    Rule(
        code="AMP106",
        name="impossible-value",
        title="A value that cannot be: a negative variance or second moment",
        worst="error",
        meaning=(
            "A running variance, a second moment, a step count or a count of batches is below zero. The square root of "
            "the first two is NaN, which reaches the output or the weights."
        ),
        decided=(
            "The exact number of negative elements in tensors that are sums of squares, maxima of magnitudes, or "
            "counts."
        ),
        threshold=(
            "Any negative second moment or step is an error: no arithmetic leads there. A running_var is an error "
            "below -1e-5, where BatchNorm's default epsilon no longer makes the sum positive; between that and 0 it is "
            "a warning. A negative num_batches_tracked is a warning: BatchNorm needs it only with momentum=None. In a "
            "replay the layer's own epsilon counts, and nothing is said above it."
        ),
        action=(
            "The file is corrupted, or was averaged or merged wrongly (subtracting checkpoints does this): take an "
            "earlier one."
        ),
        wrong="A BatchNorm with a larger epsilon of its own tolerates more than 1e-5.",
    ),
    Rule(
        code="AMP107",
        name="saturated-values",
        title="Values clamped to the stored format's largest number",
        worst="error",
        meaning=(
            "Elements are exactly the largest finite number of the stored format. A converter clamped what was larger, "
            "so these weights are wrong although everything is finite."
        ),
        decided="The exact count of elements whose magnitude equals the format's maximum.",
        threshold=(
            "One element for fp16, bf16, fp32 and fp64: a trained value falls on that one code by chance in none of "
            "the weights measured. For 8-bit formats more than 1/16 of the elements, because a scaled tensor reaches "
            "the maximum on purpose, once per block (blocks of 32 elements give 1/32). A weight in fp32 or fp64 whose "
            "largest magnitude is exactly 65504 was clamped to fp16 before it was stored wider: one fp32 number in 8 "
            "million of its binade. In a replay: one trained weight of exactly 65504, also in fp32, where it is an "
            "error; in a file it is a warning."
        ),
        action="Convert again from the original, to a format that holds the values.",
        wrong=(
            "Constant mask fills (finfo.min beside zeros) are left alone. In a file, a tensor clamped to another "
            "format than fp16 and then stored wider is not seen."
        ),
    ),
    Rule(
        code="AMP108",
        name="non-finite-tensor",
        title="A tensor of unknown purpose is NaN or infinite",
        worst="warning",
        meaning=(
            "A tensor that is neither in a state dict nor in an optimizer's state holds NaN or Inf: a list of averaged "
            "weights, a cached batch, a metric."
        ),
        decided="Exact counts as for AMP101 in tensors of more than one element.",
        threshold="One element. Single numbers are left alone: a best loss that starts at infinity is common.",
        action="Find out what it is for; if it is a copy of the weights, do as for AMP101.",
        wrong="It may well be harmless, which is why it is never an error.",
    ),
    Rule(
        code="AMP109",
        name="foreign-objects",
        title="Elsewhere the file needs torch.load's unsafe mode",
        worst="note",
        meaning=(
            "Beside tensors the pickle refers to classes or functions that torch does not know. torch.load's safe mode "
            "refuses such a file; its unsafe mode imports and calls whatever the file says. Here nothing was imported "
            "or called."
        ),
        decided="The names that the pickle refers to and torch.load(weights_only=True) does not allow.",
        threshold="One name is enough.",
        action=(
            "Look at the names. Where they are settings (a Namespace, an enum), save them beside the tensors as plain "
            "data, or save the tensors as safetensors; load the file elsewhere only if you trust who wrote it."
        ),
        wrong=(
            "A scan is no malware scanner: a list of names says what a file asks for, not what it would do, and a "
            "harmless name can be used to do harm. Trainers write such files every day, so this is never more than a "
            "note. Names that a program of yours allows torch to load are listed as well."
        ),
    ),
    Rule(
        code="AMP110",
        name="wrong-buffer",
        title="A buffer holds finite values that it cannot have",
        worst="warning",
        meaning=(
            "Every running variance or rotary frequency of a layer is 0, or a table of positions is not 0, 1, 2, ...: "
            "what a converter, a cast to half or a merge of checkpoints leaves behind. Everything is finite, and the "
            "model is wrong in evaluation."
        ),
        decided=(
            "running_var and inv_freq: the largest magnitude, exact. position_ids: every element against its place, "
            "and against 0, 1, 2, ... rounded to bf16 and fp16."
        ),
        threshold=(
            "All elements 0: a running variance starts at 1 and loses a tenth a batch, so a whole layer reaches 0 only "
            "where its input is constant (single channels behind a dead ReLU do, and are left alone); the first "
            "frequency is 1 whatever the base. Positions: exactly those that a cast to half leaves (bf16 holds whole "
            "numbers up to 256, fp16 up to 2048), or at most a quarter out of place."
        ),
        action="Compute the buffer anew: it does not depend on training, or (running_var) on a hundred batches.",
        wrong=(
            "A layer whose weight is zero as well was pruned and is left alone. A table of positions that is meant to "
            "be otherwise is left alone where more than a quarter of it differs; one that repeats a few positions on "
            "purpose is reported."
        ),
    ),
    Rule(
        code="AMP111",
        name="unmoved-weight",
        title="A weight stands still although gradients arrive",
        worst="warning",
        meaning=(
            "All elements of a parameter are exactly 0, or exactly 1, and its Adam moments say that gradients arrive "
            "and how large the next update is: large enough to be seen in the weight's format. So the updates of this "
            "parameter do not reach it, or it was overwritten when the file was written (gathered from the wrong "
            "process, zero-filled)."
        ),
        decided=(
            "The exact value shared by all elements; the largest update lr * max|m| / (max sqrt(v) + eps), with the "
            "smallest learning rate and the largest epsilon of all groups."
        ),
        threshold=(
            "An update beyond the spacing of the weight's format at that value (beyond its flush threshold at 0), max "
            "sqrt(v) of at least eps, and 10 steps: the first step of a warm-up has a learning rate of 0. "
            "Zero-initialised last layers, LoRA's B, norms at 1 and biases at 0 move with the first step whose "
            "learning rate is not 0. Of a 1 stored in half nothing is said: bf16 moves it only from updates of 2^-9 "
            "on, and a step there and back lands on it again; nor of other constants, which Adam moves in step where "
            "all gradients have one sign."
        ),
        action="Compare with the weights in memory before saving; check that the optimizer holds this very parameter.",
        wrong=(
            "A parameter that the code resets after every step is reported. Nothing is said of a file without moments, "
            "after the end of a schedule (learning rate 0), or of an optimizer other than Adam's family."
        ),
    ),
    Rule(
        code="AMP112",
        name="empty-model",
        title="The model's weights are not in the file",
        worst="error",
        meaning=(
            "Half of the weights or more have no element, or all matrices are exactly zero. The first is what ZeRO-3 "
            "and FSDP leave of a parameter that was saved without being gathered; the second is a file whose space was "
            "reserved and never written. With all matrices zero every gradient is zero too: no training gets there."
        ),
        decided="Shapes, and the largest magnitude of every matrix, exact.",
        threshold=(
            "Half of the weights, at least two, without an element; all matrices, at least two with 1024 elements "
            "together, exactly zero. Single zero matrices are how last layers, LoRA's B and ControlNet's connections "
            "start, and are left alone. So are the files that DeepSpeed's engine writes for each rank: their pieces "
            "are in the optimizer's files."
        ),
        action="Gather the parameters before saving, or take the training framework's own checkpoint.",
        wrong="An adapter saved before its first step without its nonzero half would be reported.",
    ),
)
