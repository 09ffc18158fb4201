"""What all pictures of a page have in common: a title and a description for who cannot see them."""

from __future__ import annotations

from kdtr.conformance.report_files.html_elements import Content, Element, element


def picture(
    ident: str, title: str, description: str, width: float, height: float, *content: Content
) -> Element:
    """An image of its own size in pixels, named for screen readers; `ident` is unique in a page."""
    return element(
        "svg",
        element("title", title, id=f"{ident}-title"),
        element("desc", description, id=f"{ident}-desc"),
        content,
        id=ident,
        role="img",
        aria_labelledby=f"{ident}-title {ident}-desc",
        viewBox=f"0 0 {px(width)} {px(height)}",
        width=px(width),
        height=px(height),
    )


def words(x: float, y: float, text: object, class_: str = "", anchor: str = "middle") -> Element:
    """A line of text, its baseline at y."""
    return element("text", str(text), x=px(x), y=px(y), text_anchor=anchor, class_=class_ or None)


def box(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Element:
    """A rectangle; `title` is shown where a pointer rests on it."""
    return element(
        "rect",
        element("title", title) if title else None,
        x=px(x),
        y=px(y),
        width=px(width),
        height=px(height),
        class_=class_,
    )


def px(value: float) -> str:
    """Short, and the same everywhere.

    >>> px(3.0), px(2.5)
    ('3', '2.5')
    """
    return f"{value:.1f}".removesuffix(".0")
