"""Articles of the English Wikipedia in the manner of WikiText, out of a package: no hub is needed.

gensim tests itself on the beginning of a dump of the Wikipedia. Its 94 articles of some length
become lines as WikiText-raw has them: ` = Title = ` before an article, ` = = Section = = ` before a
section, and a paragraph on each other line. The tokens are not spaced out as there. Text: CC BY-SA.
"""

from __future__ import annotations

import bz2
import functools
import html
import random
import re
from typing import NamedTuple

from heats.recipes.offline.packages import GENSIM

DATASET = "wikipedia-gensim"

_DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_MIN_LENGTH = 1500  # Characters; shorter ones are lists of links to what a word may mean.
_VALIDATION_SHARE = 12  # One article of so many.

_PAGE = re.compile(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_BACK_MATTER = re.compile(
    r"^ = = (?:See also|References|External links|Notes|Further reading|Bibliography) = = $", re.M
)
# What an article's text is without, first to last; each may uncover what the next removes.
_NO_TEXT = re.compile(
    r"<!--.*?-->|<ref[^>/]*/>|<(ref|math|gallery|timeline)\b.*?</\1>", re.DOTALL | re.IGNORECASE
)
_NESTED = (("{|", "|}"), ("{{", "}}"))  # Tables, templates.
_MEDIA_LINK = re.compile(r"\[\[(?:File|Image|Category|[a-z-]{2,12}):[^\[\]]*\]\]")
_LINK = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]")
_WEB_LINK = re.compile(r"\[https?://\S+ ?([^\]]*)\]")
_MARKUP = re.compile(r"\[\[[^\n]*|'{2,}|</?[a-zA-Z][^>]*>")
_LIST_LINE = re.compile(r"^[ \t]*[*#:;|!].*$", re.MULTILINE)
_HEADING = re.compile(r"^(=+) *(.*?) *\1 *$", re.MULTILINE)


class Article(NamedTuple):
    """Its `text` opens with the line of its title."""

    title: str
    text: str

    @property
    def lines(self) -> list[str]:
        """As rows of WikiText: each ends in a newline."""
        return self.text.splitlines(keepends=True)


@functools.lru_cache(maxsize=2)
def articles(data_dir: str) -> dict[str, list[Article]]:
    """All articles, as `train` and `validation`; the split is always the same.

    Raises:
        FileNotFoundError: The package is not in `data_dir`; the message tells how to get it.
        ValueError: It is not the published one.
    """
    dump = bz2.decompress(GENSIM.read(data_dir, _DUMP)).decode()
    found = []
    for title, markup in _PAGE.findall(dump):
        if markup.lower().lstrip().startswith("#redirect"):
            continue
        text = _BACK_MATTER.split(cleaned(markup))[0].strip("\n")
        if len(text) > _MIN_LENGTH:
            found.append(Article(title, f" = {html.unescape(title)} = \n{text}\n"))
    random.Random(0).shuffle(found)
    num_validation = len(found) // _VALIDATION_SHARE
    return {"train": found[num_validation:], "validation": found[:num_validation]}


def cleaned(markup: str) -> str:
    """The paragraphs and headings of an article in wiki markup, one on each line."""
    text = _NO_TEXT.sub("", html.unescape(html.unescape(markup)))
    for opening, closing in _NESTED:
        text = _without_nested(text, opening, closing)
    for _ in range(3):  # A picture's caption may have links, with pictures again.
        text = _MEDIA_LINK.sub("", text)
    text = _LINK.sub(r"\1", text)
    text = _WEB_LINK.sub(r"\1", text)
    text = _MARKUP.sub("", text)
    text = _LIST_LINE.sub("", text)
    text = _HEADING.sub(_as_in_wikitext, text)
    return re.sub(r"\n{2,}", "\n", text).strip("\n")


def _as_in_wikitext(heading: re.Match[str]) -> str:
    """`== History ==` as ` = = History = = `."""
    signs = " ".join(heading[1])
    return f" {signs} {heading[2]} {signs} "


def _without_nested(text: str, opening: str, closing: str) -> str:
    kept, depth = [], 0
    for part in re.split(f"({re.escape(opening)}|{re.escape(closing)})", text):
        if part == opening:
            depth += 1
        elif part == closing and depth:
            depth -= 1
        elif not depth:
            kept.append(part)
    return "".join(kept)
