"""Parses a line that a training loop prints into its step and its named numbers, whichever program prints it.

A number counts where a name that `log_files` knows comes right before it; a sentence with numbers in it does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from ampdoctor.health.reading.log_files import field_of

LONGEST = 16 * 1024  # longest line that is parsed, in bytes: a printed dictionary of some hundred numbers
_MAY_SAY = re.compile(rb"loss|norm|epoch|\d\s*/\s*\d", re.IGNORECASE)  # a line without any of these is not parsed

_NAMES_A_NUMBER = re.compile(rb"loss|norm", re.IGNORECASE)
_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B])")
_RANK = re.compile(
    r"^\s*(?:\[(?:default|rank)?[ _]?(\d{1,6})\]:|\[\d+,(\d{1,6})\]<std(?:out|err)>:?|(\d{1,6}):\s)"
    r"|\[(?:default|rank)[ _](\d{1,6})\]|\brank[ =:]{1,2}(\d{1,6})\b",
    re.IGNORECASE,
)
"""Prefixes of torchrun, Slurm (`srun --label`) and Open MPI, and loggers that print the rank."""
_CLOCK = re.compile(
    r"\b\d{4}[-/]\d\d[-/]\d\d(?:[ T_]+\d\d:\d\d:\d\d)?(?:[.,]\d+)?Z?|\b\d\d/\d\d(?:/\d{2,4})?[ T]+\d\d:\d\d:\d\d"
    r"|\b\d+ days?,? |\b\d+:\d\d(?::\d\d)?(?:[.,]\d+)?\b"
)
_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\b")
_BAR = re.compile(r"\d+%\|[^|]*\|\s*(\d{1,16})\s*/\s*(\d{1,16})\s*\[[^\],]*,?[^\],]*")
"""A tqdm bar without the text after it: percentage, drawing, step, times and speed."""
_BAR_ALONE = re.compile(rb"\d%\|[^|]*\|\s*(\d{1,16})\s*/\s*(\d{1,16})\s*\[[^\]=]*\](?:\x1b\[A)?\s*$")
_TWO_PLACES = re.compile(
    r"(?:\[\s*(\d{1,16})(?:\s*/\s*\d+)?\s*\]|\btrain(?:ing)?:\s*(\d{1,16}))\s*\[\s*(\d{1,16})\s*([/,])\s*(\d{1,16})?",
    re.IGNORECASE,
)
"""An epoch and a step in it: `[1][ 50/1251]`, `[29/300][2670/2859]`, `Train: 0 [  50/1251`."""
_TWO_NUMBERS = re.compile(r"^\W*\[\s*(\d{1,16})\s*,\s*(\d{1,16})\s*\](?=\s*[a-z_ ]*loss)", re.IGNORECASE)
"""An epoch and a step in it: `[1,  2000] loss: 2.173`."""
_EVALUATES = re.compile(
    r"(?<![\w/.-])(?:val|valid|validation|validat(?:e|ing)|eval|evaluation|evaluat(?:e|ing)|test|testing|dev)(?![\w/.-])",
    re.IGNORECASE,
)
_MAY_EVALUATE = ("val", "test", "dev")  # a line without any of these is not about an evaluation
_EVALUATED = re.compile(r"(?:val|valid|validation|eval|test|dev)[ _/]*loss", re.IGNORECASE)

_TOKEN = re.compile(
    r"""
    [ ]?(?:(?P<at>\d{1,16})\s*/\s*(?P<of>\d{1,16})(?![\d/.]*[\w/])
    |(?P<number>[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?
        |(?:nan|inf(?:inity)?)(?!\w)))(?P<unit>[A-Za-z\xb5%/]*)
    |(?P<word>[^\W\d][\w.\#/-]*)
    |(?P<equals>[:=]+)
    |(?P<gap>[\s\#]+)
    |(?P<other>.))
    """,
    re.VERBOSE | re.IGNORECASE,
)
_MOST_WORDS = 6  # most words in a row without a number, an equals sign or a bar between them; a sentence has more
_WRAPPERS = frozenset({"tensor", "np.float64", "np.float32", "np.float16", "float", "array"})
_HARMLESS = frozenset(
    {"train", "training", "current", "batch", "mean", "avg", "average", "running", "global", "step", "iter"}
    | {"optimizer", "at", "epoch", "mini", "minibatch", "smoothed", "trainer", "local", "overall"}
)
"""Words before a known name that do not change it: `avg loss` is the loss, `valid loss` and `box loss` are not."""
_OWN_NAMES = {"epoch": "epoch", "norm": "gradient_norm", "batch": "step", "dt": "time", "time": "time"} | dict.fromkeys(
    ("avg_loss", "mean_loss", "loss_train", "epoch_loss", "running_loss"), "loss"
)
"""Names that count on a printed line and not in a table. `time` is that of a step if it is in milliseconds, or if the
time of the data stands beside it; else it may be the time since the start."""
_OF_SENTENCES = frozenset(
    {"we", "you", "was", "were", "is", "are", "that", "this", "had", "has", "have", "got", "saw", "which", "because"}
    | {"but", "should", "would", "fell", "rose", "when", "our", "my"}
)
_OF_A_STEP = frozenset({"at", "after", "for", "in", "of"})


@dataclass(slots=True)
class Number:
    """A number of a line, with its printed name and the sign that joins the two."""

    name: str
    value: float


@dataclass(slots=True)
class Printed:
    """A parsed line."""

    numbers: dict[str, Number] = field(default_factory=dict)  # by the names of a `StepLine`
    step: int | None = None  # the named step, or the number before the slash
    named: str = ""  # the name of the step; "" for a fraction
    of: int | None = None  # the number after the slash
    epoch: float | None = None
    rank: int = 0  # the process that printed it, where the line says so
    is_bar: bool = False  # whether the fraction is that of a bar
    is_dictionary: bool = False  # whether the numbers stand in braces
    evaluates: bool = False  # whether the line has an evaluation loss beside the training loss


def printed(line: bytes) -> Printed | None:
    """Parses a line; returns None for one that has neither a loss or norm nor a step."""
    if len(line) > LONGEST or not _MAY_SAY.search(line):
        return None
    if not _NAMES_A_NUMBER.search(line) and (alone := _BAR_ALONE.search(line)) is not None:
        return Printed(step=int(alone[1]), of=int(alone[2]), is_bar=True)
    text = _ESCAPE.sub("", line.decode("utf-8", "replace")).replace("'", "").replace('"', "").strip()
    made = Printed()
    if (rank := _RANK.search(text)) is not None:
        made.rank = int(next(one for one in rank.groups() if one is not None))
        text = text[: rank.start()] + "|" + text[rank.end() :]
    text = _LEVEL.sub("|", text)
    if (bar := _BAR.search(text)) is not None:
        made.step, made.of, made.is_bar = int(bar[1]), int(bar[2]), True
        text = f"{text[: bar.start()]}|{text[bar.end() :]}"
    text = _CLOCK.sub("|", text)
    text = _two_places(text, made)
    if not _Walk(made).read(text):
        return None
    made.is_dictionary = "{" in text and "}" in text
    return _of_training(text, made)


def _two_places(text: str, made: Printed) -> str:
    two = _TWO_PLACES.search(text)
    if two is not None and (two[4] == "/") == (two[5] is not None):
        made.epoch = float(two[1] or two[2])
        made.step, made.of = int(two[3]), int(two[5]) if two[5] else None
        return f"{text[: two.start()]}|{text[two.end() :]}"
    pair = _TWO_NUMBERS.search(text)
    if pair is not None:
        made.epoch, made.step = float(pair[1]), int(pair[2])
        return f"{text[: pair.start()]}|{text[pair.end() :]}"
    return text


def _of_training(text: str, made: Printed) -> Printed | None:
    """Returns None for a line about an evaluation."""
    lower = text.lower()
    if not any(word in lower for word in _MAY_EVALUATE):
        return made
    loss = made.numbers.get("loss")
    evaluates = _EVALUATES.search(text)
    if evaluates is not None and (loss is None or not loss.name.startswith("train")):
        first = re.search(r"loss", text, re.IGNORECASE)
        if first is None or evaluates.start() < first.start():
            return None
    made.evaluates = _EVALUATED.search(text) is not None
    return made


class _Walk:
    """Walks through the tokens of a line."""

    def __init__(self, made: Printed) -> None:
        self._made = made
        self._words: list[str] = []
        self._equals = ""
        self._gap = self._is_value = False
        self._loss_of_a_step = ""
        self._time: tuple[Number, str] | None = None

    def read(self, text: str) -> bool:
        """Reads the line; returns False for a sentence."""
        if not _OF_SENTENCES.isdisjoint(text.lower().split()):
            return False
        for token in _TOKEN.finditer(text):
            kind = token.lastgroup
            if kind == "gap":
                self._gap = True
                continue
            if kind == "word":
                self._word(token["word"].rstrip("./-#"))
                if len(self._words) > _MOST_WORDS:
                    return False
            elif kind == "equals" or token["other"] == "-":  # `loss - 2.1` as well as `loss: 2.1`
                self._equals = (token["equals"] or "-") if self._words else ""
            elif kind == "of":
                self._fraction(int(token["at"]), int(token["of"]))
            elif kind in {"number", "unit"}:
                self._number(token["number"], token["unit"])
            elif token["other"] not in "([" or not (self._equals or self._names_a_place(token["other"])):
                self._forget()
            self._gap = False
        self._add_time()
        return True

    def _names_a_place(self, bracket: str) -> bool:
        """Whether the words before name a step or an epoch, as in `Step [100/600]`."""
        if bracket != "[" or not self._words:
            return False
        known = _known(tuple(self._words))
        return known is not None and known[0] in {"step", "epoch"}

    def _add_time(self) -> None:
        time, numbers = self._time, self._made.numbers
        if time is not None and (time[1] == "ms" or "data_seconds" in numbers):
            value = time[0].value / 1000 if time[1] == "ms" else time[0].value
            numbers.setdefault("seconds", Number(time[0].name, value))

    def _forget(self) -> None:
        self._words, self._equals = [], ""

    def _word(self, word: str) -> None:
        if self._words and word in _WRAPPERS:
            self._equals = self._equals or "="
            return
        if self._equals or self._gap or self._is_value:
            self._is_value = self._equals == "="  # `level=info step=10`
            self._forget()
        self._words.append(word.lower())

    def _number(self, text: str, unit: str) -> None:
        words, equals = tuple(self._words), self._equals
        self._forget()
        value = float(text.replace(",", ""))
        made = self._made
        if not words:
            name, self._loss_of_a_step = self._loss_of_a_step, ""
            if name and equals == "":
                made.numbers.setdefault("loss", Number(name, value))
            return
        known = _known(words)
        if known is None:
            return
        what, name = known
        if what == "step":
            if 0 <= value < 2.0**53 and value == int(value) and (not made.named or name != "batch"):
                made.step, made.named, made.is_bar = int(value), name, False
                self._loss_of_a_step = _loss_before(words)
        elif what == "epoch":
            made.epoch = value if made.epoch is None and 0.0 <= value < 2.0**53 else made.epoch
            self._loss_of_a_step = _loss_before(words)
        elif what == "time":
            self._time = self._time or (Number(name, value), unit)
        elif unit != "%":
            made.numbers.setdefault(what, Number(name + equals, value))

    def _fraction(self, at: int, of: int) -> None:
        words, equals = tuple(self._words), self._equals
        self._forget()
        known, made = _known(words), self._made
        if known is not None and known[0] == "epoch":
            made.epoch = float(at) if made.epoch is None else made.epoch
        elif known is not None and known[0] == "step":
            made.step, made.of, made.named, made.is_bar = at, of, known[1], False
        elif made.step is None and not (words and equals and known is None):
            made.step, made.of = at, of


@lru_cache(maxsize=4096)
def _known(words: tuple[str, ...]) -> tuple[str, str] | None:
    """Returns the field for a name of several words, and the name; None for an unknown name."""
    for start in range(len(words)):
        name = "_".join(words[start:])
        what = field_of(name) or _OWN_NAMES.get(name)
        if what is not None:
            before = words[:start]
            if what in {"step", "epoch"} and _loss_before(words):
                before = ()
            return (what, name) if _HARMLESS.issuperset(before) else None
    return None


def _loss_before(words: tuple[str, ...]) -> str:
    """Returns the name of the loss in `loss at step`, `train loss after epoch`; "" for none."""
    for at, word in enumerate(words[1:-1], 1):
        if word in _OF_A_STEP:
            known = _known(words[:at])
            return known[1] if known is not None and known[0] == "loss" else ""
    return ""
