"""The movable thresholds of the rules on checkpoints, logs and trends; their defaults stand only here.

A rule of `diagnosis` reads the value from its `Thresholds`, and its page shows this file's default and reason.
"""

from __future__ import annotations

from ampdoctor.evidence.thresholds.threshold import Threshold

LOSSY_CAST = Threshold(
    code="AMP105",
    name="relative_error",
    default=2.0**-8,
    unit="relative L2 error",
    why="A cast that changes a tensor by more is reported: the largest error that bf16 makes in one normal number.",
)
ERASED_BY_CAST = Threshold(
    code="AMP105",
    name="erased",
    default=0.5,
    unit="share",
    why="Share of a matrix's nonzero elements from which their becoming zero is a warning and no note: half.",
)
BATCH_NORM_EPSILON = Threshold(
    code="AMP106",
    name="epsilon",
    default=1e-5,
    unit="magnitude",
    why="A running_var down to its negative is a warning: torch's default epsilon of BatchNorm keeps the root real.",
)
SATURATED_8_BIT = Threshold(
    code="AMP107",
    name="saturated",
    default=1 / 16,
    unit="share",
    why="Share of an 8-bit tensor's elements at the format's maximum: twice the one in 32 that block scaling leaves.",
)
FEW_DISPLACED = Threshold(
    code="AMP110",
    name="displaced",
    default=0.25,
    unit="share",
    why="Share of a table of positions that may be out of place before it is taken for a table of another kind.",
)
SURE_STEPS = Threshold(
    code="AMP111",
    name="steps",
    default=10,
    unit="steps",
    lowest=1,
    highest=1_000_000,
    why="Steps after which the first learning rate of a warm-up, 0, is long past.",
)
LEAST_ELEMENTS = Threshold(
    code="AMP112",
    name="elements",
    default=1024,
    unit="elements",
    lowest=1,
    highest=1_000_000_000,
    why="Elements below which a model of zeros is taken for somebody's example.",
)
COLLAPSED_ERROR = Threshold(
    code="AMP402",
    name="relative_error",
    default=2e-2,
    unit="relative error",
    why="Rounding error of a typical gradient from which a scale below 1 is an error: from there on training was "
    "measurably worse (as AMP301.error_warning).",
)
FROZEN_INTERVALS = Threshold(
    code="AMP403",
    name="intervals",
    default=3,
    unit="growth intervals",
    lowest=1,
    highest=1000,
    why="Growth intervals in a log without a growth or an overflow: a hysteresis that is used up unseen takes one.",
)
HIGHEST_SETTLED = Threshold(
    code="AMP409",
    name="scale",
    default=2.0**33,
    unit="loss scale",
    lowest=1.0,
    highest=2.0**127,
    why="Above every scale that a framework starts with; Megatron's 2^32 is the highest.",
)
MOSTLY_FLUSHED = Threshold(
    code="AMP410",
    name="zeros",
    default=0.5,
    unit="share",
    why="Share of zeros in the first moments of the median matrix from which it is a warning: half, which sparse "
    "gradients of embeddings do not reach in the median.",
)
LARGEST_UPDATE = Threshold(
    code="AMP502",
    name="update",
    default=100.0,
    unit="learning rates",
    lowest=1.0,
    highest=1e12,
    why="Length of one update: Adam's own are about 3 at most, and one of 100 undoes 100 steps.",
)
MANY_STARVED = Threshold(
    code="AMP502",
    name="starved",
    default=1e-3,
    unit="share",
    why="Share of the elements from which it is an error and no warning: a thousandth, our default.",
)
LEAST_ZEROS = Threshold(
    code="AMP702",
    name="entries",
    default=3,
    unit="entries",
    lowest=1,
    highest=1_000_000,
    why="Entries of a gradient norm of exactly 0 at the log's end: one or two may be a batch without a loss.",
)
WITHIN_REACH = Threshold(
    code="AMP702",
    name="reach",
    default=16.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="A flush threshold within this factor below the typical gradient explains zeros: the elements of a gradient "
    "are spread over more than that.",
)
LEAST_UNFINITE = Threshold(
    code="AMP703",
    name="entries",
    default=3,
    unit="entries",
    lowest=1,
    highest=1_000_000,
    why="Entries of a gradient norm that is not finite at the log's end: one is a skipped step, as it should be.",
)
HOPELESS_STEPS = Threshold(
    code="AMP703",
    name="hopeless",
    default=8,
    unit="steps",
    lowest=1,
    highest=1_000_000,
    why="Steps without a finite gradient after which it is an error: 8 halvings of the loss scale.",
)
SETTLING_STEPS = Threshold(
    code="AMP703",
    name="settling",
    default=40,
    unit="steps",
    lowest=0,
    highest=1_000_000,
    why="Steps granted to a scaler at the start of a run: from the highest initial scale, 2^32, down to 1 are 32.",
)
SPIKE_FACTOR = Threshold(
    code="AMP704",
    name="factor",
    default=20.0,
    unit="factor",
    lowest=1.0,
    highest=1e9,
    why="Times the usual from which a loss or a norm is a spike: in 54 small runs those with batches of 8 or more that "
    "did not diverge stay below 17.",
)
SPIKE_DEVIATIONS = Threshold(
    code="AMP704",
    name="deviations",
    default=10.0,
    unit="standard deviations",
    lowest=0.0,
    highest=1000.0,
    why="Robust standard deviations of its logarithm by which it is above the usual as well: noisy runs have large "
    "factors.",
)
RETURNED = Threshold(
    code="AMP704",
    name="returned",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e9,
    why="Times the loss before the spike within which the run has come back: else it is a warning.",
)
CONSTANT_ENTRIES = Threshold(
    code="AMP705",
    name="entries",
    default=10,
    unit="entries",
    lowest=2,
    highest=1_000_000,
    why="Entries of exactly the same loss at the log's end: of different batches not even two have it to the last "
    "digit.",
)
LEAST_LOSS = Threshold(
    code="AMP705",
    name="loss",
    default=0.01,
    unit="loss",
    lowest=0.0,
    highest=1e6,
    why="Loss below which nothing is said: written with four decimals it has fewer than 100 values left.",
)
NOTABLE_FALL = Threshold(
    code="AMP706",
    name="fall",
    default=4.0,
    unit="binades",
    lowest=1.0,
    highest=150.0,
    why="Binades lost without a growth that are worth a word: 3 to 4 backoffs precede some divergences by 30 to 1000 "
    "steps.",
)
LONG_FALL = Threshold(
    code="AMP706",
    name="long_fall",
    default=8.0,
    unit="binades",
    lowest=1.0,
    highest=150.0,
    why="From here on it is a warning: 8 halvings, and no scale seems to do.",
    above=NOTABLE_FALL,
)
NORM_RISE = Threshold(
    code="AMP706",
    name="norm_rise",
    default=2.5,
    unit="standard deviations",
    lowest=0.0,
    highest=1000.0,
    why="Rise of the gradient norm with a fall of the scale that makes a short fall a warning: ZClip's threshold for a "
    "spike.",
)
FEWEST_BACKOFFS = Threshold(
    code="AMP707",
    name="backoffs",
    default=5,
    unit="backoffs",
    lowest=1,
    highest=1_000_000,
    why="Backoffs in the log from which their rate says something: at equilibrium, fewer are chance.",
)
NOTABLE_RATE = Threshold(
    code="AMP707",
    name="notable",
    default=0.01,
    unit="share",
    why="Share of skipped steps that is worth a note: twenty times the equilibrium of the default settings.",
)
HARMFUL_RATE = Threshold(
    code="AMP707",
    name="harmful",
    default=0.1,
    unit="share",
    why="From here on it is a warning: a tenth of the run is lost work.",
    above=NOTABLE_RATE,
)

BEYOND_START = Threshold(
    code="AMP710",
    name="start",
    default=8.0,
    unit="magnitude",
    lowest=0.0,
    highest=65504.0,
    why="Magnitude above which a growth counts: no initialisation reaches it (the largest of 10^9 normal numbers is "
    "6.1), so that what grows there no longer grows out of its start.",
)
SCALE_FALL = Threshold(
    code="AMP711",
    name="fall",
    default=4.0,
    unit="binades",
    lowest=0.0,
    highest=150.0,
    why="Binades that a loss scale falls before it is called falling: a settled one goes up and down by one or two.",
)
STILL = Threshold(
    code="AMP712",
    name="stalled",
    default=0.75,
    unit="share",
    why="Share of a weight's elements that stay exactly the same, and share of the movement that is lost: AMP501's, "
    "where it was measured on single updates.",
)
WOULD_MOVE = Threshold(
    code="AMP712",
    name="would_move",
    default=0.5,
    unit="share",
    why="Share of a weight's elements that exact sums of the updates would change: half, so that standing still is no "
    "matter of a small learning rate.",
)
MOST = Threshold(
    code="AMP712",
    name="most",
    default=0.5,
    unit="share",
    why="Share of all trained elements from which it is an error: most of the model.",
)
IDLE_WOULD_MOVE = Threshold(
    code="AMP713",
    name="would_move",
    default=0.5,
    unit="share",
    why="Share of a weight's elements that one update would change: half, as for AMP712.",
)
