"""Names that a checkpoint's author may have chosen to be read as something else than names."""

from __future__ import annotations

NAMES = {
    "escape sequences": "w\x1b[31m\x1b]0;owned\x07\x9b2J\x00\x7f",
    "newlines": "w\r\n::error::forged\n\n# head\n- item\n\u2028::warning::forged\u2029\x0b\x0c\x85",
    "rich markup": "a[/]b[red]x[/red][link=file:///etc]y[/link]:smile:",
    "workflow commands": "::error file=a::b ::set-output name=x::y ::stop-commands::t ##[error]z ##[set-env n=x]y",
    "escaped commands": "%0A::error::forged%3A%2C%25,title=x:",
    "html": "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;&lt;'\"</details>",
    "xml": "]]></failure><testcase name='x'/><!-- <?xml version='1.0'?> &entity; \ufffe\uffff",
    "markdown": "a|b `c` ``d`` **e** [f](http://evil.example) ![g](http://evil.example/x.png) \\`h ~~~ ---|---",
    "mentions": "@everyone @org/team #123 GH-1 org/repo#9 http://evil.example www.evil.example deadbeefcafe1234 :tada:",
    "bidirectional": "\u202eabc\u2066def\u2069\u200b\u2800\U000e0041",
    "surrogates": "a\ud800b\udfffc\udcff",
    "json": '"}],"verdict":"healthy",{"a":"\\u0000',
    "python": '"""; import os #\n```\n````\n',
    "paths": "../../etc/passwd",
    "spaces": "  two  words \t",
    "long": "blocks.0." + "x" * 391,
}
