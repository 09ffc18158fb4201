"""Reading a page as a browser would, strictly: nesting, ids, links, text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

# Elements that have no content and no end tag (HTML Living Standard, 13.1.2).
VOID = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source"),
    *("track", "wbr"),
}


@dataclass
class Node:
    """An element of a page."""

    tag: str
    attributes: dict[str, str]
    children: list[Node] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)  # its own text, and that of what is in it

    def all(self, tag: str = "", class_: str = "") -> list[Node]:
        """Elements in it, in order, of this tag and with this class."""
        return [
            node
            for node in self.walk()
            if (not tag or node.tag == tag)
            and (not class_ or class_ in node.attributes.get("class", "").split())
        ]

    def walk(self) -> Iterator[Node]:
        for child in self.children:
            yield child
            yield from child.walk()

    @property
    def text(self) -> str:
        return " ".join("".join(self.parts).split())


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert tag not in VOID, f"</{tag}>"
        assert tag == self.open[-1].tag, f"</{tag}> where <{self.open[-1].tag}> is open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for node in self.open:
            node.parts.append(data)


def read_page(page: bytes) -> Node:
    """The elements of a page; AssertionError where one is not closed, or closed elsewhere."""
    reader = _Reader()
    reader.feed(page.decode("utf-8"))
    reader.close()
    assert [reader.root] == reader.open, f"<{reader.open[-1].tag}> is not closed"
    return reader.root
