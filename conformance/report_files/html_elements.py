"""Elements of a page: text stays text, whatever an engine wrote, and every tag is closed."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree as ET

Element = ET.Element
Content = Element | str | int | None | Iterable["Content"]


def element(tag: str, *content: Content, **attributes: object) -> Element:
    """An element; attributes that are None or False are left out, class_ is class, a_b is a-b.

    >>> ET.tostring(element("b", "a < b", 3, class_="x", data_n=1), "unicode", "html")
    '<b class="x" data-n="1">a &lt; b3</b>'
    """
    made = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            text = "" if value is True else visible(str(value))
            made.set(name.rstrip("_").replace("_", "-"), text)
    _add(made, content)
    return made


def raw(tag: str, text: str, **attributes: str) -> Element:
    """A `style` or `script` with a text of our own, which a page must not escape."""
    made = ET.Element(tag, attributes)
    made.text = text
    return made


def visible(text: str) -> str:
    """With everything that cannot be seen written out, but for line breaks.

    >>> visible("tab\\there" + chr(0x202E))
    'tab\\\\there\\\\u202e'
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def page_text(root: Element) -> bytes:
    """The page, in UTF-8."""
    return b"<!DOCTYPE html>\n" + ET.tostring(root, encoding="utf-8", method="html") + b"\n"


def _add(to: Element, content: Content) -> None:
    if content is None:
        return
    if isinstance(content, str | int):
        text = visible(str(content))
        if len(to):
            to[-1].tail = (to[-1].tail or "") + text
        else:
            to.text = (to.text or "") + text
    elif isinstance(content, ET.Element):
        to.append(content)
    else:
        for one in content:
            _add(to, one)
