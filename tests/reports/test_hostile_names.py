"""No name and no key acts in any form of the report or changes the exit code, and no name is cut."""

from __future__ import annotations

import functools
import html
import itertools
import json
import unicodedata
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from markdown_it import MarkdownIt

from ampdoctor.cli.main import main
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.formats import FORMATS, RenderOptions, renderer
from ampdoctor.reports.read_json import report_from_dict
from tests.reports.every_field import SCHEMA, every_field
from tests.reports.full_sample import PLAIN, full
from tests.reports.hostile_names import NAMES

COMMANDS = (
    "add-mask add-matcher add-path debug echo endgroup error group internal-set-repo-path notice remove-matcher "
    "save-state set-env set-output stop-commands warning"
).split()


def rendered(form, report, width=200):
    return renderer(form)(report, RenderOptions(width=width, color="never", verbose=1))


def commands_in(text):
    """The workflow commands that GitHub's runner would carry out; as in actions/runner, ActionCommand.cs."""
    for line in text.split("\n"):
        start = line.lstrip()
        if start.startswith("::") and "::" in start[2:]:
            name = start[2 : start.index("::", 2)].partition(" ")[0]
            if name.lower() in COMMANDS:
                yield line
                continue
        if "##[" in line and "]" in line[line.index("##[") :]:
            inside = line[line.index("##[") + 3 :].partition("]")[0]
            if inside.partition(" ")[0].lower() in COMMANDS:
                yield line


class Page(HTMLParser):
    """The elements of a page with their attributes' names, and its text."""

    def __init__(self, text):
        super().__init__()
        self.shape, self.values, self.text, self.open = [], [], "", []
        self.bare = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.shape.append((tag, tuple(name for name, _ in attributes)))
        self.values += [value or "" for _, value in attributes]
        if tag not in ("br", "hr", "img", "meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.shape.append(f"/{tag}")
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_comment(self, data):
        self.shape.append("comment")

    def handle_data(self, data):
        self.text += data
        if not {"code", "pre"} & set(self.open):
            self.bare += data


def shown_markdown(text):
    page = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)
    return Page(page)


def shape(form, text):
    """What a reader of the form takes for structure; a name must not change it."""
    if form == "html":
        return [part for part in Page(text).shape if part not in (("code", ()), "/code")]
    if form == "markdown":
        # a name of several words is in several pieces of code
        return [part for part in shown_markdown(text).shape if part not in (("code", ()), "/code")]
    if form == "junit":
        return [(element.tag, sorted(element.attrib)) for element in ET.fromstring(text).iter()]
    if form == "github":
        return [line.partition(" ")[0] for line in text.splitlines()]
    if form in ("json", "sarif"):
        return kinds(json.loads(text))
    if form == "jsonl":
        return [kinds(json.loads(line)) for line in text.splitlines()]
    return None


def kinds(value):
    if isinstance(value, dict):
        return sorted((len(value), str(kinds(item))) for item in value.values())
    if isinstance(value, list):  # lines to paste are broken where a name is long
        return "strings" if all(isinstance(item, str) for item in value) else [kinds(item) for item in value]
    return type(value).__name__


def nothing_acts(form, text):
    text.encode("utf-8")
    acting = {c for c in set(text) if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}
    assert acting <= {"\n"} | ({"\t", "\r"} if form == "html" else set())


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("form", ["human", "json", "markdown", "github", "junit", "html"])
def test_nothing_in_a_name_acts(form, name):
    for width in (40, 200) if form == "human" else (200,):
        text = rendered(form, full(name), width)
        nothing_acts(form, text)
        ours = [line for line in commands_in(text) if form == "github"]
        assert list(commands_in(text)) == ours
        assert len(ours) == (4 if form == "github" else 0)  # what is not examined, three findings
    assert shape(form, text) == plain_shape(form)


@functools.cache
def plain_shape(form):
    return shape(form, rendered(form, full(PLAIN)))


def test_the_check_knows_commands():
    text = "  ::error::a\nx ::error::b\nx ##[group]y\n##[nothing]z\n::nothing::\n::ERROR file=a::b"
    assert [line.strip() for line in commands_in(text)] == ["::error::a", "x ##[group]y", "::ERROR file=a::b"]


def test_a_command_cannot_begin_a_folded_line():
    report = full("x " * 7 + "x" * 11 + "::error::" + "y ::group::" * 5)
    assert [width for width in range(20, 60, 3) if list(commands_in(rendered("human", report, width)))] == []


def readable(form, text):
    """The text that a reader sees, or a program reads."""
    if form in ("json", "jsonl", "sarif"):
        return "\n".join(strings([json.loads(line) for line in (text.splitlines() if form == "jsonl" else [text])]))
    if form == "html":
        page = Page(text)
        return page.text + "\n".join(page.values)
    if form == "markdown":
        return shown_markdown(text).text
    if form == "junit":
        elements = list(ET.fromstring(text).iter())
        return "\n".join([value for e in elements for value in (*e.attrib.values(), e.text or "")])
    if form == "github":
        text = text.replace("%0A", "\n").replace("%0D", "\r").replace("%3A", ":").replace("%2C", ",")
        return text.replace("%25", "%")
    return text


def strings(value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    else:
        yield str(value)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("form", ["json", "markdown", "github", "junit"])
def test_a_name_is_wholly_there(form, name):
    seen = readable(form, rendered(form, full(name)))
    if form in ("json", "jsonl"):
        assert seen.count(name) > 20
        return
    words = sanitise(name).split()
    if form == "junit":
        words = [word.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff") for word in words]
    assert " ".join(seen.split()).count(" ".join(words)) >= 4


@pytest.mark.parametrize("name", [NAMES["long"], "y" * 400], ids=["dotted", "one word"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_long_name_is_never_cut_off_a_terminal(form, name):
    text = rendered(form, full(name))
    if form == "human":  # folded at 200 columns, with the indent of its row
        assert "".join(text.split()).count(name) > 10
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
    else:
        assert html.unescape(text).count(name) >= 4


@pytest.mark.parametrize("form", FORMATS)
def test_a_name_of_thousands_of_characters_is_shortened_for_people_alone(form):
    name = "blocks." + "x" * 3000 + ".weight"
    seen = "".join(html.unescape(rendered(form, full(name))).split())
    assert (f"{name[:300]}...{name[-150:]}" in seen) == (form in ("human", "markdown", "html"))
    if form not in ("human", "markdown"):
        assert name in seen


def test_markdown_resolves_no_mention_issue_link_or_commit():
    page = shown_markdown(rendered("markdown", full(NAMES["mentions"])))
    assert "@everyone" in page.text
    for live in ("@", "#", "://", "www.", "GH-1", "deadbeef", ":tada:"):
        assert live not in page.bare.replace("##", "")
    assert not {tag for tag, *_ in page.shape if isinstance(tag, str)} & {"a", "img", "script"}


# -- keys of a report that came from elsewhere --

ASKED = ("scan", "bisect-nan", "profile", "recommend")
KEY = "plain.key"


def open_objects(node):
    """Yield the parts of the schema that take keys which it does not name, but for those that name a role or option."""
    if isinstance(node, dict):
        if "object" in node.get("type", ()) and node.get("additionalProperties", True) and "propertyNames" not in node:
            yield node
        for inner in node.values():
            yield from open_objects(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from open_objects(inner)


def objects_with(value, key):
    """Yield the objects in a report that hold a key."""
    if isinstance(value, dict):
        if key in value:
            yield value
        for inner in value.values():
            yield from objects_with(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from objects_with(inner, key)


def test_every_object_that_takes_other_keys_has_one():
    assert len(list(objects_with(every_field(KEY), KEY))) >= len(list(open_objects(SCHEMA))) >= 20


PAIRS = [
    pytest.param(form, key, ASKED[(i + j) % len(ASKED)], id=f"{form}-{name}")
    for (i, form), (j, (name, key)) in itertools.product(enumerate(FORMATS), enumerate(NAMES.items()))
]
"""Every form with every key, and either of them with every command."""


@functools.cache
def usual(form, command):
    """The commands and the shape of a report without a hostile key."""
    text = rendered(form, report_from_dict(every_field(KEY, command=command)))
    return len(list(commands_in(text))), shape(form, text)


@pytest.mark.parametrize(("form", "key", "command"), PAIRS)
def test_nothing_in_a_key_acts(form, key, command):
    text = rendered(form, report_from_dict(every_field(key, command=command)))
    nothing_acts(form, text)
    assert (len(list(commands_in(text))), shape(form, text)) == usual(form, command)


@pytest.mark.parametrize("key", [NAMES["surrogates"], NAMES["newlines"]], ids=["surrogates", "newlines"])
def test_the_exit_code_is_the_same_in_every_form(key, tmp_path, capsysbinary):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(every_field(key, complete=True, errors=[])))
    assert {form: main(["merge", str(file), "--format", form]) for form in FORMATS} == dict.fromkeys(FORMATS, 1)
    assert not capsysbinary.readouterr().err
